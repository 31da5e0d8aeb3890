"""Bad input: a typed error that names argument, value and what is allowed, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import assert_attention, contents, expected, make_store, tensors

TQ4 = kvrs.TurboQuant(bits=4)
RNG = np.random.default_rng(11)
K = tensors(RNG, 2, 5)
Q = tensors(RNG, 2, 5, heads=4)


def with_value(value: float) -> np.ndarray:
    k = K.copy()
    k[1, 0, 3, 17] = value
    return k


def extend(**changes: Any) -> Callable[[kvrs.KVStore, list[int]], Any]:
    """Return a call of extend with some arguments replaced; `seqs` may be a function."""

    def call(store: kvrs.KVStore, seqs: list[int]) -> Any:
        arguments = {"layer": 0, "q": Q, "k": K, "v": K, "seqs": seqs} | changes
        arguments["seqs"] = arguments["seqs"](seqs) if callable(arguments["seqs"]) else arguments["seqs"]
        return store.extend(**arguments)

    return call


def attend(**changes: Any) -> Callable[[kvrs.KVStore, list[int]], Any]:
    """Return a call of attend with some arguments replaced."""
    return lambda store, seqs: store.attend(**({"layer": 0, "q": Q, "seqs": seqs} | changes))


def gap(start: int) -> np.ndarray:
    """Return positions of five new tokens after the 40 that are stored, with a hole or a wrong start."""
    positions = np.tile(np.arange(40, 45), (2, 1))
    positions[1] += start
    if start == 0:
        positions[1, 3:] += 1
    return positions


BAD: dict[str, tuple[Callable[[kvrs.KVStore, list[int]], Any], type, list[str]]] = {
    # rank and extents
    "k_rank": (extend(k=K[0]), kvrs.ShapeError, ["k ", "[2, 5, 64]", "4 dimensions"]),
    "q_rank": (extend(q=Q[None]), kvrs.ShapeError, ["q ", "[1, 2, 4, 5, 64]", "4 dimensions"]),
    "kv_heads": (extend(k=K[:, :1], v=K[:, :1]), kvrs.ShapeError, ["k ", "[2, 1, 5, 64]", "2"]),
    "v_heads": (extend(v=K[:, :1]), kvrs.ShapeError, ["v ", "[2, 1, 5, 64]"]),
    "query_heads": (extend(q=Q[:, :3]), kvrs.ShapeError, ["q ", "[2, 3, 5, 64]", "4"]),
    "head_dim": (extend(k=K[..., :32]), kvrs.ShapeError, ["k ", "[2, 2, 5, 32]", "64"]),
    "q_head_dim": (extend(q=Q[..., :32]), kvrs.ShapeError, ["q ", "[2, 4, 5, 32]", "64"]),
    "value_dim": (extend(v=K[..., :32]), kvrs.ShapeError, ["v ", "[2, 2, 5, 32]", "64"]),
    "rows": (extend(seqs=lambda s: s[:1]), kvrs.ShapeError, ["[2, ", "1"]),
    "tokens_of_v": (extend(v=K[:, :, :4]), kvrs.ShapeError, ["v ", "[2, 2, 4, 64]", "5"]),
    "tokens_of_q": (extend(q=Q[:, :, :4]), kvrs.ShapeError, ["q ", "[2, 4, 4, 64]", "5"]),
    # element types
    "k_float64": (extend(k=K.astype(np.float64)), kvrs.DTypeError, ["k ", "float64", "float32"]),
    "v_other_type": (extend(v=K.astype(np.float16)), kvrs.DTypeError, ["v ", "float16", "float32"]),
    "q_int": (extend(q=Q.astype(np.int32)), kvrs.DTypeError, ["q ", "int32", "float32"]),
    "k_list": (extend(k=K.tolist()), kvrs.DTypeError, ["k ", "list", "DLPack"]),
    # layer, sequences
    "layer_above": (extend(layer=2), kvrs.ArgumentError, ["layer", "2", "0..=1"]),
    "layer_negative": (extend(layer=-1), kvrs.ArgumentError, ["layer", "-1", "0..=1"]),
    "layer_bool": (extend(layer=True), TypeError, ["layer", "True", "an int"]),
    "layer_float": (extend(layer=0.0), TypeError, ["layer", "0.0", "an int"]),
    "layer_text": (extend(layer="0"), TypeError, ["layer", "'0'", "an int"]),
    "unknown_id": (extend(seqs=lambda s: [s[0], 999]), kvrs.SequenceError, ["seq", "999"]),
    "negative_id": (extend(seqs=lambda s: [s[0], -4]), kvrs.SequenceError, ["seqs[1]", "-4"]),
    "freed_id": (extend(seqs=lambda s: [s[0], s[1] - 2]), kvrs.SequenceError, ["seq", "1", "freed"]),
    "duplicate_ids": (extend(seqs=lambda s: [s[1], s[1]]), kvrs.KVError, ["seqs"]),
    "bool_id": (extend(seqs=lambda s: [s[0], True]), TypeError, ["seqs[1]", "True", "an int"]),
    "text_ids": (extend(seqs="01"), TypeError, ["seqs", "'01'", "an int or a list"]),
    "attend_duplicates": (attend(seqs=[2, 2]), kvrs.KVError, ["seqs"]),
    # values
    "k_nan": (extend(k=with_value(np.nan)), kvrs.ArgumentError, ["k ", "row 1", "head 0", "token 3", "NaN"]),
    "v_inf": (extend(v=with_value(np.inf)), kvrs.ArgumentError, ["v ", "row 1", "head 0", "token 3", "inf"]),
    "v_minus_inf": (extend(v=with_value(-np.inf)), kvrs.ArgumentError, ["v ", "token 3", "-inf"]),
    "k_too_large": (extend(k=with_value(70000.0)), kvrs.ArgumentError, ["k ", "token 3", "70000", "65504"]),
    # masks and positions
    "mask_rank": (extend(mask=np.ones(5, bool)), kvrs.ShapeError, ["mask", "[5]", "[B, T]"]),
    "mask_rows": (extend(mask=np.ones((1, 5), bool)), kvrs.ShapeError, ["mask", "[1, 5]", "[2, 5]"]),
    "mask_tokens": (extend(mask=np.ones((2, 6), bool)), kvrs.ShapeError, ["mask", "[2, 6]", "[2, 5]"]),
    "mask_transposed": (extend(mask=np.ones((5, 2), bool)), kvrs.ShapeError, ["mask", "[5, 2]", "[2, 5]"]),
    "mask_type": (extend(mask=np.ones((2, 5), np.int64)), kvrs.DTypeError, ["mask", "int64", "bool"]),
    "mask_object": (extend(mask="yes"), TypeError, ["mask", "'yes'", "bool"]),
    "mask_ragged": (extend(mask=[[True], [True, False]]), kvrs.ShapeError, ["mask", "[B, T]"]),
    "attend_mask": (attend(mask=np.ones((2, 4), bool)), kvrs.ShapeError, ["mask", "[2, 4]", "[2, 5]"]),
    "positions_shape": (extend(positions=np.arange(5)), kvrs.ShapeError, ["positions", "[5]"]),
    "positions_type": (extend(positions=gap(0) * 1.0), kvrs.DTypeError, ["positions", "float64", "int64"]),
    "gap": (extend(positions=gap(0)), kvrs.SequenceError, ["position", "44", "43"]),
    "gap_after_the_past": (extend(positions=gap(1)), kvrs.SequenceError, ["position", "41", "40"]),
    "positions_again": (extend(positions=gap(-40)), kvrs.SequenceError, ["position", "0", "40"]),
    # options
    "softcap": (extend(softcap=0.0), kvrs.ArgumentError, ["softcap", "0"]),
    "softcap_nan": (extend(softcap=float("nan")), kvrs.ArgumentError, ["softcap", "NaN"]),
    "scale": (extend(scale=float("inf")), kvrs.ArgumentError, ["scale", "inf"]),
    "scale_type": (extend(scale="big"), TypeError, ["scale"]),
    "sink_logits": (extend(sink_logits=np.zeros(3, np.float32)), kvrs.ShapeError, ["sink_logits", "3", "4"]),
    "sink_rank": (
        extend(sink_logits=np.zeros((2, 4), np.float32)),
        kvrs.ShapeError,
        ["sink_logits", "[2, 4]"],
    ),
    "unknown_keyword": (extend(casual=True), TypeError, ["casual"]),
    "out_shape": (
        extend(out=np.zeros((2, 4, 5, 32), np.float32)),
        kvrs.ShapeError,
        ["out ", "[2, 4, 5, 32]"],
    ),
    "out_type": (extend(out=np.zeros((2, 4, 5, 64), np.float16)), kvrs.DTypeError, ["out ", "float16"]),
    "statistics_q": (
        lambda s, seqs: s.append(0, K, K, seqs, q=Q[:, :3]),
        kvrs.ShapeError,
        ["q ", "[2, 3, 5, 64]", "2 sequences, 4 heads"],
    ),
    # the other verbs
    "length_id": (lambda s, _: s.length(77), kvrs.SequenceError, ["77"]),
    "length_layer": (lambda s, seqs: s.length(seqs[0], 5), kvrs.ArgumentError, ["layer", "5", "0..=1"]),
    "decode_head": (lambda s, seqs: s.decode(0, seqs[0], 2), kvrs.ArgumentError, ["head", "2", "0..=1"]),
    "kept_head": (lambda s, seqs: s.kept_positions(seqs[0], 0, -1), kvrs.ArgumentError, ["head", "-1"]),
    "truncate_above": (lambda s, seqs: s.truncate(seqs[0], 41), kvrs.KVError, ["n ", "41", "40"]),
    "truncate_below": (lambda s, seqs: s.truncate(seqs[0], -1), kvrs.ArgumentError, ["n ", "-1"]),
    "truncate_id": (lambda s, _: s.truncate(77, 0), kvrs.SequenceError, ["77"]),
    "free_id": (lambda s, _: s.free(77), kvrs.SequenceError, ["77"]),
    "keep_heads": (lambda s, seqs: s.keep(seqs[0], 0, [[1, 2]]), kvrs.KVError, ["positions", "1", "2"]),
    "keep_position": (lambda s, seqs: s.keep(seqs[0], 0, [[1], [900]]), kvrs.KVError, ["positions", "900"]),
    "keep_type": (lambda s, seqs: s.keep(seqs[0], 0, [["a"], [1]]), TypeError, ["positions[0]"]),
    "keep_scalar": (lambda s, seqs: s.keep(seqs[0], 0, 3), TypeError, ["positions", "3"]),
    "reserve": (lambda s, seqs: s.reserve(seqs, -1), kvrs.ArgumentError, ["tokens", "-1"]),
    "reserve_all": (lambda s, seqs: s.reserve(seqs, 10**9), kvrs.CapacityError, ["capacity"]),
    "new_negative": (lambda s, _: s.new(-1), kvrs.ArgumentError, ["n ", "-1"]),
    "new_float": (lambda s, _: s.new(1.0), TypeError, ["n ", "1.0"]),
    "new_from": (lambda s, _: s.new(1, from_="x"), TypeError, ["from_", "None"]),
}


@pytest.fixture(params=[kvrs.Raw16(), TQ4], ids=["raw16", "turboquant"])
def filled(request: pytest.FixtureRequest) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store whose ids 0 and 1 are freed, and 2 and 3 hold 40 tokens."""
    store = make_store(request.param, capacity="64MiB")
    for seq in store.new(2):
        store.free(seq)
    seqs = store.new(2)
    k = tensors(np.random.default_rng(5), 2, 40)
    for layer in range(2):
        store.append(layer, k, k, seqs)
    return store, seqs


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_by_name_and_changes_nothing(
    case: str, filled: tuple[kvrs.KVStore, list[int]]
) -> None:
    call, error, words = BAD[case]
    store, seqs = filled
    before = contents(store, seqs)
    with pytest.raises(error) as caught:
        call(store, seqs)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert contents(store, seqs) == before
    out = store.extend(0, Q, K, K, seqs).numpy()
    assert np.isfinite(out).all()
    assert store.length(seqs[0], 0) == 45
    store.check()


