"""Exact RoPE phasors from 64-bit phases, and the rotation of a constant by them (rule E1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

INVERSE_TWO_PI = 0x28BE60DB9391054A7F09D5F47D4D3770
"""``1 / (2 pi)`` times ``2^128``, rounded."""
RADIANS_PER_PHASE = 2.0 * np.pi * 2.0**-64
"""Radians of one phase unit: f64(2 pi), scaled exactly."""

# Horner coefficients, highest power first; each is the f64 quotient 1/n! with its sign.
_SINE = (1 / 6227020800, -1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0)
_COSINE = (-1 / 87178291200, 1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0)


def phase_step(theta: float | np.float32) -> int:
    """Return ``round(theta / 2 pi * 2^64) mod 2^64`` for one f32 inverse frequency, exactly."""
    turns = Fraction(float(np.float32(theta))) * INVERSE_TWO_PI / (1 << 64)
    return int(turns + Fraction(1, 2)) & ((1 << 64) - 1)


def _horner(coefficients: tuple[float, ...], z: NDArray[np.float64]) -> NDArray[np.float64]:
    p = np.full_like(z, coefficients[0])
    for c in coefficients[1:]:
        p = p * z
        p = p + np.float64(c)
    return p


def phasor64(
    positions: ArrayLike, steps: NDArray[np.uint64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosine and sine ``[tokens, pairs]`` f64 of positions times phase steps, unfused f64."""
    with np.errstate(over="ignore"):
        phase = np.asarray(positions, dtype=np.uint64)[:, None] * steps[None, :]
        quarter = (phase + np.uint64(1 << 61)) >> np.uint64(62)
        rest = (phase - (quarter << np.uint64(62))).view(np.int64)
    x = rest.astype(np.float64) * np.float64(RADIANS_PER_PHASE)
    z = x * x
    s = _horner(_SINE, z) * x
    c = _horner(_COSINE, z)
    cosine = np.choose(quarter.astype(np.int64), [c, -s, -c, s])
    sine = np.choose(quarter.astype(np.int64), [s, c, -s, -c])
    return cosine, sine


def phasor(
    positions: ArrayLike, steps: NDArray[np.uint64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return `phasor64` rounded to f32: cosine and sine ``[tokens, pairs]``."""
    cosine, sine = phasor64(positions, steps)
    return cosine.astype(np.float32), sine.astype(np.float32)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of one layer.

    Parameters
    ----------
    head_dim
        Channels of a head, even.
    inv_freq
        The model's own f32 inverse frequencies, ``[rotary_dim / 2]``.
    pairing
        "half": channel j goes with ``j + rotary_dim/2``; "interleaved": ``2j`` with ``2j + 1``.
    attention_factor
        Factor on the rotated channels (YaRN), f32.
    """

    head_dim: int
    inv_freq: NDArray[np.float32]
    pairing: str = "half"
    attention_factor: float = 1.0
    steps: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f"pairing is {self.pairing!r}; allowed are 'half' and 'interleaved'")
        if self.head_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} does not fit head_dim {self.head_dim}")
        steps = np.zeros(self.head_dim // 2, dtype=np.uint64)
        steps[: len(self.inv_freq)] = [phase_step(t) for t in self.inv_freq]
        object.__setattr__(self, "steps", steps)

    @property
    def rotary_dim(self) -> int:
        """Channels that turn."""
        return 2 * len(self.inv_freq)

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and second channel of each of the ``head_dim / 2`` pairs.

        Channels from rotary_dim on are neighbours, ``(2j, 2j + 1)``, with phase step 0.
        """
        first = 2 * np.arange(self.head_dim // 2)
        second = first + 1
        if self.pairing == "half":
            turning = self.rotary_dim // 2
            first[:turning] = np.arange(turning)
            second[:turning] = turning + np.arange(turning)
        return first, second

    def constant(self, k0: ArrayLike) -> NDArray[np.float32]:
        """Return `k0` ``[head_dim]`` with the attention factor on the turning channels, f32."""
        k = np.array(k0, dtype=np.float32)
        k[: self.rotary_dim] = k[: self.rotary_dim] * np.float32(self.attention_factor)
        return k


def rotate(rope: Rope, vectors: ArrayLike, positions: ArrayLike) -> NDArray[np.float32]:
    """Return ``R(position) vector`` ``[tokens, head_dim]`` f32 for one vector or one per position.

    The attention factor is not applied; `Rope.constant` applies it once.
    """
    cosine, sine = phasor(positions, rope.steps)
    v = np.broadcast_to(np.asarray(vectors, np.float32), (len(cosine), rope.head_dim))
    first, second = rope.pairs()
    a, b = v[:, first], v[:, second]
    out = np.empty(v.shape, dtype=np.float32)
    out[:, first] = a * cosine - b * sine
    out[:, second] = b * cosine + a * sine
    return out
