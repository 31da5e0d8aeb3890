"""KIVI (Liu et al., 2024, arXiv:2402.02750): keys between min and max per channel, values per token (E7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import minmax
from .offset import KeyOffset, subtract_key_offset, subtract_mean

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def _round_trip(blocks: F32, bits: int) -> tuple[NDArray[np.uint8], F32]:
    """Return codes and decoded numbers of `blocks` ``[n, block]``."""
    codes, low, step = minmax.encode(np.ascontiguousarray(blocks), bits)
    return codes, minmax.decode(codes, low, step)


def keys(
    x: F32,
    bits: int,
    group: int,
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
) -> tuple[NDArray[np.uint8], F64]:
    """Return codes and decoded keys ``[n, d]`` of `x` ``[n, d]``; n is a multiple of `group`."""
    if offset is not None and positions is not None:
        x = subtract_key_offset(x, offset, positions)
    codes, out = np.empty(x.shape, np.uint8), np.empty(x.shape)
    for first in range(0, len(x), group):
        block = slice(first, first + group)
        code, decoded = _round_trip(x[block].T, bits)
        codes[block], out[block] = code.T, decoded.T
    if offset is not None and positions is not None:
        out = out + offset.at(positions)
    return codes, out


def values(x: F32, bits: int, group: int, mean: ArrayLike | None = None) -> tuple[NDArray[np.uint8], F64]:
    """Return codes and decoded values ``[n, d]`` of `x` ``[n, d]``; the last group may be short."""
    if mean is not None:
        x = subtract_mean(x, mean)
    codes, out = np.empty(x.shape, np.uint8), np.empty(x.shape)
    for first in range(0, x.shape[1], group):
        block = slice(first, first + group)
        codes[:, block], out[:, block] = _round_trip(x[:, block], bits)
    return codes, out if mean is None else out + np.asarray(mean, np.float64)