def test_nan_behind_a_mask_is_not_looked_at(filled: tuple[kvrs.KVStore, list[int]]) -> None:
    store, seqs = filled
    mask = np.ones((2, 5), bool)
    mask[1, 3] = False
    store.append(0, with_value(np.nan), K, seqs, mask=mask)
    assert [store.length(seq, 0) for seq in seqs] == [45, 44]


def test_the_first_append_fixes_the_type_of_the_window(filled: tuple[kvrs.KVStore, list[int]]) -> None:
    torch = pytest.importorskip("torch")
    store, seqs = filled
    before = contents(store, seqs)
    k = torch.from_numpy(K).bfloat16()
    with pytest.raises(kvrs.DTypeError, match=r"bfloat16.*allowed"):
        store.append(0, k, k, seqs)
    assert contents(store, seqs) == before
    store.append(0, K, K, seqs)


@pytest.mark.parametrize("device", ["gpu", "", None, 3])
def test_a_device_that_is_not_served_is_named(device: Any) -> None:
    plan = make_store().plan
    if device is None:
        assert kvrs.KVStore(plan, device=None).device == "cpu"
        return
    with pytest.raises(kvrs.DeviceError, match=f"{device}; allowed: cpu"):
        kvrs.KVStore(plan, device=device)


@pytest.mark.parametrize("capacity", [0, -1, "", "GiB", "2 parsecs", "-1GiB", "1..5GB", "0MiB", "nan", 2**70])
def test_a_capacity_that_is_no_number_of_bytes_is_named(capacity: Any) -> None:
    with pytest.raises(kvrs.ArgumentError, match=r"capacity is .*allowed: None, a number of bytes"):
        make_store(capacity=capacity)


