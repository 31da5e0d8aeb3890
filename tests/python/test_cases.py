"""Faults that users of compressed KV caches reported elsewhere, each as a small test with the right value.

Oracles: E is float64 attention over the raw tokens that ought to be visible; S is a fresh store that was
fed exactly the tokens that ought to be there (equal bits); Q is the relative Frobenius error of an output
against E. A signature is a random unit vector in the values of one origin, found again as the largest cosine.
"""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import DIGITS, assert_attention, make_store, softmax_attention

from tests.reference import phasor

Floats = np.ndarray[Any, Any]

BITS = [1, 2, 3, 4, 5, 6, 7, 8]
# Mean squared error of a unit gaussian at 1 to 8 bits.
CODE_ERROR = [0.3634, 0.1175, 0.0346, 0.0095, 0.00252, 0.00066, 0.00031, 0.00009]
TQ2, TQ4, TQ8 = (kvrs.TurboQuant(bits=bits) for bits in (2, 4, 8))
NO_WINDOW = {"sinks": 0, "recent": 0}


def store_of(
    heads: tuple[int, int], dim: int, keys: Any, values: Any = None, fields: Any = None, **settings: Any
) -> kvrs.KVStore:
    """Return a store of one layer without rotary embedding."""
    shape = {"layers": 1, "query_heads": heads[0], "kv_heads": heads[1], "head_dim": dim, "rope": None}
    shape = kvrs.ModelShape(**(shape | (fields or {})))
    return kvrs.KVStore(kvrs.Plan(shape, keys, values or keys, **settings))


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    """Return gaussian float32 numbers that float16 holds exactly."""
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32)


def signatures(rng: np.random.Generator, count: int, dim: int) -> Floats:
    """Return one random unit vector per origin."""
    x = rng.standard_normal((count, dim))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)


