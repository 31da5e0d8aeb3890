"""TurboQuant (Zandieh et al., 2025, arXiv:2504.19874), the mse variant, with one scale per token."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import rng
from .codebook import codebook
from .offset import KeyOffset, subtract_key_offset, subtract_mean
from .scale import norms, scales
from .transform import inverse, unit_variance


def stored_channels(d: int) -> int:
    """Return `d` rounded up to 16."""
    return -(-d // 16) * 16


def runs(bits: float, d: int) -> list[tuple[int, int]]:
    """Return the runs (width, channels) of rate `bits`, widths falling, channels adding to `stored_channels`.

    A fractional rate gives the first ``n_hi`` rotated channels one bit more; ``n_hi`` is the multiple of
    16 nearest to ``frac * d``, the larger one at a tie.

    Raises
    ------
    ValueError
        `bits` is outside 1 .. 8, or its fraction rounds to no channel or to all of them.
    """
    low = math.floor(bits)
    if not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits}; allowed are 1 to 8")
    n = stored_channels(d)
    if low == bits:
        return [(low, n)]
    high = math.floor((Fraction(bits) - low) * d / 16 + Fraction(1, 2)) * 16
    if not 0 < high < n:
        raise ValueError(f"bits is {bits}; its fraction of {d} channels rounds to {high} of {n}")
    return [(low + 1, high), (low, n - high)]


def encode(
    x: NDArray[np.float32],
    bits: float,
    side: int,
    seed: int,
    rule: str,
    rotation: str = "hadamard",
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return the codes ``[n, stored_channels(d)]`` u8 and scales ``[n]`` f16 of `x` ``[n, d]`` f32.

    Parameters
    ----------
    x
        Keys after RoPE, or values, already rounded to their 16-bit type.
    bits
        Bits per code, 1 .. 8 or a fraction between.
    side
        `rng.KEY` or `rng.VALUE`.
    seed
        The plan's seed.
    rule
        One of `scale.RULES`.
    rotation
        "hadamard" (dense where d is no power of two from 16 on) or "dense".
    offset, positions
        The key constant and the positions ``[n]`` it is turned to.
    mean
        The value mean ``[d]``.
    """
    x = np.ascontiguousarray(x, dtype=np.float32)
    if offset is not None:
        if positions is None:
            raise ValueError("positions is None; an offset needs one position a token")
        x = subtract_key_offset(x, offset, positions)
    if mean is not None:
        x = subtract_mean(x, mean)
    n, d = x.shape
    length, inverse_length, zero = norms(x)
    u = unit_variance(x, inverse_length, side, seed, rotation)
    codes = np.zeros((n, stored_channels(d)), dtype=np.uint8)
    v = np.empty((n, d), dtype=np.float32)
    start = 0
    for width, channels in runs(bits, d):
        part, book = slice(start, min(start + channels, d)), codebook(width)
        codes[:, part] = book.encode(u[:, part])
        v[:, part] = book.values[codes[:, part]]
        start += channels
    return codes, scales(rule, length, zero, u, v)


def decode(
    codes: NDArray[np.uint8],
    scale: NDArray[np.float16],
    bits: float,
    d: int,
    side: int = rng.KEY,
    seed: int = 0,
    rotation: str = "hadamard",
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Return ``[n, d]`` f64: ``level * step * scale`` rotated back, plus the offset or mean."""
    u = np.empty((len(codes), d), dtype=np.float64)
    start = 0
    for width, channels in runs(bits, d):
        part, book = slice(start, min(start + channels, d)), codebook(width)
        u[:, part] = book.levels.astype(np.float64)[codes[:, part]] * np.float64(book.step)
        start += channels
    x = inverse(u, side, seed, rotation) * scale.astype(np.float64)[:, None]
    if offset is not None and positions is not None:
        x = x + offset.at(positions)
    return x if mean is None else x + np.asarray(mean, np.float64)
