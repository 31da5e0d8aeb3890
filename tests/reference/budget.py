"""Budgets in float64 and exact fractions: how many tokens each layer and head chooses by score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray


def tokens_of(
    budget: int | float | dict[str, int],
    prompt: int,
    least: int,
    bytes_of: Callable[[int], int] | None = None,
) -> int:
    """Return the tokens per head of a budget: a whole number, a share of the prompt, or ``{"bytes": n}``.

    Parameters
    ----------
    budget
        Tokens, a share in (0, 1] rounded to the nearest token, or bytes.
    prompt
        Tokens of the prompt.
    least
        Fewest tokens that may come out: what is protected, and one more.
    bytes_of
        Bytes of a sequence that keeps so many tokens per head; never falling.

    Raises
    ------
    ValueError
        Bytes below what `least` tokens take.
    """
    if isinstance(budget, dict):
        assert bytes_of is not None
        if bytes_of(least) > budget["bytes"]:
            raise ValueError(f"budget: {budget['bytes']} bytes; {least} tokens take {bytes_of(least)}")
        tokens = least
        while bytes_of(tokens + 1) <= budget["bytes"]:
            tokens += 1
        return tokens
    tokens = budget if isinstance(budget, int) else math.floor(budget * prompt + 0.5)
    return max(tokens, least)


def round_to_sum(exact: Sequence[Fraction], total: int) -> list[int]:
    """Return whole numbers of sum `total`, rounded by largest remainder, ties to the lower place."""
    counts = [math.floor(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def pyramid(mean: int, layers: int, prompt: int, beta: float = 20.0) -> list[int]:
    """Return each layer's tokens, a falling line of sum ``layers * mean`` (arXiv:2406.02069).

    The last layer has ``max(1, mean / beta)``, the first what keeps the mean; if that is above `prompt`, the
    first has `prompt` and the line is flatter. ``mean >= prompt`` keeps all.

    Raises
    ------
    ValueError
        `mean` below 1, or `beta` below 1.
    """
    if beta < 1:
        raise ValueError(f"beta: {beta}; at least 1")
    if mean >= prompt:
        return [prompt] * layers
    if mean < 1:
        raise ValueError(f"mean: {mean} tokens; at least 1")
    if layers == 1:
        return [mean]
    last = max(Fraction(1), Fraction(mean) / Fraction(beta))
    if 2 * mean - last > prompt:
        last = Fraction(2 * mean - prompt)
    first = 2 * mean - last
    return round_to_sum(
        [first - (first - last) * Fraction(layer, layers - 1) for layer in range(layers)], mean * layers
    )


def floor_tokens(floor: float, picks: int) -> int:
    """Return the tokens that a head has at least, of `picks` on average: `floor` of them, and never none."""
    return max(1, min(math.ceil(floor * picks), picks))


def ada(scores: Sequence[ArrayLike], total: int, floor: int) -> list[int]:
    """Return each head's tokens: `floor` of its best, then the best of all (arXiv:2407.11550).

    Equal scores go to the lower place, then to the lower head.
    """
    floor = min(floor, total // len(scores))
    first: list[int] = []
    rest: list[tuple[float, int, int]] = []
    for h, head in enumerate(scores):
        ranked = sorted((-float(score), place, h) for place, score in enumerate(np.asarray(head)))
        first.append(min(floor, len(ranked)))
        rest += ranked[floor:]
    counts = first
    for _, _, h in sorted(rest)[: max(0, total - sum(first))]:
        counts[h] += 1
    return counts


def entropy_of(attention: ArrayLike) -> float:
    """Return the entropy in nats of `attention` ``[tokens]``, whatever it sums to."""
    a: NDArray[np.float64] = np.asarray(attention, dtype=np.float64)
    p = a[a > 0] / a.sum() if a.sum() > 0 else a[:0]
    return max(0.0, float(-(p * np.log(p)).sum()))


def apportion(weights: Sequence[float], total: int, floor: int, caps: Sequence[int]) -> list[int]:
    """Return whole numbers in proportion to `weights`, from `floor` to `caps`, of sum `total` or all caps.

    The slope of the proportion is found among the values at which a share meets its floor or its cap.
    """
    n = len(weights)
    total = min(total, sum(caps))
    floor = min(floor, total // n) if n else 0
    usable = all(math.isfinite(w) and w >= 0 for w in weights) and any(w > 0 for w in weights)
    exact_weights = [Fraction(w) if usable else Fraction(1) for w in weights]
    lows = [min(floor, cap) for cap in caps]

    def shares(slope: Fraction) -> list[Fraction]:
        raw = zip(exact_weights, lows, caps, strict=True)
        return [min(max(slope * w, Fraction(low)), Fraction(cap)) for w, low, cap in raw]

    bounds = zip(exact_weights, lows, caps, strict=True)
    knots = sorted({Fraction(0)} | {b / w for w, low, cap in bounds if w > 0 for b in (low, cap)})
    below = max(knot for knot in knots if sum(shares(knot)) <= total)
    above = [knot for knot in knots if knot > below]
    exact = shares(below)
    if above:
        # Between two knots the sum is a straight line.
        rise = sum(shares(above[0])) - sum(exact)
        exact = shares(below + (above[0] - below) * Fraction(total - sum(exact)) / rise)
    counts = round_to_sum(exact, min(total, math.ceil(sum(exact))))
    order = sorted(range(n), key=lambda i: (math.floor(exact[i]) - exact[i], i))
    while sum(counts) < total:  # weights of zero take what is left, one by one
        for i in order:
            if sum(counts) < total and counts[i] < caps[i]:
                counts[i] += 1
    return counts


def entropy(entropies: Sequence[float], total: int, floor: int, lens: Sequence[int]) -> list[int]:
    """Return each head's tokens in proportion to the entropy of its attention (doi:10.3390/math13152366)."""
    return apportion(entropies, total, floor, lens)
