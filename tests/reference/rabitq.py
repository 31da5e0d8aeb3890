"""RaBitQ (Gao et al., 2024, arXiv:2405.12497; 2409.09913): rotation, an even grid, and an error bound."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import rng
from .codebook import codebook
from .offset import KeyOffset, subtract_key_offset, subtract_mean
from .scale import norms, red16, scales, to_f16
from .transform import inverse, unit_variance
from .turboquant import stored_channels

F32 = NDArray[np.float32]

STEPS: dict[int, float] = {2: 0.9957, 3: 0.5860, 4: 0.3352, 5: 0.1881, 6: 0.1041}
"""Steps of least squared error for unit variance; 1, 7 and 8 bits are the gaussian books, which are even."""
DEVIATIONS = 1.9
"""The paper's e0: a bound holds as often as a normal variable stays within so many deviations."""


def values(bits: int) -> F32:
    """Return the grid ``[2^bits]`` f32, ascending: odd integers times half a step, rounded once."""
    if bits not in STEPS:
        return codebook(bits).values
    odd = np.arange(1 - 2**bits, 2**bits, 2, dtype=np.float32)
    return odd * np.float32(STEPS[bits] / 2)


def codes(u: F32, bits: int) -> NDArray[np.uint8]:
    """Return the codes of unit-variance numbers `u`: the borders, multiples of the step, at or below them."""
    if bits not in STEPS:
        return codebook(bits).encode(u)
    borders = np.arange(2 - 2**bits, 2**bits - 1, 2, dtype=np.float32) * np.float32(STEPS[bits] / 2)
    return np.searchsorted(borders, u, side="right").astype(np.uint8)


def encode(
    x: F32,
    bits: int,
    side: int,
    seed: int,
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Return codes ``[n, stored_channels(d)]``, scales ``[n]`` and bounds ``[n]`` of `x` ``[n, d]`` f32.

    The scale makes the inner products of keys unbiased and keeps the length of values. A bound is
    ``length * tan(angle between vector and codes) / sqrt(d - 1)``.
    """
    if offset is not None and positions is not None:
        x = subtract_key_offset(x, offset, positions)
    if mean is not None:
        x = subtract_mean(x, mean)
    n, d = x.shape
    length, inverse_length, zero = norms(x)
    u = unit_variance(x, inverse_length, side, seed, "hadamard")
    stored = np.zeros((n, stored_channels(d)), np.uint8)
    stored[:, :d] = codes(u, bits)
    v = values(bits)[stored[:, :d]]
    rule = "unbiased" if side == rng.KEY else "norm"
    return stored, scales(rule, length, zero, u, v), bounds(length, zero, u, v)


def bounds(length: F32, zero: NDArray[np.bool_], u: F32, v: F32) -> NDArray[np.float16]:
    """Return what the unbiased codes ``v (u.u) / (u.v)`` miss of each vector, over ``sqrt(d - 1)``."""
    square, along = red16(u * u), red16(u * v)
    with np.errstate(divide="ignore", invalid="ignore"):
        missed = v * (square / along)[:, None] - u
        ratio = np.sqrt(red16(missed * missed) / square)
    inverse_root = np.float32(1 / math.sqrt(u.shape[1] - 1))
    return to_f16(np.where(zero, np.float32(0), (length * ratio) * inverse_root))


def decode(
    stored: NDArray[np.uint8],
    scale: NDArray[np.float16],
    bits: int,
    d: int,
    side: int,
    seed: int,
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Return ``[n, d]`` f64: grid values times the scale, rotated back, plus the offset or mean."""
    u = values(bits).astype(np.float64)[stored[:, :d]]
    x = inverse(u, side, seed, "hadamard") * scale.astype(np.float64)[:, None]
    if offset is not None and positions is not None:
        x = x + offset.at(positions)
    return x if mean is None else x + np.asarray(mean, np.float64)


def best_grid(o: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Return the grid point ``[d]`` whose direction is nearest to `o` ``[d]``, by the paper's exact sweep.

    The point of a factor t is ``floor(t |o_c|) + 1/2`` with the signs of `o`; it changes where ``t |o_c|`` is
    an integer. All such factors are met in order.
    """
    size, top = np.abs(o), 2 ** (bits - 1) - 1
    point = np.full(len(o), 0.5)
    events = sorted((k / s, c) for c, s in enumerate(size) if s > 0 for k in range(1, top + 1))
    along, square = float(point @ size), float(point @ point)
    best, chosen = along / math.sqrt(square), point.copy()
    for _, c in events:
        along, square = along + float(size[c]), square + 2 * float(point[c]) + 1
        point[c] += 1
        if along / math.sqrt(square) > best:
            best, chosen = along / math.sqrt(square), point.copy()
    return np.asarray(np.copysign(chosen, o), np.float64)
