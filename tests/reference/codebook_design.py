"""Derives the codebooks from their density: Lloyd-Max, then the best int8 levels (rule E5).

The books are made for the unit gaussian. A dimension `d` asks for the density of a coordinate of a
random unit vector times ``sqrt(d)`` instead, which TurboQuant's exact books are made for.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, gammaln, ndtr, ndtri

F64 = NDArray[np.float64]

MAX_LEVEL = {1: 63, 2: 63, 3: 63, 4: 63, 5: 127, 6: 127}
"""Largest int8 level of each width; up to 4 bits a signed product of two such bytes cannot saturate."""


def _density(x: F64) -> F64:
    return np.asarray(
        np.where(np.isinf(x), 0.0, 1.0) * np.exp(-0.5 * np.minimum(x, 100.0) ** 2) / np.sqrt(2 * np.pi)
    )


def cell_moments(half: F64, d: int | None = None) -> tuple[F64, F64]:
    """Return mass and first moment of the cells of the positive levels `half`, both signs counted.

    Parameters
    ----------
    half
        ``[.., levels]``, ascending along the last axis.
    d
        None for the gaussian, else the dimension of the sphere.
    """
    ends = np.broadcast_to([0.0], (*half.shape[:-1], 1))
    edges = np.concatenate([ends, (half[..., 1:] + half[..., :-1]) / 2, ends + np.inf], axis=-1)
    if d is None:
        return 2 * np.diff(ndtr(edges), axis=-1), -2 * np.diff(_density(edges), axis=-1)
    square = np.minimum(edges**2 / d, 1.0)
    factor = 2 * np.sqrt(d / np.pi) / (d - 1) * np.exp(gammaln(d / 2) - gammaln((d - 1) / 2))
    mass = np.diff(betainc(0.5, (d - 1) / 2, square), axis=-1)
    return mass, -factor * np.diff((1 - square) ** ((d - 1) / 2), axis=-1)


def distortion(half: ArrayLike, d: int | None = None) -> F64:
    """Return the mean squared error of nearest-level coding at unit variance, per set of levels."""
    c = np.asarray(half, dtype=np.float64)
    mass, moment = cell_moments(c, d)
    return np.asarray(1 - 2 * (c * moment).sum(axis=-1) + (c * c * mass).sum(axis=-1))


def lloyd_max(bits: int, d: int | None = None, tolerance: float = 1e-10) -> F64:
    """Return the positive Lloyd-Max levels, iterated from equal masses until none moves by `tolerance`."""
    k = 2 ** (bits - 1)
    c = ndtri(0.5 + (np.arange(k) + 0.5) / (2 * k))
    while True:
        mass, moment = cell_moments(c, d)
        if np.abs(moment / mass - c).max() < tolerance:
            return moment / mass
        c = moment / mass


def best_step(levels: ArrayLike, step: ArrayLike, rounds: int = 400) -> F64:
    """Return the step that minimises the distortion of ``levels * step``, per set of levels."""
    n = np.asarray(levels, dtype=np.float64)
    s = np.asarray(step, dtype=np.float64)
    for _ in range(rounds):
        mass, moment = cell_moments(n * s[..., None])
        s = (n * moment).sum(axis=-1) / (n * n * mass).sum(axis=-1)
    return s


def _score(levels: F64, step: F64) -> tuple[F64, F64]:
    s = best_step(levels, step, rounds=12)
    return distortion(levels * s[:, None]), s


def int_levels(bits: int) -> tuple[tuple[int, ...], float]:
    """Return the best int8 levels and their step.

    The start is the Lloyd-Max book rounded at every top level up to the limit; then coordinate
    descent moves one or two levels by one while the distortion falls. Books of equal distortion (the
    same ratios) rank by their top level, the largest first.
    """
    c = lloyd_max(bits)
    tops = np.arange(MAX_LEVEL[bits] // 2, MAX_LEVEL[bits] + 0.5, 0.05)
    starts = np.rint(c[None, :] * (tops / c[-1])[:, None])
    starts = np.unique(starts[(np.diff(starts, axis=1, prepend=0) > 0).all(axis=1)], axis=0)
    loss, steps = _score(starts, c[-1] / starts[:, -1])
    best: tuple[float, F64, float] = (np.inf, c, 0.0)
    for i in np.lexsort((-starts[:, -1], np.rint(loss * 1e12)))[:8]:
        found = _descend(starts[i], float(steps[i]), float(loss[i]), MAX_LEVEL[bits])
        best = min(best, found, key=_rank)
    step = float(best_step(best[1], best[2]))
    return tuple(int(n) for n in best[1]), step


def _rank(book: tuple[float, F64, float]) -> tuple[float, float]:
    return (book[0] if np.isinf(book[0]) else round(book[0] * 1e12), -float(book[1][-1]))


def _descend(levels: F64, step: float, loss: float, limit: int) -> tuple[float, F64, float]:
    """Return loss, levels and step at a point where no move of one or two levels by one helps."""
    k = len(levels)
    unit = np.eye(k)
    moves = [sign * unit[i] for i in range(k) for sign in (-1, 1)]
    moves += [a + b for a, b in itertools.combinations(moves, 2) if np.abs(a + b).any()]
    while True:
        near = levels + np.array(moves)
        near = near[(np.diff(near, axis=1, prepend=0) > 0).all(axis=1) & (near[:, -1] <= limit)]
        losses, steps = _score(near, np.full(len(near), step))
        i = int(np.argmin(losses))
        if losses[i] >= loss - 1e-13:
            return loss, levels, step
        loss, levels, step = float(losses[i]), near[i], float(steps[i])


def best_uniform_step(bits: int) -> float:
    """Return the step of the best uniform mid-rise book of `bits` bits."""
    half = np.arange(2 ** (bits - 1)) + 0.5
    grid = np.geomspace(0.01, 1.5, 40001)
    mass = np.array([distortion(half * s) for s in grid[::100]])
    near = grid[max(0, 100 * (int(np.argmin(mass)) - 1)) : 100 * (int(np.argmin(mass)) + 1)]
    return float(near[np.argmin([distortion(half * s) for s in near])])
