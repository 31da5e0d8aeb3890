"""Bytes scaled by the largest magnitude of a vector: int8 and 8-bit floats (rule E7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import minmax
from .offset import KeyOffset, subtract_key_offset, subtract_mean

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FORMATS = ("int8", "e4m3", "e5m2")
LARGEST = np.float32(448)
"""What the largest magnitude becomes in both float formats."""


def e5m2_values() -> F32:
    """Return the 124 finite non-negative e5m2 values: the f16 numbers whose low byte is 0."""
    return (np.arange(124, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _nearest(size: F32, table: F32) -> NDArray[np.int64]:
    """Return the index of the nearest of `table`, the even one at a tie."""
    middle = (table[1:].astype(np.float64) + table[:-1]) / 2
    below = np.searchsorted(middle, size.astype(np.float64), side="left")
    at = np.minimum(below, len(middle) - 1)
    tie = (below < len(middle)) & (size == middle[at])
    return np.asarray(below + (tie & (below % 2 == 1)), np.int64)


def round_trip(
    x: F32,
    target: str,
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> tuple[NDArray[np.integer], F64]:
    """Return codes and decoded vectors ``[n, d]`` of `x` ``[n, d]``; `target` is one of `FORMATS`."""
    if offset is not None and positions is not None:
        x = subtract_key_offset(x, offset, positions)
    if mean is not None:
        x = subtract_mean(x, mean)
    codes: NDArray[np.integer]
    if target == "int8":
        codes, scale = minmax.encode_int8(x)
        numbers = codes.astype(np.float64)
    else:
        table = minmax.e4m3_values() if target == "e4m3" else e5m2_values()
        scale = np.minimum(np.abs(x).max(axis=1) / LARGEST, np.float32(65504)).astype(np.float16)
        wide = scale.astype(np.float32)
        inverse = np.where(wide == 0, np.float32(0), np.float32(1) / np.where(wide == 0, np.float32(1), wide))
        t = x * inverse[:, None]
        index = _nearest(np.abs(t), table)
        codes = index | np.where(np.signbit(t), 128, 0)
        numbers = np.copysign(table[index], t).astype(np.float64)
    out = numbers * scale.astype(np.float64)[:, None]
    if offset is not None and positions is not None:
        out = out + offset.at(positions)
    return codes, out if mean is None else out + np.asarray(mean, np.float64)
