"""Codecs out of data: what is stored against float64, whatever the data says."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from calibrated_plans import HEADS, PLANS, D, Tokens, shape

TOKENS = 200


def made(name: str, **settings: Any) -> tuple[kvrs.Plan, tuple[np.ndarray, np.ndarray]]:
    tokens = Tokens(TOKENS)
    return PLANS[name](tokens, **settings), (tokens.k, tokens.v)


def filled(plan: kvrs.Plan, k: np.ndarray, v: np.ndarray) -> tuple[kvrs.KVStore, list[int]]:
    store = kvrs.KVStore(plan)
    seqs = store.new()
    store.append(0, np.float32(k[None]), np.float32(v[None]), seqs)
    return store, seqs


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    logits = np.einsum("hgqd,hkd->hgqk", q.reshape(HEADS, 2, -1, D), k) * D**-0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hgqk,hkd->hgqd", weights, v).reshape(4, -1, D)


@pytest.mark.parametrize("name", PLANS)
def test_what_is_stored_is_near_what_came(name: str) -> None:
    plan, (k, v) = made(name)
    store, seqs = filled(plan, k, v)
    encoded = TOKENS - TOKENS % 16
    for head in range(HEADS):
        keys, values, _ = map(np.asarray, store.decode(0, seqs[0], head))
        for got, want in ((keys, k[head]), (values, v[head])):
            error = np.square(got[:encoded] - want[:encoded]).sum()
            centred = np.square(want[:encoded] - want[:encoded].mean(0)).sum()
            assert error < 0.08 * centred
    assert store.stats().path == ("dot" if name == "aatc" else "tile")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_attention_on_codes_is_attention_on_what_they_stand_for(name: str, queries: int) -> None:
    plan, (k, v) = made(name)
    store, seqs = filled(plan, k, v)
    stored = [
        [np.asarray(x, dtype=np.float64) for x in store.decode(0, seqs[0], h)[:2]] for h in range(HEADS)
    ]
    q = np.float32(np.random.default_rng(3).standard_normal((1, 4, queries, D)))
    got = np.asarray(store.attend(0, q, seqs, causal=False))[0]
    want = exact(np.float64(q[0]), np.stack([s[0] for s in stored]), np.stack([s[1] for s in stored]))
    # Integer kernels quantise the query and the weights to 8 bits per run.
    assert np.abs(got - want).max() < 0.03 * np.abs(want).max()


@pytest.mark.parametrize("name", PLANS)
def test_outliers_and_calls_of_any_size_give_the_same_codes(name: str) -> None:
    plan, (k, v) = made(name)
    k, v = k.copy(), v.copy()
    k[0, 20, 5], v[1, 40, 7] = 60, -90
    one, seqs = filled(plan, k, v)
    other = kvrs.KVStore(plan)
    parts = other.new()
    for first, last in ((0, 7), (7, 50), (50, 51), (51, TOKENS)):
        other.append(0, np.float32(k[None, :, first:last]), np.float32(v[None, :, first:last]), parts)
    for head in range(HEADS):
        for a, b in zip(one.decode(0, seqs[0], head), other.decode(0, parts[0], head), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
    if name == "kvquant":
        assert abs(np.asarray(one.decode(0, seqs[0], 1)[1])[40, 7] + 90) < 0.1


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_of_the_plan(name: str) -> None:
    plan, (k, v) = made(name)
    stats, memory = filled(plan, k, v)[0].stats(), plan.memory(TOKENS)
    assert (stats.bytes_codes, stats.bytes_scales) == (memory.bytes_codes, memory.bytes_scales)
    assert stats.bytes_window == memory.bytes_window
    assert memory.bytes_constants > 0


def test_heads_of_a_layer_may_have_pages_of_different_sizes() -> None:
    plan, (k, v) = made("aatc")
    report = plan.describe()[0]
    assert report.key_bits == pytest.approx((3 + 4) / 2)
    assert report.value_bits == pytest.approx((2 + 2.5) / 2)
    bits = 16 * (4 + 2 + 4) + 16 * (5 + 3 + 5)
    assert filled(plan, k, v)[0].stats().bytes_codes == TOKENS // 16 * 16 * bits // 8


@pytest.mark.parametrize("policy", [kvrs.SnapKV(60), kvrs.AdaKV(kvrs.SnapKV(60)), kvrs.H2O(60)])
def test_pages_of_different_sizes_work_with_every_kind_of_budget(policy: Any) -> None:
    plan, (k, v) = made("aatc", evict=policy)
    store = kvrs.KVStore(plan, capacity="4MiB")
    seqs = store.new()
    q = np.float32(np.random.default_rng(3).standard_normal((1, 4, TOKENS, D)))
    store.extend(0, q, np.float32(k[None]), np.float32(v[None]), seqs)
    kept = [len(np.asarray(store.kept_positions(seqs[0], 0, head))) for head in range(HEADS)]
    assert sum(kept) <= 2 * 60 + 32
    assert min(kept) > 0
    store.check()
    store.free(seqs[0])
    assert store.stats().tokens_kept == 0


def test_plan_files_carry_the_data(tmp_path: Any) -> None:
    for name in PLANS:
        plan, (k, v) = made(name)
        plan.save(tmp_path / "a.kvplan")
        loaded = kvrs.Plan.load(tmp_path / "a.kvplan")
        assert loaded == plan, name
        assert plan.calibration is not None
        assert loaded.calibration is not None
        assert loaded.calibration.spec() == plan.calibration.spec()
        assert set(loaded.calibration.arrays) == set(plan.calibration.arrays)
        for store in (filled(loaded, k, v)[0], filled(plan, k, v)[0]):
            assert store.stats().bytes_codes == filled(plan, k, v)[0].stats().bytes_codes


def test_the_report_is_not_part_of_the_identity_but_the_data_is() -> None:
    plan, _ = made("aatc")
    assert plan.calibration is not None
    arrays = {name: np.array(array) for name, array in plan.calibration.arrays.items()}

    def other(arrays: dict[str, np.ndarray], report: dict[str, Any]) -> str:
        codec = kvrs.AATC(bits=3)
        calibration = kvrs.Calibration(arrays, "abc", report)
        offsets = {"key_offset": plan.key_offset, "value_offset": plan.value_offset}
        return kvrs.Plan(shape(), codec, codec, calibration=calibration, sinks=0, recent=0, **offsets).hash

    assert other(arrays, {"seconds": 3}) == plan.hash
    arrays["keys.0.0.analysis"][0, 0] += 1
    assert other(arrays, {}) != plan.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("keys.0.1.widths"), r"keys\[0\] is aatc without the array keys.0.1.widths"),
        (lambda a: a.update({"keys.0.7.widths": np.float32([1])}), "calibration is an array keys.0.7.widths"),
        (lambda a: a.update({"keys.0.0.widths": np.float32([2, 4])}), "not rising"),
        (lambda a: a.update({"keys.0.0.widths": np.float32([2.5, 2])}), "whole numbers in 1..=8"),
        (lambda a: a.update({"keys.0.0.analysis": np.zeros((24, D), np.float32)}), "a multiple of 16"),
        (lambda a: a.update({"keys.0.0.synthesis": np.zeros((16, D), np.float32)}), "as the analysis"),
        (lambda a: a["keys.0.0.analysis"].fill(np.nan), "is NaN; allowed: finite numbers"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_name(change: Any, message: str) -> None:
    plan, _ = made("aatc")
    assert plan.calibration is not None
    arrays = {name: np.array(array) for name, array in plan.calibration.arrays.items()}
    change(arrays)
    with pytest.raises(kvrs.PlanError, match=message):
        kvrs.Plan(shape(), kvrs.AATC(bits=3), kvrs.AATC(bits=3), calibration=kvrs.Calibration(arrays))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvrs.AATC(), "codec.bits is missing; allowed: bits or bytes"),
        (lambda: kvrs.AATC(bits=3, bytes="1MiB"), "given beside bytes"),
        (lambda: kvrs.AATC(bits=9), "codec.bits is 9"),
        (lambda: kvrs.AATC(bytes="many"), "codec.bytes is many"),
        (lambda: kvrs.AATC(bits=3, variant="both"), "post_rope, pre_rope"),
        (lambda: kvrs.AATC(bits=3, run_rotation="yes"), "run_rotation"),
        (lambda: kvrs.KVTC(bits=0), "codec.bits is 0"),
        (lambda: kvrs.PALU(rank=1.5, bits=4), "codec.rank is 1.5"),
        (lambda: kvrs.KVQuant(bits=2.5), "codec.bits is 2.5"),
        (lambda: kvrs.KVQuant(bits=3, outliers=0.5), "codec.outliers is 0.5"),
        (lambda: kvrs.Plan(shape(), kvrs.KVTC(bits=3), kvrs.Raw16()), "kvrs.calibrate"),
        (lambda: kvrs.Plan(shape(), kvrs.Raw16(), kvrs.Raw16(), calibration={}), "a kvrs.Calibration"),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(kvrs.PlanError, match=message):
        make()