@pytest.mark.parametrize("capacity", [True, 1.5, [1], b"1GiB"])
def test_a_capacity_of_a_wrong_type_is_a_type_error(capacity: Any) -> None:
    with pytest.raises(TypeError, match=r"capacity is .*allowed"):
        make_store(capacity=capacity)


@pytest.mark.parametrize("plan", [None, "plan", 3, {}])
def test_a_store_of_something_that_is_no_plan_is_a_type_error(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"plan is .*allowed: a kvrs\.Plan"):
        kvrs.KVStore(plan)


def step_until_full(store: kvrs.KVStore, seq: int, k: np.ndarray) -> tuple[int, int, str]:
    """Step whole layers until the capacity is reached: finished steps, layer of the error, its message."""
    for step in range(1000):
        for layer in range(store.plan.shape.layers):
            try:
                store.append(layer, k, k, seq)
            except kvrs.CapacityError as error:
                return step, layer, str(error)
    raise AssertionError("the capacity was never reached")


def test_capacity_runs_out_in_the_first_layer_of_a_step_and_the_store_goes_on() -> None:
    store = make_store(TQ4, capacity="6MiB", fields={"layers": 3})
    seqs = store.new(1)
    rng = np.random.default_rng(3)
    k, q = tensors(rng, 1, 256), tensors(rng, 1, 256, heads=4)
    steps, layer, text = step_until_full(store, seqs[0], k)
    assert layer == 0
    assert "capacity" in text
    assert str(6 * 2**20) in text
    assert steps > 3
    assert store.stats().bytes_total <= 6 * 2**20
    tokens = 256 * steps
    assert [store.length(seqs[0], layer) for layer in range(3)] == [tokens] * 3
    probe = tensors(rng, 1, 2, heads=4)
    assert_attention(store.attend(2, probe, seqs).numpy()[0], expected(store, 2, seqs[0], probe[0])[0])
    held = contents(store, seqs)
    with pytest.raises(kvrs.CapacityError):
        store.extend(0, q, k, k, seqs)
    assert contents(store, seqs) == held
    store.truncate(seqs[0], tokens // 2)
    for layer in range(3):
        store.append(layer, k, k, seqs)
    assert store.length(seqs[0]) == tokens // 2 + 256
    store.check()


def test_an_error_in_the_middle_of_a_step_is_repaired_by_truncate() -> None:
    store = make_store(TQ4, fields={"layers": 3})
    seqs = store.new(2)
    rng = np.random.default_rng(3)
    k = tensors(rng, 2, 100)
    for layer in range(3):
        store.append(layer, k, k, seqs)
    store.append(0, K, K, seqs)
    with pytest.raises(kvrs.ArgumentError, match="token 3"):
        store.append(1, with_value(np.nan), K, seqs)
    assert [store.length(seqs[1], layer) for layer in range(3)] == [105, 100, 100]
    for seq in seqs:
        store.truncate(seq, store.length(seq))
    for layer in range(3):
        store.append(layer, K, K, seqs)
    assert [store.length(seqs[1], layer) for layer in range(3)] == [105] * 3


@pytest.mark.parametrize("capacity", [None, "64MiB"])
def test_a_token_that_breaks_the_rules_in_a_later_row_keeps_the_earlier_rows_out_too(capacity: Any) -> None:
    store = make_store(capacity=capacity)
    seqs = store.new(2)
    with pytest.raises(kvrs.ArgumentError, match="row 1"):
        store.append(0, with_value(np.nan), K, seqs)
    assert [store.length(seq, 0) for seq in seqs] == [0, 0]
    assert store.stats().tokens_kept == 0
