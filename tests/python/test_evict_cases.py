"""Reported faults of windows and budgets, each as a small test with the right value."""

from __future__ import annotations

import itertools

import kvrs
import numpy as np
import pytest
from conftest import make_store, tensors
from evicting import RAW, TQ4, make

TOLERANCE = 4e-2
"""Half of what a token more or less would change; sums in float16 values, up to 50, err by less."""
MARGIN = 64
"""Tokens by which a sequence with a sliding window can go back at least."""

# --- B14: a window of the newest tokens wraps around -----------------------------------------------


def sliding_store(window: int) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store of one head whose tokens see the newest `window` tokens, and its only sequence."""
    fields = {"layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 16, "rope": None, "sliding": window}
    store = make_store(fields=fields, sinks=0, recent=0)
    return store, store.new()


def numbered(start: int, end: int) -> np.ndarray:
    """Return values 10.0, 10.1, 10.2, ... as float16 holds them, one a token."""
    values = (10 + np.arange(start, end) / 10).astype(np.float16).astype(np.float32)
    return np.broadcast_to(values[None, None, :, None], (1, 1, end - start, 16))


def seen(store: kvrs.KVStore, seqs: list[int], start: int, end: int) -> float:
    """Append tokens `start` to `end - 1`; return the mean of the values that the last of them sees."""
    x = numbered(start, end)
    return float(np.asarray(store.extend(0, np.zeros_like(x), x, x, seqs))[0, 0, -1, 0])


def newest(window: int, end: int) -> float:
    return float(numbered(max(end - window, 0), end).mean())


@pytest.mark.parametrize(
    ("window", "calls"),
    [(8, [6, *[1] * 14]), (4, [7, 1, 1]), (8, [6, 5]), (8, [6, 5, 300, 1, 40, 1]), (4, [*[3] * 20])],
    ids=str,
)
def test_case_b14_a_window_that_wraps_shows_the_newest_tokens_and_no_others(
    window: int, calls: list[int]
) -> None:
    store, seqs = sliding_store(window)
    for start, end in itertools.pairwise(itertools.accumulate(calls, initial=0)):
        assert seen(store, seqs, start, end) == pytest.approx(newest(window, end), abs=TOLERANCE)
    positions = store.kept_positions(seqs[0], 0, 0).tolist()
    assert positions == [*range(positions[0], sum(calls))], "in order, without a gap"
    assert min(window, sum(calls)) <= len(positions) < window + MARGIN + 2 * 16
    store.check()


@pytest.mark.parametrize(
    ("total", "back"), [(20, 5), (20, 19), (400, 1), (400, 100), (400, MARGIN), (400, 180), (400, 399)]
)
def test_case_b14_going_back_behind_the_window_is_exact_or_an_error(total: int, back: int) -> None:
    store, seqs = sliding_store(8)
    seen(store, seqs, 0, total)
    held = store.kept_positions(seqs[0], 0, 0).tolist()
    n = total - back
    if n - 7 < held[0] != 0:
        with pytest.raises(kvrs.SequenceError):
            store.truncate(seqs[0], n)
        assert back > MARGIN
        assert store.kept_positions(seqs[0], 0, 0).tolist() == held
        return
    store.truncate(seqs[0], n)
    assert seen(store, seqs, n, n + 1) == pytest.approx(newest(8, n + 1), abs=TOLERANCE)


# --- B26: budgets of layers and their sum ------------------------------------------------------------


@pytest.mark.parametrize("prompt", [150, 400])
@pytest.mark.parametrize("beta", [1, 1.5, 2, 3, 4, 8, 64])
def test_case_b26_the_budgets_of_a_pyramid_are_the_total_whatever_its_slope(
    beta: float, prompt: int, rng: np.random.Generator
) -> None:
    """32 layers of 128 tokens in the mean, 5 of them the window of queries."""
    fields = {"layers": 32, "query_heads": 1, "kv_heads": 1, "head_dim": 16}
    policy = kvrs.PyramidKV(128, beta=beta, scores=kvrs.SnapKV(window=5, kernel=1))
    store = make(policy, fields=fields, sinks=0, recent=5)
    seqs, x = store.new(), tensors(rng, 1, prompt, heads=1, dim=16)
    for layer in range(32):
        store.append(layer, x, x, seqs, q=x)
    kept = [head.kept for head in store.selection_report(seqs[0])]
    assert sum(kept) == 32 * 128
    assert kept == sorted(kept, reverse=True), "never rising with depth"
    assert 5 < min(kept) <= max(kept) <= prompt
    assert (kept[0] > kept[-1]) == (beta > 1)


# --- B12: the window drains under a policy, too ------------------------------------------------------


@pytest.mark.parametrize("policy", [kvrs.H2O(96), kvrs.KNorm(96), kvrs.SnapKV(96, window=16)], ids=str)
@pytest.mark.parametrize("calls", [[100, 100, 100], [129], [1] * 300, [200, *[1] * 100]], ids=len)
def test_case_b12_a_window_under_a_policy_drains_whatever_the_sizes_of_the_calls(
    calls: list[int], policy: kvrs.policies, rng: np.random.Generator
) -> None:
    store = make(policy, TQ4, {"layers": 1, "query_heads": 2}, sinks=0, recent=32)
    raw = make(policy, RAW, {"layers": 1, "query_heads": 2}, sinks=0, recent=32)
    seqs, same, x = store.new(), raw.new(), tensors(rng, 1, sum(calls))
    for start, end in itertools.pairwise(itertools.accumulate(calls, initial=0)):
        part = x[:, :, start:end]
        store.append(0, part, part, seqs, q=part)
        raw.append(0, part, part, same, q=part)
        rows = store.stats().bytes_window / (2 * 2 * 2 * 64)
        assert rows <= 32 + 16 - 1, "16-bit rows of a head"
        if not isinstance(policy, kvrs.SnapKV):
            assert len(store.kept_positions(seqs[0], 0, 0)) <= 96 + 16 - 1
    k, _, positions = store.decode(0, seqs[0], 0)
    exact = x[0, 0, positions]
    differ = (k != exact).any(axis=1)
    assert differ[: len(k) - 47].all(), "old keys are codes, not rows"
    assert not differ[len(k) - 32 :].any()
