"""Joint allocation of tokens and rates: bytes, what stays, and what it is worth."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest

LAYERS, HEADS, GROUP, D, TOKENS = 2, 2, 2, 64, 1500
HIGH, LOW = kvrs.TurboQuant(bits=4), kvrs.TurboQuant(bits=2)


def shape(**settings: Any) -> kvrs.ModelShape:
    return kvrs.ModelShape(
        layers=LAYERS, query_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=D, rope=None, **settings
    )


def plan(size: int | str = "400KiB", **settings: Any) -> kvrs.Plan:
    joint = kvrs.Joint(bytes=size, low_keys=LOW, low_values=LOW)
    return kvrs.Plan(shape(), keys=HIGH, values=HIGH, joint=joint, recent=64, **settings)


def prompt(tokens: int = TOKENS, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return q, k and v of a prompt in which few tokens draw most of the attention of later queries."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, HEADS * GROUP, tokens, D)) + 0.4
    k = rng.standard_normal((1, HEADS, tokens, D)) * np.exp(rng.standard_normal((1, HEADS, tokens, 1)) * 0.5)
    v = rng.standard_normal((1, HEADS, tokens, D))
    return tuple(np.float32(x) for x in (q, k, v))


def filled(which: kvrs.Plan, tokens: int = TOKENS, **settings: Any) -> tuple[kvrs.KVStore, list[int]]:
    store = kvrs.KVStore(which, **settings)
    seqs = store.new()
    q, k, v = prompt(tokens)
    for layer in range(LAYERS):
        store.extend(layer, q, k, v, seqs)
    return store, seqs


def pages_of(store: kvrs.KVStore) -> int:
    stats = store.stats()
    return stats.bytes_codes + stats.bytes_scales + stats.bytes_window + stats.bytes_tables


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    logits = np.einsum("hgd,hkd->hgk", np.float64(q).reshape(HEADS, GROUP, D), np.float64(k)) * D**-0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hgk,hkd->hgd", weights / weights.sum(-1, keepdims=True), np.float64(v))


def output_error(which: kvrs.Plan) -> float:
    """Return the mean squared error of the attention of later queries."""
    store, seqs = filled(which)
    _, k, v = prompt()
    queries = np.float32(np.random.default_rng(9).standard_normal((50, 1, HEADS * GROUP, 1, D)) + 0.4)
    errors = []
    for q in queries:
        got = np.asarray(store.attend(0, q, seqs, causal=False)).reshape(HEADS, GROUP, D)
        errors.append(np.square(got - exact(q[0, :, 0], k[0], v[0])).mean())
    return float(np.mean(errors))


@pytest.mark.parametrize("size", [200 << 10, 300 << 10, 400 << 10])
def test_a_sequence_takes_no_more_than_its_bytes(size: int) -> None:
    store, seqs = filled(plan(size))
    assert 0.8 * size < pages_of(store) <= size
    store.check()
    stats = store.stats()
    assert stats.tokens_kept < LAYERS * HEADS * TOKENS
    assert stats.policies[0].policy == "joint"
    store.free(seqs[0])
    assert store.stats().tokens_kept == 0


def test_tokens_end_in_three_ways() -> None:
    store, seqs = filled(plan())
    _, k, _v = prompt()
    ways = set()
    for head in range(HEADS):
        keys, _, positions = map(np.asarray, store.decode(0, seqs[0], head))
        assert (np.diff(positions) > 0).all()
        assert np.array_equal(positions, np.asarray(store.kept_positions(seqs[0], 0, head)))
        want = k[0, head, positions]
        error = np.square(keys - want).sum(1) / np.square(want).sum(1)
        middle = (positions >= 4) & (positions < TOKENS - 64)
        assert (error[~middle] < 1e-5).all()
        ways |= {"low" if e > 0.04 else "high" for e in error[middle]}
        ways |= {"gone"} if len(positions) < TOKENS else set()
    assert ways == {"low", "high", "gone"}


def test_attention_reads_both_rates() -> None:
    store, seqs = filled(plan())
    q = np.float32(np.random.default_rng(5).standard_normal((1, HEADS * GROUP, 1, D)) * 0.5)
    got = np.asarray(store.attend(1, q, seqs)).reshape(HEADS, GROUP, D)
    for head in range(HEADS):
        keys, values, _ = map(np.asarray, store.decode(1, seqs[0], head))
        group = np.float64(q[0, head * GROUP : (head + 1) * GROUP, 0])
        logits = group @ np.float64(keys).T * D**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        want = weights / weights.sum(-1, keepdims=True) @ np.float64(values)
        assert np.linalg.norm(got[head] - want) < 0.05 * np.linalg.norm(want)


def test_it_beats_eviction_alone_and_one_rate_alone_on_the_same_bytes() -> None:
    size = 300 << 10
    joint = output_error(plan(size))
    alone = kvrs.Plan(shape(), HIGH, HIGH, evict=kvrs.SnapKV("300KiB", kernel=1), recent=64)
    assert joint < output_error(alone)
    low = kvrs.Plan(shape(), LOW, LOW, recent=64)
    store, _ = filled(low)
    if pages_of(store) <= size:
        assert joint < output_error(low)


def test_everything_stays_at_the_plans_rate_if_there_is_room() -> None:
    store, seqs = filled(plan("8MiB"))
    plain, others = filled(kvrs.Plan(shape(), HIGH, HIGH, recent=64))
    for head in range(HEADS):
        for a, b in zip(store.decode(0, seqs[0], head), plain.decode(0, others[0], head), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


def test_tokens_after_the_prompt_all_stay_and_a_second_prompt_too() -> None:
    store, seqs = filled(plan())
    kept = len(np.asarray(store.kept_positions(seqs[0], 0, 0)))
    q, k, v = prompt(100, seed=4)
    for layer in range(LAYERS):
        store.extend(layer, q, k, v, seqs)
    store.begin_prompt(seqs)
    for layer in range(LAYERS):
        store.extend(layer, q, k, v, seqs)
    store.end_prompt(seqs)
    positions = np.asarray(store.kept_positions(seqs[0], 0, 0))
    assert len(positions) == kept + 200
    assert (np.diff(positions) > 0).all()
    store.check()


def test_a_prompt_in_parts_ends_as_one_in_one_call() -> None:
    one, seqs = filled(plan())
    store = kvrs.KVStore(plan())
    parts = store.new()
    q, k, v = prompt()
    store.begin_prompt(parts)
    for first, last in ((0, 700), (700, 701), (701, TOKENS)):
        for layer in range(LAYERS):
            store.extend(layer, *(x[:, :, first:last] for x in (q, k, v)), parts)
    store.end_prompt(parts)
    for head in range(HEADS):
        a, b = (np.asarray(s.kept_positions(i[0], 0, head)) for s, i in ((one, seqs), (store, parts)))
        assert len(np.intersect1d(a, b)) > 0.99 * len(a)


def test_capacity_is_known_before_anything_changes() -> None:
    with pytest.raises(kvrs.CapacityError):
        filled(plan(), capacity="256KiB")
    filled(plan(), capacity="8MiB")


def test_plans_with_it_are_saved_and_described(tmp_path: Any) -> None:
    which = plan()
    which.save(tmp_path / "joint.kvplan")
    loaded = kvrs.Plan.load(tmp_path / "joint.kvplan")
    assert loaded == which
    assert loaded.joint is not None
    assert loaded.joint.spec(LAYERS) == which.joint.spec(LAYERS)
    assert which.describe()[0].evict == "joint"
    assert which.hash != plan("300KiB").hash
    assert which.memory(TOKENS).bytes_total > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvrs.Joint(bytes="many", low_keys=LOW, low_values=LOW), "Joint.bytes is 'many'"),
        (lambda: kvrs.Joint(bytes=0, low_keys=LOW, low_values=LOW), "Joint.bytes is 0"),
        (lambda: kvrs.Joint(bytes=9, low_keys=LOW, low_values=LOW, window=0), "Joint.window is 0"),
        (lambda: plan(size="10KiB"), "joint.*10240 bytes"),
        (lambda: plan(evict=kvrs.H2O(100)), "joint is given beside evict"),
        (lambda: kvrs.Plan(shape(), HIGH, HIGH, joint="64MiB"), "a kvrs.Joint"),
        (
            lambda: kvrs.Plan(
                shape(sliding=256),
                HIGH,
                HIGH,
                joint=kvrs.Joint(bytes="1MiB", low_keys=LOW, low_values=LOW),
            ),
            "no layer has full attention",
        ),
        (
            lambda: kvrs.Plan(
                shape(), HIGH, HIGH, joint=kvrs.Joint(bytes="1MiB", low_keys=[LOW], low_values=LOW)
            ),
            "joint.low_keys",
        ),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(kvrs.PlanError, match=message):
        make()
