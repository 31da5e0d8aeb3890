"""Sums of 16 partial sums, norms, scale rules and their f16 rounding (rules E2, E3, E6)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

RULES = ("raw", "norm", "lsq", "unbiased")
"""Scale rules of one-scale rotations; transform coding takes `rms`."""

TINY = np.float32(2.0**-100)
F16_MAX = np.float32(65504)

F32 = NDArray[np.float32]


def red16(v: F32) -> F32:
    """Return the sum over channels of `v` ``[n, d]`` in the order of rule E2, ``[n]``."""
    n, d = v.shape
    p = np.zeros((n, 16), dtype=np.float32)
    for c in range(0, d, 16):
        part = v[:, c : c + 16]
        p[:, : part.shape[1]] = p[:, : part.shape[1]] + part
    for half in (8, 4, 2, 1):
        p = p[:, :half] + p[:, half : 2 * half]
    return p[:, 0]


def norms(x: F32) -> tuple[F32, F32, NDArray[np.bool_]]:
    """Return length, reciprocal length and the zero-vector mask of `x` ``[n, d]``.

    A zero vector (squared length below 2^-100) has length 0 and reciprocal 0.

    Raises
    ------
    ValueError
        A squared length is not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        square = red16(x * x)
    if not np.isfinite(square).all():
        raise ValueError(f"x: token {int(np.argmin(np.isfinite(square)))} has no finite length")
    zero = square < TINY
    length = np.sqrt(np.where(zero, np.float32(0), square))
    inverse = np.where(zero, np.float32(0), np.float32(1) / np.where(zero, np.float32(1), length))
    return length, inverse, zero


def scales(rule: str, length: F32, zero: NDArray[np.bool_], u: F32, v: F32) -> NDArray[np.float16]:
    """Return the f16 scales ``[n]`` of `rule` for unit-variance `u` and its code values `v` ``[n, d]``."""
    d = u.shape[1]
    root = np.float32(math.sqrt(d))
    inverse_root = np.float32(1.0 / math.sqrt(d))
    uc, cc = red16(u * v), red16(v * v)
    if rule == "raw":
        s = length * inverse_root
    elif rule == "norm":
        s = length / np.sqrt(cc)
    elif rule == "lsq":
        s = (length * inverse_root) * (uc / cc)
    elif rule == "unbiased":
        positive = uc > 0
        s = (length * root) / np.where(positive, uc, np.float32(1))
        s = np.where(positive, s, length / np.sqrt(cc))
    else:
        raise ValueError(f"rule is {rule!r}; allowed are {', '.join(RULES)}")
    return to_f16(np.where(zero, np.float32(0), s))


def rms(y: F32) -> tuple[F32, F32]:
    """Return the rms of the live coefficients `y` ``[n, live]`` and its reciprocal (transform coding).

    ``u = y * reciprocal``; a zero vector has rms 0 and reciprocal 0.
    """
    square = red16(y * y)
    zero = square < TINY
    s = np.sqrt(square * (np.float32(1) / np.float32(y.shape[1])))
    s = np.where(zero, np.float32(0), s)
    return s, np.where(zero, np.float32(0), np.float32(1) / np.where(zero, np.float32(1), s))


def to_f16(s: F32) -> NDArray[np.float16]:
    """Return `s` >= 0 in f16, nearest even, saturated at 65504."""
    return np.minimum(s, F16_MAX).astype(np.float16)
