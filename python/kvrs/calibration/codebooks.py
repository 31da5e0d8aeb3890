"""Codebooks out of data by k-means in one dimension, for KVQuant."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
BINS = 4096
ITERATIONS = 200
TILE = 16
"""Tokens among which the largest entries are kept apart."""


def kmeans(samples: Array, bits: int) -> Array:
    """Return the ``2^bits`` levels of least squared error for numbers, ascending.

    Lloyd's iteration over a fine histogram, from levels of equal mass.

    Parameters
    ----------
    samples : ndarray
        Any shape.
    bits : int
        Bits of a code.
    """
    flat = np.sort(np.asarray(samples, np.float64).ravel())
    edges = np.linspace(0, len(flat), min(BINS, len(flat)) + 1).astype(int)
    sums, counts = np.add.reduceat(flat, edges[:-1]), np.diff(edges)
    places = sums / counts
    levels = np.quantile(flat, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(ITERATIONS):
        code = np.searchsorted((levels[1:] + levels[:-1]) / 2, places)
        mass = np.bincount(code, counts, 2**bits)
        total = np.bincount(code, sums, 2**bits)
        new = np.where(mass > 0, total / np.maximum(mass, 1), levels)
        if np.allclose(new, levels, rtol=0, atol=1e-9 * (flat[-1] - flat[0] + 1e-300)):
            break
        levels = new
    return np.sort(levels)


def key_book(sample: Array, bits: int, outliers: float) -> tuple[Array, Array]:
    """Return the scale of each channel ``[d]`` and the codebook of one head's keys ``[2^bits]``.

    Parameters
    ----------
    sample : ndarray
        Centred keys without rotation, ``[tokens, d]``.
    bits : int
        Bits of a code.
    outliers : float
        Share of the entries that the codebook need not serve.
    """
    scale = np.sqrt(np.mean(np.square(sample, dtype=np.float64), axis=0))
    scale = np.maximum(scale, 1e-6 * scale.max() + 1e-30)
    unit = sample / scale
    return scale, kmeans(unit[~largest(unit, outliers)], bits)


def value_book(sample: Array, bits: int, outliers: float) -> Array:
    """Return the codebook of one head's values ``[2^bits]``, which each token's range maps to [-1, 1].

    Parameters
    ----------
    sample, bits, outliers
        As for `key_book`; centred values.
    """
    kept = np.ma.masked_array(sample, largest(sample, outliers))
    low, high = kept.min(axis=1, keepdims=True), kept.max(axis=1, keepdims=True)
    half = np.ma.maximum((high - low) / 2, 1e-30)
    return kmeans(((kept - (low + high) / 2) / half).compressed(), bits)


def largest(rows: Array, share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which entries of each 16 tokens are the largest, bool ``[tokens, d]``."""
    found = np.zeros(rows.shape, bool)
    for start in range(0, len(rows), TILE):
        tile = np.abs(rows[start : start + TILE])
        count = round(share * tile.size)
        order = np.argsort(-tile, axis=None, kind="stable")[:count]
        found[start : start + TILE].flat[order] = True
    return found
