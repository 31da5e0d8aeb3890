"""Plans of codecs that need data, for random tensors whose statistics are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvrs
import numpy as np

HEADS, D, THETA = 2, 32, 1e4
WIDTHS = {3: [(4, 2), (5, 3)], 4: [(5, 3), (6, 4)]}
"""Bits of the two blocks of 16 channels of each head, by their mean of the first head."""


def shape(**settings: Any) -> kvrs.ModelShape:
    fields = {"layers": 1, "query_heads": 4, "kv_heads": HEADS, "head_dim": D, "rope": kvrs.Rope(theta=THETA)}
    return kvrs.ModelShape(**(fields | settings))


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return `x` ``[..., T, D]`` behind the rotary embedding."""
    angle = positions[:, None] * THETA ** (-np.arange(0, D, 2) / D)
    c, s = np.cos(angle), np.sin(angle)
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


class Tokens:
    """Keys before and behind the rotary embedding, values, and their means."""

    def __init__(self, tokens: int = 200, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        deviation = np.geomspace(3, 0.05, D)
        mean = rng.standard_normal((2, HEADS, 1, D)) * 4
        self.pre, self.v = rng.standard_normal((2, HEADS, tokens, D)) * deviation + mean
        self.km, self.vm = np.float32(mean[:, :, 0])
        self.positions = np.arange(tokens)
        self.k = turned(self.pre, self.positions)

    def coded(self, pre: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values without their constants, as a codec sees them."""
        km = self.km[:, None]
        keys = self.pre - km if pre else self.k - turned(km, self.positions)
        return keys, self.v - self.vm[:, None]


def transform_arrays(
    side: str, head: int, x: np.ndarray, widths: tuple[int, ...], seed: int
) -> dict[str, np.ndarray]:
    """Return principal components of `x` ``[T, D]``, each run of equal width rotated."""
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    values, vectors = values[::-1], vectors[:, ::-1]
    n = 16 * len(widths)
    rng, sigma = np.random.default_rng(seed), np.sqrt(values[:n])
    rotation = np.zeros((n, n))
    for width in set(widths):
        run = np.repeat(np.array(widths) == width, 16)
        rotation[np.ix_(run, run)] = np.linalg.qr(rng.standard_normal((run.sum(), run.sum())))[0]
    return {
        f"{side}.0.{head}.analysis": np.float32(rotation @ (vectors[:, :n] / sigma).T),
        f"{side}.0.{head}.synthesis": np.float32(rotation @ (vectors[:, :n] * sigma).T),
        f"{side}.0.{head}.widths": np.float32(widths),
    }


def calibrated(codec: Any, tokens: Tokens, arrays: dict[str, np.ndarray], **settings: Any) -> kvrs.Plan:
    settings = {"sinks": 0, "recent": 0} | settings
    return kvrs.Plan(
        shape(),
        keys=codec,
        values=codec,
        key_offset=[tokens.km],
        value_offset=[tokens.vm],
        calibration=kvrs.Calibration(arrays, "abc", {"bits": 3}),
        **settings,
    )


def transform_plan(codec: Any, tokens: Tokens, bits: int = 3, **settings: Any) -> kvrs.Plan:
    """Return a plan of a transform coder; at 3 bits its values keep half of the channels."""
    keys, values = tokens.coded(codec.name != "aatc" or codec.variant == "pre_rope")
    arrays = {}
    for head, widths in enumerate(WIDTHS[bits]):
        arrays |= transform_arrays("keys", head, keys[head], widths, 1)
        arrays |= transform_arrays("values", head, values[head], widths[:1] if bits == 3 else widths, 2)
    return calibrated(codec, tokens, arrays, **settings)


def kvquant_plan(tokens: Tokens, bits: int = 3, **settings: Any) -> kvrs.Plan:
    keys, _ = tokens.coded(pre=True)
    sample = np.sort(np.random.default_rng(1).standard_normal(4096))
    levels = np.float32([part.mean() for part in np.array_split(sample, 2**bits)])
    arrays = {}
    for head in range(HEADS):
        arrays[f"keys.0.{head}.scale"] = np.float32(keys[head].std(0))
        arrays[f"keys.0.{head}.codebook"] = levels
        arrays[f"values.0.{head}.codebook"] = levels / np.float32(2.4)
    return calibrated(kvrs.KVQuant(bits=bits), tokens, arrays, **settings)


PLANS: dict[str, Callable[..., kvrs.Plan]] = {
    "aatc": lambda tokens, **s: transform_plan(kvrs.AATC(bits=3), tokens, **s),
    "aatc pre_rope": lambda tokens, **s: transform_plan(kvrs.AATC(bits=3, variant="pre_rope"), tokens, **s),
    "kvtc": lambda tokens, **s: transform_plan(kvrs.KVTC(bits=3), tokens, **s),
    "palu": lambda tokens, **s: transform_plan(kvrs.PALU(rank=1.0, bits=3), tokens, **s),
    "kvquant": kvquant_plan,
}
