"""Sketches of signs: QJL (Zandieh et al., 2024, arXiv:2406.03482), TurboQuant's prod (arXiv:2504.19874)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import rng
from .codebook import codebook
from .offset import KeyOffset, subtract_key_offset, subtract_mean
from .rng import gaussians, stream_key
from .scale import norms, to_f16
from .transform import dense, inverse, unit_variance

SKETCH = 3
"""Purpose word of a gaussian sketch matrix, with 256 times its rows added."""
ORTHOGONAL_SKETCH = 4
"""Purpose word of the reflections of an orthogonal sketch matrix."""

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]


@lru_cache(maxsize=8)
def gaussian(seed: int, side: int, rows: int, d: int) -> F32:
    """Return the gaussian sketch matrix ``[rows, d]`` f32."""
    key = stream_key(seed, SKETCH + 256 * rows, side, d)
    return gaussians(key, rows * d).astype(np.float32).reshape(rows, d)


@lru_cache(maxsize=8)
def orthogonal(seed: int, side: int, d: int) -> F32:
    """Return the orthogonal sketch matrix ``[d, d]`` f32: a dense rotation of a stream of its own."""
    draws = gaussians(stream_key(seed, ORTHOGONAL_SKETCH, side, d), d * (d + 1) // 2 - 1)
    starts = np.concatenate([[0], np.cumsum(np.arange(d, 1, -1))])
    a = np.eye(d, dtype=np.float64)
    for r in range(d - 2, -1, -1):
        rng._reflect(a[r:], draws[starts[r] : starts[r] + d - r].copy())
    return a.astype(np.float32)


def matrix(kind: str, seed: int, side: int, d: int) -> F32:
    """Return the square sketch matrix ``[d, d]`` of `kind`."""
    return gaussian(seed, side, d, d) if kind == "gaussian" else orthogonal(seed, side, d)


def step(kind: str, rows: int, d: int) -> np.float32:
    """Return the factor of signed rows: over their number and the mean magnitude of a coordinate."""
    log_ratio = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    magnitude = math.sqrt(2 / math.pi) if kind == "gaussian" else math.exp(log_ratio) / math.sqrt(math.pi)
    return np.float32(1 / (rows * magnitude))


def signs(x: F32, sketch: F32) -> tuple[U8, F16]:
    """Return signs ``[n, rows]`` (1: not negative) of the sketch of `x` ``[n, d]``, and lengths ``[n]``."""
    return (dense(x, sketch) >= 0).astype(np.uint8), to_f16(norms(x)[0])


def estimate(codes: U8, length: F16, sketch: F32, factor: np.float32) -> F64:
    """Return ``[n, d]`` f64: the signed sum of rows, times factor and length."""
    signed = 2.0 * codes - 1
    return signed @ sketch.astype(np.float64) * float(factor) * length.astype(np.float64)[:, None]


def qjl(
    x: F32, m: int, seed: int, offset: KeyOffset | None = None, positions: ArrayLike | None = None
) -> tuple[U8, F16, F64]:
    """Return QJL's codes ``[n, m]``, lengths ``[n]`` and decoded keys ``[n, d]`` of `x` ``[n, d]``."""
    if offset is not None and positions is not None:
        x = subtract_key_offset(x, offset, positions)
    s = gaussian(seed, rng.KEY, m, x.shape[1])
    codes, length = signs(x, s)
    out = estimate(codes, length, s, step("gaussian", m, x.shape[1]))
    return codes, length, out if offset is None or positions is None else out + offset.at(positions)


def prod(
    x: F32,
    bits: int,
    side: int,
    seed: int,
    kind: str = "gaussian",
    rotation: str = "hadamard",
    offset: KeyOffset | None = None,
    positions: ArrayLike | None = None,
    mean: ArrayLike | None = None,
) -> tuple[U8, F64]:
    """Return the codes of the prod variant ``[n, 2 d]`` (1 bit: ``[n, d]``) and the decoded vectors.

    The first ``bits - 1`` bits are the mse variant with its raw scale. What they leave of the rotated vector,
    with the scale as it is stored, is sketched; its length is the second scale.
    """
    if offset is not None and positions is not None:
        x = subtract_key_offset(x, offset, positions)
    if mean is not None:
        x = subtract_mean(x, mean)
    d = x.shape[1]
    s, factor = matrix(kind, seed, side, d), step(kind, d, d)
    if bits == 1:
        codes, length = signs(x, s)
        out = estimate(codes, length, s, factor)
    else:
        first, v, rest, stored = _first(x, bits - 1, side, seed, rotation)
        second, length = signs(rest, s)
        codes = np.concatenate([first, second], axis=1)
        rotated = v.astype(np.float64) * stored.astype(np.float64)[:, None]
        rotated = rotated + estimate(second, length, s, factor)
        out = inverse(rotated, side, seed, rotation)
    if offset is not None and positions is not None:
        out = out + offset.at(positions)
    return codes, out if mean is None else out + np.asarray(mean, np.float64)


def _first(x: F32, bits: int, side: int, seed: int, rotation: str) -> tuple[U8, F32, F32, F16]:
    """Return codes, their values, what they leave of the rotated vector, and the raw scale."""
    length, inverse_length, _ = norms(x)
    u = unit_variance(x, inverse_length, side, seed, rotation)
    book = codebook(bits)
    codes = book.encode(u)
    scale = length * np.float32(1 / math.sqrt(x.shape[1]))
    stored = to_f16(scale)
    v = book.values[codes]
    rest = u * scale[:, None] - v * stored.astype(np.float32)[:, None]
    return codes, v, rest, stored
