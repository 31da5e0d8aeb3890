"""Counter-form SplitMix64 streams, sign bits, gaussians and the dense rotation (rule E8)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROTATION_SIGNS = 1
"""Purpose word of the sign stream of the randomized Hadamard rotation."""
DENSE_ROTATION = 2
"""Purpose word of the gaussian stream of the dense rotation."""
KEY = 0
"""Side word of keys."""
VALUE = 1
"""Side word of values."""

GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GAUSSIAN_MEAN = 393210
_MASK = (1 << 64) - 1


def words(seed: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Return the words ``z_start .. z_(start+count-1)`` of the stream `seed`, ``[count]`` u64."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = np.uint64(seed & _MASK) + index * np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def mix1(value: int) -> int:
    """Return the first word of the stream `value`."""
    return int(words(value, 1)[0])


def stream_key(seed: int, purpose: int, side: int, d: int) -> int:
    """Return the key of the independent stream (purpose, side, d) of a plan's `seed`."""
    key = mix1(seed)
    for word in (purpose, side, d):
        key = mix1(key ^ word)
    return key


def sign_bits(key: int, count: int) -> NDArray[np.uint8]:
    """Return bits ``0 .. count-1`` of the stream `key`, least significant first, ``[count]`` u8."""
    z = words(key, (count + 63) // 64)
    index = np.arange(count)
    shifted = z[index // 64] >> (index % 64).astype(np.uint64)
    return (shifted & np.uint64(1)).astype(np.uint8)


def signs(key: int, d: int, rounds: int = 3) -> NDArray[np.float32]:
    """Return the signs ``[rounds, d]`` f32 of (round r, channel c): bit ``r*d + c``, 1 is minus."""
    bits = sign_bits(key, rounds * d)
    return np.where(bits == 1, np.float32(-1), np.float32(1)).reshape(rounds, d)


def gaussians(key: int, count: int) -> NDArray[np.float64]:
    """Return `count` near-gaussian numbers, exact in f64.

    Number g is the sum of the twelve u16 of the words 3g, 3g+1, 3g+2, minus 393210, over 65536.
    """
    quarters = words(key, 3 * count).astype("<u8").view("<u2").reshape(count, 12)
    total = quarters.astype(np.int64).sum(axis=1) - _GAUSSIAN_MEAN
    return np.asarray(total.astype(np.float64) / 65536.0)


@lru_cache(maxsize=32)
def dense_rotation(seed: int, side: int, d: int) -> NDArray[np.float32]:
    """Return the dense rotation ``[d, d]`` f32 whose rows are the analysis matrix.

    It is ``H_0 H_1 .. H_(d-2)`` of Householder reflections in f64 (Stewart, 1980), rounded once to f32.
    Reflection r sends the gaussian vector ``g_r`` of length ``d - r`` to a multiple of its first axis
    and acts on coordinates ``r .. d-1``; the vectors are read from one stream, r ascending.
    """
    draws = gaussians(stream_key(seed, DENSE_ROTATION, side, d), d * (d + 1) // 2 - 1)
    starts = np.concatenate([[0], np.cumsum(np.arange(d, 1, -1))])
    a = np.eye(d, dtype=np.float64)
    for r in range(d - 2, -1, -1):
        _reflect(a[r:], draws[starts[r] : starts[r] + d - r].copy())
    rotation = a.astype(np.float32)
    rotation.setflags(write=False)
    return rotation


def _reflect(rows: NDArray[np.float64], w: NDArray[np.float64]) -> None:
    """Apply ``I - 2 w' w'^T / (w'.w')`` to `rows` in place, ``w' = w + sign(w_0) |w| e_0``.

    Every statement below is one f64 operation per element, in this order; all sums ascend and start
    at +0. Columns of `rows` do not touch each other.
    """
    square = np.float64(0)
    for x in w:
        square = square + x * x
    if square == 0:
        return
    length = np.sqrt(square)
    w[0] = w[0] + length if w[0] >= 0 else w[0] - length
    square = np.float64(0)
    for x in w:
        square = square + x * x
    beta = np.float64(2) / square
    dots = np.zeros(rows.shape[1], dtype=np.float64)
    for i in range(len(w)):
        dots = dots + w[i] * rows[i]
    dots = beta * dots
    for i in range(len(w)):
        rows[i] = rows[i] - w[i] * dots
