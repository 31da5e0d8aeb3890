"""Bits of runs of channels under one budget: water-filling, marginal gain, and all allocations tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GAUSSIAN = (1.0, 0.36338, 0.11748, 0.03455, 0.00951, 0.00252, 0.00066, 0.00030, 0.00009)
"""Distortion of a gaussian channel of unit variance at 0 to 8 bits."""
MOST_BITS = 8


def distortion(weights: Sequence[float], widths: Sequence[int], curve: Sequence[float] = GAUSSIAN) -> float:
    """Return the sum of ``weight * D(bits)``."""
    return float(sum(weight * curve[bits] for weight, bits in zip(weights, widths, strict=True)))


def bits_of(channels: Sequence[int], widths: Sequence[int]) -> int:
    """Return the bits a token of an allocation."""
    return sum(n * bits for n, bits in zip(channels, widths, strict=True))


def greedy(
    weights: Sequence[float],
    channels: Sequence[int],
    floors: Sequence[int],
    budget: int,
    curve: Sequence[float] = GAUSSIAN,
) -> list[int]:
    """Return bits by marginal gain per bit; equal gains go to the lower item."""
    widths = list(floors)
    while True:
        best: tuple[float, int] | None = None
        for i, bits in enumerate(widths):
            if bits == MOST_BITS or bits_of(channels, widths) + channels[i] > budget:
                continue
            gain = weights[i] * (curve[bits] - curve[bits + 1]) / channels[i]
            if best is None or gain > best[0]:
                best = gain, i
        if best is None:
            return widths
        widths[best[1]] += 1


def waterfill(
    weights: Sequence[float], channels: Sequence[int], floors: Sequence[int], budget: int
) -> list[int]:
    """Return bits by reverse water-filling: the first level, from above, that spends the budget.

    The levels at which one item gets a bit are tried in their order, so no bisection is needed: item i has k
    bits from level ``height - 2 k + 1`` down.
    """
    heights = [np.log2(w / n) if w > 0 else -np.inf for w, n in zip(weights, channels, strict=True)]
    steps = [
        (height - 2 * k + 1, -i)
        for i, height in enumerate(heights)
        for k in range(1, MOST_BITS + 1)
        if height > -np.inf
    ]
    widths = list(floors)
    for level, minus in sorted(steps, reverse=True):
        bits = max(floors[-minus], round((heights[-minus] - level + 1) / 2))
        grown = [*widths]
        grown[-minus] = bits
        if bits_of(channels, grown) > budget:
            return widths
        widths = grown
    return widths


def brute_force(
    weights: Sequence[float],
    channels: Sequence[int],
    floors: Sequence[int],
    budget: int,
    curve: Sequence[float] = GAUSSIAN,
) -> float:
    """Return the least distortion of all allocations within a budget."""
    every = itertools.product(*(range(floor, MOST_BITS + 1) for floor in floors))
    return min(distortion(weights, w, curve) for w in every if bits_of(channels, w) <= budget)


def fit_rate(bits: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return ``alpha`` and ``beta`` of the line through the logarithms of distortions (arXiv:2605.06675)."""
    design: NDArray[np.float64] = np.stack([np.ones(len(bits)), np.asarray(bits, float)], axis=1)
    (level, slope), *_ = np.linalg.lstsq(design, np.log(values), rcond=None)
    return float(np.exp(level)), float(np.exp(-slope))
