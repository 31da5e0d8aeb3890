"""Codes between a minimum and a maximum, int8 by the largest magnitude, and fp8 e4m3 (rule E7)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .scale import F16_MAX

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]


def _f16(x: F32) -> F16:
    return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16)


def _reciprocal(s: F16) -> F32:
    wide = s.astype(np.float32)
    return np.where(s == 0, np.float32(0), np.float32(1) / np.where(s == 0, np.float32(1), wide))


def encode(x: F32, bits: int) -> tuple[NDArray[np.uint8], F16, F16]:
    """Return codes ``[n, group]``, low ends ``[n]`` and steps ``[n]`` of groups `x` ``[n, group]`` f32."""
    top = np.float32(2**bits - 1)
    low = _f16(x.min(axis=1))
    span = x.max(axis=1) - low.astype(np.float32)
    step = _f16(np.maximum(span, np.float32(0)) / top)
    t = (x - low.astype(np.float32)[:, None]) * _reciprocal(step)[:, None]
    return np.clip(np.rint(t), np.float32(0), top).astype(np.uint8), low, step


def decode(codes: NDArray[np.uint8], low: F16, step: F16) -> F32:
    """Return ``code * step + low``, two f32 operations."""
    product = codes.astype(np.float32) * step.astype(np.float32)[:, None]
    return product + low.astype(np.float32)[:, None]


def encode_int8(x: F32) -> tuple[NDArray[np.int8], F16]:
    """Return int8 codes in -127 .. 127 and scales ``[n]`` of rows `x` ``[n, d]``."""
    s = _f16(np.abs(x).max(axis=1) / np.float32(127))
    t = np.rint(x * _reciprocal(s)[:, None])
    return np.clip(t, np.float32(-127), np.float32(127)).astype(np.int8), s


@lru_cache(maxsize=1)
def e4m3_values() -> F32:
    """Return the 127 finite non-negative e4m3 values, code 0 .. 126, exact."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = (1 + mantissa / 8.0) * np.exp2(exponent - 7.0)
    return np.where(exponent == 0, mantissa / 8.0 * 2.0**-6, normal).astype(np.float32)


def encode_fp8(x: F32) -> tuple[NDArray[np.uint8], F16]:
    """Return e4m3 codes and scales ``[n]`` of rows `x` ``[n, d]``: nearest even, saturating at 448."""
    s = _f16(np.abs(x).max(axis=1) / np.float32(448))
    t = x * _reciprocal(s)[:, None]
    values = e4m3_values()
    middle = (values[1:] + values[:-1]) * np.float32(0.5)
    size = np.abs(t)
    below = np.searchsorted(middle, size, side="left")
    tie = (below < 126) & (size == middle[np.minimum(below, 125)])
    code = below + (tie & (below % 2 == 1))
    return (code | np.where(np.signbit(t), 128, 0)).astype(np.uint8), s
