"""Rotations: three rounds of signs and Walsh-Hadamard, or a dense matrix (rule E4)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from . import rng

ROUNDS = 3

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def uses_hadamard(d: int, rotation: str) -> bool:
    """Return whether `rotation` on `d` channels is the Hadamard one; others are dense."""
    if rotation not in ("hadamard", "dense"):
        raise ValueError(f"rotation is {rotation!r}; allowed are 'hadamard' and 'dense'")
    return rotation == "hadamard" and d >= 16 and d & (d - 1) == 0


def hadamard_signs(seed: int, side: int, d: int) -> F32:
    """Return the signs ``[3, d]`` of a plan's `seed`."""
    return rng.signs(rng.stream_key(seed, rng.ROTATION_SIGNS, side, d), d, ROUNDS)


def walsh_hadamard(x: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the unnormalised Walsh-Hadamard transform of `x` ``[n, d]``, stages h = 1, 2, 4 .. d/2."""
    n, d = x.shape
    h = 1
    while h < d:
        y = x.reshape(n, d // (2 * h), 2, h)
        x = np.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], axis=2).reshape(n, d)
        h *= 2
    return x


def hadamard(x: F32, signs: F32) -> F32:
    """Return three rounds of signs and transform of `x` ``[n, d]`` f32, scaled after rounds 1 and 2."""
    half = np.float32(2.0 ** -(int(math.log2(x.shape[1])) // 2))
    for r in range(ROUNDS):
        x = walsh_hadamard(x * signs[r])
        if r < ROUNDS - 1:
            x = x * half
    return x


def kappa(d: int) -> np.float32:
    """Return 1 where log2 d is even, 1/2 where it is odd."""
    return np.float32(0.5 if int(math.log2(d)) % 2 else 1.0)


def dense(x: F32, matrix: F32) -> F32:
    """Return ``matrix x`` ``[n, rows]``; each sum starts at +0 and takes channels ascending."""
    acc = np.zeros((len(x), len(matrix)), dtype=np.float32)
    for c in range(x.shape[1]):
        acc = acc + matrix[None, :, c] * x[:, c, None]
    return acc


def unit_variance(x: F32, inverse: F32, side: int, seed: int, rotation: str) -> F32:
    """Return ``u`` ``[n, d]``: `x` rotated, divided by its length, times sqrt d."""
    d = x.shape[1]
    if uses_hadamard(d, rotation):
        z = hadamard(x, hadamard_signs(seed, side, d))
        return z * (inverse * kappa(d))[:, None]
    y = dense(x, rng.dense_rotation(seed, side, d))
    return y * (inverse * np.float32(math.sqrt(d)))[:, None]


def inverse(u: F64, side: int, seed: int, rotation: str) -> F64:
    """Return the transpose rotation of `u` ``[n, d]`` in f64 (of orthonormal scale)."""
    d = u.shape[1]
    if not uses_hadamard(d, rotation):
        matrix = rng.dense_rotation(seed, side, d).astype(np.float64)
        return np.asarray(np.einsum("nr,rc->nc", u, matrix))
    signs = hadamard_signs(seed, side, d).astype(np.float64)
    for r in reversed(range(ROUNDS)):
        u = walsh_hadamard(u) / math.sqrt(d) * signs[r]
    return u
