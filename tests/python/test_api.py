"""What a store means: indices and positions, masks, attention against float64, and the verbs."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import DIGITS, assert_attention, contents, expected, make_store, tensors

TQ4 = kvrs.TurboQuant(bits=4)


def fill(
    store: kvrs.KVStore, seqs: Any, rng: np.random.Generator, tokens: int, **keywords: Any
) -> np.ndarray:
    """Append random tokens to every layer of the given sequences and return the keys."""
    k, v = tensors(rng, len(seqs), tokens), tensors(rng, len(seqs), tokens)
    for layer in range(store.plan.shape.layers):
        store.append(layer, k, v, seqs, **keywords)
    return k


def test_ids_are_never_used_twice() -> None:
    store = make_store()
    first = store.new(3)
    store.free(first[1])
    store.reset()
    assert not set(first) & set(store.new(3))
    assert store.new(0) == []
    assert len(store.new()) == 1


def test_length_is_the_minimum_over_layers(rng: np.random.Generator) -> None:
    store = make_store()
    seq = store.new()[0]
    k = tensors(rng, 1, 5)
    store.append(0, k, k, seq)
    assert (store.length(seq, 0), store.length(seq, 1), store.length(seq)) == (5, 0, 0)
    store.append(1, k, k, seq)
    assert store.length(seq) == 5


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 200])
def test_raw_tokens_come_back_as_they_were(tokens: int, rng: np.random.Generator) -> None:
    store = make_store()
    seqs = store.new(2)
    k = fill(store, seqs, rng, tokens)
    for row, seq in enumerate(seqs):
        for head in range(2):
            got, _, positions = store.decode(1, seq, head)
            assert np.array_equal(got, k[row, head])
            assert positions.tolist() == list(range(tokens))
            assert got.dtype == np.float32
            assert positions.dtype == np.int64


def test_float32_becomes_float16_and_bfloat16_stays(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    k = torch.from_numpy(rng.standard_normal((1, 2, 20, 64)).astype(np.float32))
    for tensor, kept in ((k, k.half()), (k.bfloat16(), k.bfloat16())):
        store = make_store()
        seqs = store.new()
        store.append(0, tensor, tensor, seqs)
        assert np.array_equal(store.decode(0, seqs[0], 1)[0], kept[0, 1].float().numpy())


def test_sinks_and_recent_tokens_stay_exact_and_the_rest_is_encoded(rng: np.random.Generator) -> None:
    store = make_store(TQ4, sinks=2, recent=8)
    seqs = store.new()
    k = fill(store, seqs, rng, 200)
    got = store.decode(0, seqs[0], 0)[0]
    assert np.array_equal(got[:2], k[0, 0, :2])
    assert np.array_equal(got[-8:], k[0, 0, -8:])
    middle = np.linalg.norm(got[2:150] - k[0, 0, 2:150]) / np.linalg.norm(k[0, 0, 2:150])
    assert 0.02 < middle < 0.25
    assert store.stats().tokens_encoded > 0


def test_a_start_position_is_given_once_and_indices_do_not_follow_it(rng: np.random.Generator) -> None:
    store = make_store(TQ4)
    seq = store.new()[0]
    k = tensors(rng, 1, 100)
    for layer in range(2):
        store.append(layer, k, k, seq, positions=np.arange(1000, 1100)[None])
        store.append(layer, k[:, :, :3], k[:, :, :3], seq)
    assert store.kept_positions(seq, 0, 1).tolist() == list(range(1000, 1103))
    assert store.length(seq) == 103
    store.truncate(seq, 101)
    assert store.kept_positions(seq, 0, 1).tolist() == list(range(1000, 1101))


def test_masked_columns_are_not_stored_whatever_they_hold(rng: np.random.Generator) -> None:
    store = make_store()
    seqs = store.new(2)
    mask = np.array([[False, True, False, True, True], [True, False, False, False, True]])
    k = tensors(rng, 2, 5)
    dirty = np.where(mask[:, None, :, None], k, np.nan).astype(np.float32)
    q = tensors(rng, 2, 5, heads=4)
    out = store.extend(0, np.where(mask[:, None, :, None], q, np.inf), dirty, dirty, seqs, mask=mask).numpy()
    for row, seq in enumerate(seqs):
        assert np.array_equal(store.decode(0, seq, 0)[0], k[row, 0][mask[row]])
        assert store.kept_positions(seq, 0, 0).tolist() == list(range(mask[row].sum()))
        assert not out[row][:, ~mask[row]].any()
    assert np.isfinite(out).all()


def test_padding_on_any_side_gives_the_result_of_the_row_alone(codec: Any, rng: np.random.Generator) -> None:
    tokens, width = [3, 40, 70], 70
    k, v, q = tensors(rng, 3, width), tensors(rng, 3, width), tensors(rng, 3, width, heads=4)
    mask = np.zeros((3, width), bool)
    for row, n in enumerate(tokens):
        mask[row, rng.permutation(width)[:n]] = True
    store = make_store(codec)
    seqs = store.new(3)
    together = store.extend(0, q, k, v, seqs, mask=mask).numpy()
    for row in range(3):
        alone = make_store(codec)
        parts = [x[row : row + 1, :, mask[row]] for x in (q, k, v)]
        out = alone.extend(0, *parts, alone.new()).numpy()
        assert_attention(together[row][:, mask[row]], out[0].astype(np.float64))
        for head in range(2):
            pairs = zip(store.decode(0, seqs[row], head), alone.decode(0, 0, head), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"scale": 0.3},
        {"scale": -0.1},
        {"softcap": 2.0},
        {"sink_logits": np.array([0.0, 3.0, -5.0, 1.0], np.float32)},
        {"causal": False, "scale": 0.2, "softcap": 5.0, "sink_logits": np.ones(4, np.float32)},
    ],
    ids=lambda options: "_".join(options) or "defaults",
)
@pytest.mark.parametrize("tokens", [5, 203])
def test_attend_equals_float64_attention_on_what_is_decoded(
    codec: Any, tokens: int, options: dict[str, Any], rng: np.random.Generator
) -> None:
    store = make_store(codec)
    seqs = store.new(2)
    fill(store, seqs, rng, tokens)
    q = tensors(rng, 2, 4, heads=4)
    out, lse = store.attend(1, q, seqs, return_lse=True, **options)
    for row, seq in enumerate(seqs):
        want, want_lse = expected(store, 1, seq, q[row], **options)
        assert_attention(out.numpy()[row], want)
        assert np.abs(lse.numpy()[row] - want_lse).max() < 1e-4 + DIGITS


def test_a_sliding_layer_sees_its_window_only(codec: Any, rng: np.random.Generator) -> None:
    store = make_store(codec, fields={"sliding": [16, None]})
    seqs = store.new()
    for tokens in (1, 30, 100):
        k, v, q = tensors(rng, 1, tokens), tensors(rng, 1, tokens), tensors(rng, 1, tokens, heads=4)
        out = [store.extend(layer, q, k, v, seqs).numpy() for layer in range(2)]
    probe = tensors(rng, 1, 1, heads=4)
    assert np.abs(out[0] - out[1]).max() > 1e-3
    k, v, positions = store.decode(0, seqs[0], 0)
    assert positions[-1] == 130
    inside = positions > 130 - 16
    scores = probe[0, 0, 0].astype(np.float64) @ k[inside].T.astype(np.float64) / 8
    weights = np.exp(scores - scores.max())
    want = weights @ v[inside] / weights.sum()
    assert_attention(store.attend(0, probe, seqs).numpy()[0, 0, 0], want)


@pytest.mark.parametrize("past", [0, 1, 150])
def test_extend_attends_on_the_encoded_past_and_on_its_own_tokens_exactly(
    codec: Any, past: int, rng: np.random.Generator
) -> None:
    store = make_store(codec)
    seqs = store.new(2)
    fill(store, seqs, rng, past)
    q, k, v = tensors(rng, 2, 37, heads=4), tensors(rng, 2, 37), tensors(rng, 2, 37)
    want = [expected(store, 0, seq, q[row], own=(k[row], v[row])) for row, seq in enumerate(seqs)]
    out, lse = store.extend(0, q, k, v, seqs, return_lse=True)
    for row in range(2):
        assert_attention(out.numpy()[row], want[row][0])
        assert np.abs(lse.numpy()[row] - want[row][1]).max() < 1e-4 + DIGITS


def test_extend_leaves_the_store_as_append_does(codec: Any, rng: np.random.Generator) -> None:
    one, two = make_store(codec), make_store(codec)
    a, b = one.new(2), two.new(2)
    for tokens in (70, 1, 1, 20):
        q, k, v = tensors(rng, 2, tokens, heads=4), tensors(rng, 2, tokens), tensors(rng, 2, tokens)
        for layer in range(2):
            one.extend(layer, q, k, v, a)
            two.append(layer, k, v, b, q=q)
    assert contents(one, a) == contents(two, b)


def test_attending_changes_nothing(codec: Any, rng: np.random.Generator) -> None:
    store = make_store(codec)
    seqs = store.new()
    fill(store, seqs, rng, 100)
    before = contents(store, seqs)
    first = store.attend(0, tensors(rng, 1, 2, heads=4), seqs)
    assert contents(store, seqs) == before
    again = store.attend(0, tensors(np.random.default_rng(7), 1, 2, heads=4), seqs)
    assert again.numpy().shape == first.numpy().shape


def test_a_query_that_sees_nothing_gives_zeros_and_minus_infinity(rng: np.random.Generator) -> None:
    store = make_store()
    seqs = store.new(2)
    q = tensors(rng, 2, 3, heads=4)
    out, lse = store.attend(0, q, seqs, causal=False, return_lse=True)
    assert not out.numpy().any()
    assert np.isneginf(lse.numpy()).all()
    sink = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    out = store.attend(0, q, seqs, causal=False, sink_logits=sink)
    assert not out.numpy().any()


def test_masked_query_rows_give_zeros_and_the_others_stand_at_the_end(
    codec: Any, rng: np.random.Generator
) -> None:
    store = make_store(codec)
    seqs = store.new()
    fill(store, seqs, rng, 60)
    q = tensors(rng, 1, 5, heads=4)
    mask = np.array([[True, False, True, False, False]])
    out, lse = store.attend(0, q, seqs, mask=mask, return_lse=True)
    assert not out.numpy()[0][:, ~mask[0]].any()
    assert np.isneginf(lse.numpy()[0][:, ~mask[0]]).all()
    want, _ = expected(store, 0, seqs[0], q[0][:, mask[0]])
    assert_attention(out.numpy()[0][:, mask[0]], want)


def test_more_causal_queries_than_tokens_are_an_error(rng: np.random.Generator) -> None:
    store = make_store()
    seqs = store.new()
    fill(store, seqs, rng, 2)
    q = tensors(rng, 1, 3, heads=4)
    with pytest.raises(kvrs.KVError, match="3"):
        store.attend(0, q, seqs)
    store.attend(0, q, seqs, causal=False)
    store.attend(0, q, seqs, mask=np.array([[True, False, True]]))


def test_values_may_have_another_size_than_keys(codec: Any, rng: np.random.Generator) -> None:
    store = make_store(codec, fields={"value_dim": 128})
    seqs = store.new()
    k, v, q = tensors(rng, 1, 90), tensors(rng, 1, 90, dim=128), tensors(rng, 1, 90, heads=4)
    out = store.extend(0, q, k, v, seqs)
    assert out.shape == (1, 4, 90, 128)
    want, _ = expected(store, 0, seqs[0], q[0, :, -2:])
    assert_attention(store.attend(0, q[:, :, -2:], seqs).numpy()[0], want)


def test_one_id_may_stand_for_a_list(rng: np.random.Generator) -> None:
    store = make_store()
    seq = store.new()[0]
    k = tensors(rng, 1, 4)
    store.append(0, k, k, seq)
    store.append(0, k, k, (np.int64(seq),))
    assert store.length(seq, 0) == 8


def test_case_b15_truncate_at_and_over_the_edges(codec: Any, rng: np.random.Generator) -> None:
    for n, length in ((0, 0), (3, 3), (5, None), (-1, None)):
        store = make_store(codec)
        seqs = store.new()
        fill(store, seqs, rng, 3)
        before = contents(store, seqs)
        if length is None:
            with pytest.raises(kvrs.KVError, match=f"is {n}; allowed"):
                store.truncate(seqs[0], n)
            assert contents(store, seqs) == before
        else:
            store.truncate(seqs[0], n)
        left = store.length(seqs[0])
        assert left == (3 if length is None else length)
        k = fill(store, seqs, rng, 1)
        got, _, positions = store.decode(1, seqs[0], 0)
        assert positions.tolist() == list(range(left + 1))
        assert np.array_equal(got[-1], k[0, 0, 0])


def test_truncate_brings_uneven_layers_together(rng: np.random.Generator) -> None:
    store = make_store(TQ4)
    seqs = store.new()
    fill(store, seqs, rng, 100)
    k = tensors(rng, 1, 5)
    store.append(0, k, k, seqs)
    store.truncate(seqs[0], 100)
    assert [store.length(seqs[0], layer) for layer in range(2)] == [100, 100]


def test_free_gives_bytes_back_and_leaves_the_others_alone(rng: np.random.Generator) -> None:
    store = make_store(TQ4)
    seqs = store.new(2)
    fill(store, seqs, rng, 300)
    kept = store.decode(0, seqs[1], 0)
    used = store.stats()
    store.free(seqs[0])
    assert store.stats().tokens_kept == used.tokens_kept // 2
    assert np.array_equal(store.decode(0, seqs[1], 0)[0], kept[0])
    with pytest.raises(kvrs.SequenceError):
        store.length(seqs[0])
    store.reset()
    stats = store.stats()
    assert (stats.sequences, stats.tokens_kept, stats.bytes_codes, stats.bytes_window) == (0, 0, 0, 0)
    store.check()


def test_keep_moves_the_chosen_tokens_and_leaves_index_and_position(rng: np.random.Generator) -> None:
    store = make_store(TQ4, sinks=2, recent=8)
    seqs = store.new()
    fill(store, seqs, rng, 200)
    before = [store.decode(0, seqs[0], head)[0] for head in range(2)]
    chosen = [np.arange(10, 60, 7), [100, 101, 150]]
    store.keep(seqs[0], 0, chosen)
    for head in range(2):
        positions = store.kept_positions(seqs[0], 0, head)
        assert positions.tolist() == sorted(positions.tolist())
        assert set(np.asarray(chosen[head]).tolist()) <= set(positions.tolist())
        assert {0, 1, *range(192, 200)} <= set(positions.tolist())
        assert not {20, 70, 120} & set(positions.tolist())
        got, _, again = store.decode(0, seqs[0], head)
        assert np.array_equal(again, positions)
        assert np.array_equal(got, before[head][positions])
    assert store.length(seqs[0]) == 200
    assert store.kept_positions(seqs[0], 1, 0).tolist() == list(range(200))
    fill(store, seqs, rng, 1)
    assert store.kept_positions(seqs[0], 0, 0)[-1] == 200


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_into_fills_rows_and_zeros_behind_them(dtype: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    store = make_store(TQ4)
    seqs = store.new(2)
    mask = np.arange(150)[None] < np.array([[150], [40]])
    fill(store, seqs, rng, 150, mask=mask)
    k_out = torch.full((2, 2, 160, 64), 7.0, dtype=getattr(torch, dtype))
    v_out = torch.full_like(k_out, 7.0)
    assert store.decode_into(0, seqs, k_out, v_out) == [150, 40]
    for row, n in enumerate((150, 40)):
        for head in range(2):
            k, v, _ = store.decode(0, seqs[row], head)
            assert torch.equal(k_out[row, head, :n], torch.from_numpy(k).to(k_out.dtype))
            assert torch.equal(v_out[row, head, :n], torch.from_numpy(v).to(k_out.dtype))
            assert not k_out[row, head, n:].any()
    with pytest.raises(kvrs.ArgumentError, match="v_out"):
        store.decode_into(0, seqs, k_out, k_out)
    with pytest.raises(kvrs.ShapeError, match="k_out"):
        store.decode_into(0, seqs, k_out[:, :, :149], v_out[:, :, :149])


def test_rows_of_a_batch_do_not_touch_each_other(codec: Any, rng: np.random.Generator) -> None:
    k, v, q = (np.repeat(tensors(rng, 1, 90, heads=h), 4, axis=0) for h in (2, 2, 4))
    loud = k.copy()
    loud[1] *= 1000
    stores = [make_store(codec) for _ in range(2)]
    outs = [
        store.extend(0, q, x, v, store.new(4)).numpy() for store, x in zip(stores, (k, loud), strict=True)
    ]
    for row in (2, 3):
        assert np.array_equal(outs[0][row], outs[0][0])
        assert np.array_equal(outs[1][row], outs[1][0])
    for seq in (0, 2, 3):
        pairs = zip(stores[0].decode(0, seq, 1), stores[1].decode(0, seq, 1), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_stats_add_up_and_print(rng: np.random.Generator) -> None:
    store = make_store(TQ4)
    fill(store, store.new(3), rng, 300)
    stats = store.stats()
    parts = ("codes", "scales", "window", "tables", "statistics", "slack")
    assert stats.bytes_total == sum(getattr(stats, f"bytes_{part}") for part in parts)
    assert stats.bytes_codes == sum(layer.bytes_codes for layer in stats.per_layer) > 0
    assert (stats.sequences, stats.bytes_capacity, stats.path, len(stats.per_layer)) == (3, None, "dot", 2)
    assert stats.to_dict()["per_layer"][0]["path"] == "dot"
    assert "MiB" in repr(stats)
    assert "3 sequences" in repr(store)
    assert store.device == "cpu"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2**31),
        ("512 MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        ("1e3", None),
        (1 << 22, 1 << 22),
        ("7000000", 7000000),
    ],
)
def test_capacity_is_read_in_bytes(text: Any, count: int | None) -> None:
    if count is None:
        with pytest.raises(kvrs.ArgumentError, match="capacity"):
            make_store(capacity=text)
    else:
        assert make_store(capacity=text).stats().bytes_capacity == count


def test_reserved_tokens_fit_without_an_error(rng: np.random.Generator) -> None:
    store = make_store(TQ4, capacity="64MiB")
    seqs = store.new(2)
    store.reserve(seqs, 1000)
    fill(store, seqs, rng, 1000)
    with pytest.raises(kvrs.CapacityError):
        store.reserve(seqs, 10_000_000)
    assert store.length(seqs[0]) == 1000


def test_a_constant_that_dominates_the_keys_is_warned_of_once(rng: np.random.Generator) -> None:
    store = make_store(TQ4, fields={"rope": None})
    seqs = store.new()
    k = tensors(rng, 1, 400)
    loud = (k * 0.1 + np.where(np.arange(64) == 5, 40.0, 0.0)).astype(np.float32)
    with pytest.warns(kvrs.KVWarning, match=r"layer 0.*head"):
        store.append(0, loud, k, seqs)
    store.append(0, loud, k, seqs)


def test_threads_give_the_bits_of_one_thread(rng: np.random.Generator) -> None:
    store, alone = make_store(TQ4), make_store(TQ4)
    seqs, same = store.new(4), alone.new(4)
    steps = [tensors(rng, 1, 30) for _ in range(8)]
    q = tensors(rng, 1, 30, heads=4)
    failures: list[BaseException] = []

    def work(target: kvrs.KVStore, seq: int) -> None:
        try:
            for k in steps:
                for layer in range(2):
                    target.extend(layer, q, k, k, seq)
                target.stats()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(store, seq)) for seq in seqs]
    for thread in threads:
        thread.start()
    for seq in same:
        work(alone, seq)
    for thread in threads:
        thread.join()
    assert not failures
    got, want = contents(store, seqs), contents(alone, same)
    assert {k: x for k, x in got.items() if k != "stats"} == {k: x for k, x in want.items() if k != "stats"}


def test_the_number_of_threads_is_set_and_checked() -> None:
    before = kvrs.get_num_threads()
    assert before >= 1
    kvrs.set_num_threads(1)
    assert kvrs.get_num_threads() == 1
    with pytest.raises(kvrs.ArgumentError):
        kvrs.set_num_threads(0)
    kvrs.set_num_threads(before)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_store_raises_in_a_forked_child() -> None:
    code = """
import os, sys, kvrs
shape = kvrs.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32)
store = kvrs.KVStore(kvrs.Plan(shape, kvrs.Raw16(), kvrs.Raw16()))
seq = store.new()[0]
pid = os.fork()
if pid == 0:
    try:
        store.length(seq)
    except kvrs.KVError as error:
        os._exit(17 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
assert store.length(seq) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_errors_are_also_the_fitting_builtins() -> None:
    pairs = [
        (kvrs.ShapeError, ValueError),
        (kvrs.DTypeError, TypeError),
        (kvrs.DeviceError, ValueError),
        (kvrs.PlanError, ValueError),
        (kvrs.SequenceError, KeyError),
        (kvrs.CapacityError, MemoryError),
        (kvrs.FormatError, OSError),
        (kvrs.ArgumentError, ValueError),
    ]
    for ours, builtin in pairs:
        assert issubclass(ours, kvrs.KVError)
        assert issubclass(ours, builtin)
        assert str(ours("seq is 3; allowed: 4")) == "seq is 3; allowed: 4"