def oracle_e(q: Floats, k: Floats, v: Floats) -> Floats:
    """Return causal attention ``[Hq, Tq, Dv]`` of the last queries of one row over its raw tokens."""
    group, first = len(q) // len(k), k.shape[1] - q.shape[1]
    return np.stack([softmax_attention(q[h], k[h // group], v[h // group], first)[0] for h in range(len(q))])


def oracle_q(got: Any, want: Floats) -> float:
    """Return the relative Frobenius error."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def codes(store: kvrs.KVStore, seq: int) -> list[bytes]:
    """Return everything that a sequence of a store decodes to, as bytes."""
    layers = enumerate(store.plan.shape.spec())
    places = [(layer, head) for layer, fields in layers for head in range(fields["kv_heads"])]
    return [part.tobytes() for layer, head in places for part in store.decode(layer, seq, head)]


def raw_tokens(store: kvrs.KVStore) -> float:
    """Return how many tokens of each head are uncompressed, one sequence and one layer."""
    fields = store.plan.shape.spec()[0]
    row = 2 * (fields["key_dim"] + fields["value_dim"])
    return store.stats().bytes_window / (row * fields["kv_heads"])


# --- B01: a constant bias in a few key channels ---------------------------------------------------

BIAS = np.zeros((2, 128), np.float32)
BIAS[:, ::16] = 605 / np.sqrt(8) * np.where(np.arange(8) % 2, 1, -1)


def biased_keys(rng: np.random.Generator, bias: Floats, rope: kvrs.Rope | None) -> Floats:
    """Return 512 gaussian keys a head plus the bias, rotated if there is a rotary embedding."""
    k = rng.standard_normal((2, 512, 128)) + bias[:, None]
    if rope is not None:
        frequencies = (rope.theta ** (-np.arange(64) / 64)).astype(np.float32)
        turn = phasor.Rope(128, frequencies)
        k = np.stack([phasor.rotate(turn, head, np.arange(512)) for head in k])
    return k[None].astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("rope", [None, kvrs.Rope(1e6)], ids=["plain", "rope"])
@pytest.mark.parametrize("bias", [BIAS, 0 * BIAS], ids=["bias605", "bias0"])
def test_case_b01_a_constant_bias_in_the_keys_does_not_spoil_the_output(
    bias: Floats, rope: kvrs.Rope | None, rng: np.random.Generator
) -> None:
    k, v, q = biased_keys(rng, bias, rope), normal(rng, 1, 2, 512, 128), normal(rng, 1, 8, 32, 128)
    store = store_of((8, 2), 128, TQ4, kvrs.Raw16(), {"rope": rope}, key_offset=[bias])
    seqs = store.new()
    store.append(0, k, v, seqs)
    assert oracle_q(np.asarray(store.attend(0, q, seqs))[0], oracle_e(q[0], k[0], v[0])) <= 0.15


def test_case_b01_without_an_offset_the_store_names_layer_and_head(rng: np.random.Generator) -> None:
    one_head = BIAS * np.array([[0.0], [1.0]], np.float32)
    v, q = normal(rng, 1, 2, 512, 128), normal(rng, 1, 8, 32, 128)
    store = store_of((8, 2), 128, TQ4, kvrs.Raw16(), {"layers": 2})
    seqs = store.new()
    store.append(0, biased_keys(rng, 0 * BIAS, None), v, seqs)
    k = biased_keys(rng, one_head, None)
    with pytest.warns(kvrs.KVWarning, match=r"layer 1, head 1\b.*key_offset") as caught:
        store.append(1, k, v, seqs)
    assert len(caught) == 1
    # The head that was named is the one whose output is rubbish.
    got, want = np.asarray(store.attend(1, q, seqs))[0], oracle_e(q[0], k[0], v[0])
    assert oracle_q(got[:4], want[:4]) <= 0.15
    assert oracle_q(got[4:], want[4:]) > 0.5


# --- B03: zero and constant vectors ---------------------------------------------------------------


def degenerate() -> tuple[Floats, Floats]:
    """Return keys (zeros, 1e-30, 7.0, one-hot, in turn) and values (zeros, -3.0) of 70 tokens."""
    k, v = np.zeros((1, 1, 70, 64), np.float32), np.zeros((1, 1, 70, 64), np.float32)
    k[..., 1::4, :], k[..., 2::4, :], k[..., 3::4, 5] = 1e-30, 7.0, 1.0
    v[..., 1::2, :] = -3.0
    return k, v


@pytest.mark.parametrize("window", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", [kvrs.Raw16(), *(kvrs.TurboQuant(bits=b) for b in BITS)], ids=str)
def test_case_b03_zero_and_constant_vectors_stay_finite(codec: Any, window: str) -> None:
    k, v = degenerate()
    store = store_of((2, 1), 64, codec, **NO_WINDOW, window_dtype=window)
    seqs = store.new()
    store.append(0, k, v, seqs)
    keys, values, _ = store.decode(0, seqs[0], 0)
    assert np.isfinite([keys, values]).all()
    assert not keys[::4].any(), "zero rows come back as zeros"
    assert not values[::2].any(), "zero rows come back as zeros"
    assert np.abs(keys[1::4]).max() <= 6e-8
    error = 0.0 if isinstance(codec, kvrs.Raw16) else CODE_ERROR[int(codec.bits) - 1]
    for got, want in (
        (keys[2::4], k[0, 0, 2::4]),
        (keys[3::4], k[0, 0, 3::4]),
        (values[1::2], v[0, 0, 1::2]),
    ):
        assert oracle_q(got, want) <= 1.5 * np.sqrt(error / (1 - error))
    q = np.zeros((1, 2, 2, 64), np.float32)
    q[0, 1] = 1.0
    out, lse = (np.asarray(x) for x in store.attend(0, q, seqs, return_lse=True))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert_attention(out[0, 0, 1], values.mean(0))
    assert oracle_q(out[0, 0, 1], v[0, 0].mean(0)) <= 1.5 * np.sqrt(error / (1 - error)) + 1e-5 + DIGITS


@pytest.mark.parametrize("codec", [kvrs.Raw16(), *(kvrs.TurboQuant(bits=b) for b in BITS)], ids=str)
def test_case_b03_a_sequence_of_zeros_gives_zeros(codec: Any) -> None:
    store = store_of((2, 1), 64, codec, **NO_WINDOW)
    seqs = store.new()
    zeros = np.zeros((1, 1, 50, 64), np.float32)
    store.append(0, zeros, zeros, seqs)
    out, lse = store.attend(0, np.ones((1, 2, 1, 64), np.float32), seqs, return_lse=True)
    assert not np.asarray(out).any()
    np.testing.assert_allclose(np.asarray(lse), np.log(50), rtol=1e-6)


# --- B08: head sizes ------------------------------------------------------------------------------


def head_size_error(dim: int, value_dim: int, rng: np.random.Generator) -> float:
    """Return the output error of 4 bits at T = 33, of which 32 tokens are encoded."""
    store = store_of((16, 4), dim, TQ4, fields={"value_dim": value_dim}, **NO_WINDOW)
    k, v, q = normal(rng, 1, 4, 33, dim), normal(rng, 1, 4, 33, value_dim), normal(rng, 1, 16, 8, dim)
    seqs = store.new()
    store.append(0, k, v, seqs)
    return oracle_q(np.asarray(store.attend(0, q, seqs))[0], oracle_e(q[0], k[0], v[0]))


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [*((d, d) for d in (64, 80, 96, 100, 112, 192, 256, 512)), (192, 128), (128, 100)],
)
def test_case_b08_any_head_size_has_the_error_of_128_channels(
    dim: int, value_dim: int, rng: np.random.Generator
) -> None:
    error = head_size_error(dim, value_dim, rng)
    assert error <= 0.20
    assert error <= 1.3 * head_size_error(128, 128, rng)


@pytest.mark.parametrize("dim", [64, 80, 96, 100, 112, 128, 192, 256, 512])
def test_case_b08_eight_bits_rebuild_any_head_size_within_a_percent(
    dim: int, rng: np.random.Generator
) -> None:
    store = store_of((1, 1), dim, TQ8, **NO_WINDOW)
    seqs = store.new()
    k, v = normal(rng, 1, 1, 33, dim), normal(rng, 1, 1, 33, dim)
    store.append(0, k, v, seqs)
    keys, values, _ = store.decode(0, seqs[0], 0)
    assert 0 < oracle_q(keys, k[0, 0]) <= 0.01
    assert 0 < oracle_q(values, v[0, 0]) <= 0.01


@pytest.mark.parametrize("dim", [0, 1025])
def test_case_b08_a_head_size_that_cannot_work_is_named_by_the_shape(dim: int) -> None:
    with pytest.raises(kvrs.PlanError, match=rf"head_dim.*{dim}"):
        kvrs.ModelShape(layers=1, query_heads=1, kv_heads=1, head_dim=dim)


# --- B10: grouped queries -------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(32, 8), (24, 4), (21, 3), (14, 2), (8, 1), (8, 8), (7, 1)])
@pytest.mark.parametrize("through", ["attend", "extend"])
def test_case_b10_each_query_head_reads_its_own_key_value_head(
    heads: tuple[int, int], through: str, rng: np.random.Generator
) -> None:
    query_heads, kv_heads = heads
    marks = signatures(rng, kv_heads, 64)
    v = np.repeat(marks[None, :, None], 33, axis=2)
    k, q = normal(rng, 1, kv_heads, 33, 64), normal(rng, 1, query_heads, 33, 64)
    store = store_of(heads, 64, TQ4, **NO_WINDOW)
    seqs = store.new()
    if through == "attend":
        store.append(0, k, v, seqs)
        out = np.asarray(store.attend(0, q, seqs))[0]
    else:
        out = np.asarray(store.extend(0, q, k, v, seqs))[0]
    cosine = out @ marks.T / np.linalg.norm(out, axis=-1, keepdims=True)
    owner = np.arange(query_heads) // (query_heads // kv_heads)
    assert (cosine.argmax(-1) == owner[:, None]).all()
    assert np.take_along_axis(cosine, owner[:, None, None], axis=2).min() >= 0.9


def test_case_b10_bytes_follow_the_key_value_heads_only(rng: np.random.Generator) -> None:
    k, v = normal(rng, 1, 8, 300, 128), normal(rng, 1, 8, 300, 128)
    totals = []
    for query_heads in (32, 8):
        store = store_of((query_heads, 8), 128, TQ4)
        store.append(0, k, v, store.new())
        totals.append(store.stats().bytes_total)
    assert abs(totals[0] - totals[1]) <= 0.05 * totals[1]


@pytest.mark.parametrize("heads", [(8, 3), (4, 8), (7, 2)])
def test_case_b10_query_heads_that_do_not_divide_are_an_error(heads: tuple[int, int]) -> None:
    with pytest.raises(kvrs.PlanError, match=rf"query_heads.*{heads[0]}.*multiple of kv_heads = {heads[1]}"):
        kvrs.ModelShape(layers=1, query_heads=heads[0], kv_heads=heads[1], head_dim=64)


# --- B12: the window drains -----------------------------------------------------------------------

SIZES = {
    "hundreds": [100, 100, 100],
    "one_over": [129],
    "singles": [1] * 1000,
    "prompt_then_singles": [200] + [1] * 300,
    "groups_and_odd": [16, 17, 15, 128, 144, 1, 143, 16],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("sinks", [0, 4])
def test_case_b12_the_window_drains_whatever_the_sizes_of_the_calls(
    sizes: list[int], sinks: int, rng: np.random.Generator
) -> None:
    store = store_of((1, 1), 64, TQ2, sinks=sinks, recent=128)
    seqs, length = store.new(), 0
    k, v = normal(rng, 1, 1, 200, 64), normal(rng, 1, 1, 200, 64)
    for size in sizes:
        at = length % (201 - size)
        store.append(0, k[:, :, at : at + size], v[:, :, at : at + size], seqs)
        length += size
        sealed = 16 * (max(0, length - sinks - 128) // 16)
        assert raw_tokens(store) == length - sealed
        assert length - sealed <= sinks + 128 + 15
    assert store.stats().tokens_encoded == sealed


def test_case_b12_sealed_tokens_are_packed_and_differ_from_what_came(rng: np.random.Generator) -> None:
    store = store_of((1, 1), 128, TQ2, sinks=0, recent=32)
    seqs = store.new()
    k, v = normal(rng, 1, 1, 200, 128), normal(rng, 1, 1, 200, 128)
    for start, stop in [(0, 32), *((i, i + 1) for i in range(32, 200))]:
        store.append(0, k[:, :, start:stop], v[:, :, start:stop], seqs)
    stats = store.stats()
    # 160 of 200 tokens: 32 bytes of codes and 2 of scale for each key and value, 512 for a raw pair.
    assert stats.bytes_codes == 2 * 160 * 32
    assert stats.bytes_scales == 2 * 160 * 2
    assert stats.bytes_window == 40 * 512
    for got, came in zip(store.decode(0, seqs[0], 0)[:2], (k[0, 0], v[0, 0]), strict=True):
        assert (np.linalg.norm(got[:160] - came[:160], axis=1) > 0.1).all()
        assert (got[160:] == came[160:]).all()


# --- B19: the second prompt on the same store -----------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "free", "truncate"])
def test_case_b19_the_second_prompt_is_as_in_a_fresh_store(how: str, rng: np.random.Generator) -> None:
    marks = signatures(rng, 2, 64)

    def run(store: kvrs.KVStore, seqs: list[int], prompt: int, mark: Floats, seed: int) -> tuple[Any, ...]:
        draw = np.random.default_rng(seed)
        for tokens in [prompt] + [1] * 20:
            k, q = normal(draw, 1, 2, tokens, 64), normal(draw, 1, 4, tokens, 64)
            out = store.extend(0, q, k, np.broadcast_to(mark, k.shape), seqs)
        return codes(store, seqs[0]), np.asarray(out), store.stats().to_dict()

    fresh = store_of((4, 2), 64, TQ4)
    used = store_of((4, 2), 64, TQ4)
    seqs = used.new()
    run(used, seqs, 795, marks[0], 1)
    if how == "truncate":
        used.truncate(seqs[0], 0)
    else:
        used.reset() if how == "reset" else used.free(seqs[0])
        with pytest.raises(kvrs.SequenceError, match=str(seqs[0])):
            used.length(seqs[0])
        seqs = used.new()
    assert used.stats().bytes_total == 0
    got, want = run(used, seqs, 797, marks[1], 2), run(fresh, fresh.new(), 797, marks[1], 2)
    assert got[0] == want[0]
    np.testing.assert_array_equal(got[1], want[1])
    # Encodings are counted over the life of the store; all else is that of the second run.
    assert got[2] | {"tokens_encoded": 0} == want[2] | {"tokens_encoded": 0}
    assert used.length(seqs[0]) == 817
    direction = got[1] / np.linalg.norm(got[1], axis=-1, keepdims=True)
    assert (np.abs(direction @ marks[0] - marks[0] @ marks[1]) < 0.2).all()
    assert (direction @ marks[1] > 0.9).all()


# --- B21: left padding ----------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [1000.0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("codec", [kvrs.Raw16(), TQ2, TQ4], ids=str)
@pytest.mark.parametrize("windows", [NO_WINDOW, {"sinks": 4, "recent": 16}], ids=["bare", "windows"])
def test_case_b21_padding_has_no_part_in_codes_scales_or_outputs(
    padding: float, codec: Any, windows: dict[str, int], rng: np.random.Generator
) -> None:
    k, v, q = normal(rng, 2, 2, 128, 64), normal(rng, 2, 2, 128, 64), normal(rng, 2, 4, 128, 64)
    mask = np.ones((2, 128), bool)
    mask[0, :91] = False
    k[0, :, :91], v[0, :, :91], q[0, :, :91] = padding, padding, padding
    padded, alone = (store_of((4, 2), 64, codec, **windows) for _ in range(2))
    both, one = padded.new(2), alone.new()
    out = np.asarray(padded.extend(0, q, k, v, both, mask=mask))
    want = np.asarray(alone.extend(0, q[:1, :, 91:], k[:1, :, 91:], v[:1, :, 91:], one))
    assert padded.length(both[0]) == 37
    assert codes(padded, both[0]) == codes(alone, one[0])
    assert not out[0, :, :91].any(), "padding gives zeros"
    np.testing.assert_allclose(out[0, :, 91:], want[0], atol=1e-5)
    step = normal(rng, 2, 4, 1, 64)
    got, want = padded.attend(0, step, both), alone.attend(0, step[:1], one)
    np.testing.assert_array_equal(np.asarray(got)[0], np.asarray(want)[0])


# --- B38: rows of a batch -------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("rows", [4, 32])
def test_case_b38_equal_rows_give_equal_bits_at_any_batch_size(
    rows: int, dim: int, rng: np.random.Generator
) -> None:
    k, v, q = normal(rng, 1, 1, 70, dim), normal(rng, 1, 1, 70, dim), normal(rng, 1, 2, 70, dim)
    results = []
    for count in (1, rows):
        store = store_of((2, 1), dim, TQ4, **NO_WINDOW)
        seqs = store.new(count)
        prompt, step = (np.repeat(x, count, axis=0) for x in (k, q)), np.repeat(q[:, :, :3], count, axis=0)
        keys, queries = prompt
        out = store.extend(0, queries, keys, np.repeat(v, count, axis=0), seqs)
        answers = np.concatenate([np.asarray(out), np.asarray(store.attend(0, step, seqs))], axis=2)
        assert len({answer.tobytes() for answer in answers}) == 1, "equal rows, equal bits"
        assert len({tuple(codes(store, seq)) for seq in seqs}) == 1
        results.append((codes(store, seqs[0]), answers[0]))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)


def test_case_b38_a_group_never_spans_rows(rng: np.random.Generator) -> None:
    lengths, columns = (5, 27), 27
    k, v = normal(rng, 2, 2, columns, 64), normal(rng, 2, 2, columns, 64)
    k[1] *= 1000
    mask = np.arange(columns)[None, :] < np.array(lengths)[:, None]
    together, alone = (store_of((4, 2), 64, TQ4, **NO_WINDOW) for _ in range(2))
    both, one = together.new(2), alone.new()
    for _ in range(5):
        together.append(0, k, v, both, mask=mask)
        alone.append(0, k[:1, :, :5], v[:1, :, :5], one)
    assert together.length(both[0]) == 25
    assert together.length(both[1]) == 135
    assert together.stats().per_layer[0].bytes_codes > 0
    assert codes(together, both[0]) == codes(alone, one[0])
    q = normal(rng, 2, 4, 1, 64)
    got, want = together.attend(0, q, both), alone.attend(0, q[:1], one)
    np.testing.assert_array_equal(np.asarray(got)[0], np.asarray(want)[0])


def test_case_b38_the_order_of_rows_in_a_call_is_that_of_its_ids(rng: np.random.Generator) -> None:
    marks = signatures(rng, 4, 64)
    store = make_store(TQ4, fields={"layers": 1})
    seqs = store.new(4)
    order = [2, 0, 3, 1]
    k = normal(rng, 4, 2, 60, 64)
    v = np.repeat(marks[order][:, None, None], 2, axis=1).repeat(60, axis=2)
    store.append(0, k, v, [seqs[i] for i in order])
    out = np.asarray(store.attend(0, normal(rng, 4, 4, 1, 64), seqs))[:, :, 0]
    assert ((out @ marks.T).argmax(-1) == np.arange(4)[:, None]).all()
