"""Scalar codebooks of unit variance: int8 levels up to 6 bits, uniform at 7 and 8 (rule E5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEVELS: dict[int, tuple[int, ...]] = {
    1: (63,),
    2: (18, 60),
    3: (7, 22, 39, 62),
    4: (3, 9, 15, 21, 28, 36, 46, 61),
    5: (2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 74, 84, 98, 118),
    6: (
        *(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33),
        *(36, 39, 42, 45, 48, 51, 54, 58, 62, 66, 71, 77, 84, 93, 108),
    ),
}
"""Positive half of the int8 levels, ascending; the negative half mirrors it."""

STEPS: dict[int, float] = {
    1: 0.01266483,
    2: 0.02517226,
    3: 0.03463706,
    4: 0.04480222,
    5: 0.02754684,
    6: 0.03470206,
    7: 0.0570,
    8: 0.0307,
}
"""Step of each width; the f32 nearest to this decimal is meant."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """One codebook.

    Attributes
    ----------
    bits
        Width of a code, 1 .. 8.
    step
        f32 step.
    levels
        ``[2^bits]`` f32, exact: the int8 level, or ``code + zero`` at 7 and 8 bits.
    values
        ``[2^bits]`` f32, ``f32(level * step)``.
    thresholds
        ``[2^bits - 1]`` f32 up to 6 bits; empty at 7 and 8.
    """

    bits: int
    step: np.float32
    levels: NDArray[np.float32]
    values: NDArray[np.float32]
    thresholds: NDArray[np.float32]

    def encode(self, u: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the codes of unit-variance numbers `u`, any shape."""
        if self.bits <= 6:
            return np.searchsorted(self.thresholds, u, side="right").astype(np.uint8)
        return uniform_codes(u, self.bits, np.float32(1) / self.step)


def uniform_zero(bits: int) -> np.float32:
    """Return the mid-rise zero point ``1/2 - 2^(bits-1)``."""
    return np.float32(0.5 - 2.0 ** (bits - 1))


def uniform_codes(u: NDArray[np.float32], bits: int, inv_step: np.float32) -> NDArray[np.uint8]:
    """Return ``clamp(rint(u * inv_step - zero), 0, 2^bits - 1)``, ties to even, unfused f32."""
    t = u * inv_step
    t = t - uniform_zero(bits)
    codes = np.clip(np.rint(t), np.float32(0), np.float32(2**bits - 1))
    return np.asarray(codes, dtype=np.uint8)


@lru_cache(maxsize=8)
def codebook(bits: int) -> Codebook:
    """Return the gaussian codebook of `bits` = 1 .. 8."""
    if bits not in STEPS:
        raise ValueError(f"bits is {bits}; allowed are 1 to 8")
    step = np.float32(STEPS[bits])
    if bits > 6:
        levels = np.arange(2**bits, dtype=np.float32) + uniform_zero(bits)
        return Codebook(bits, step, levels, levels * step, np.zeros(0, np.float32))
    half = np.array(LEVELS[bits], dtype=np.float32)
    levels = np.concatenate([-half[::-1], half])
    middles = (levels[1:] + levels[:-1]) * np.float32(0.5)
    return Codebook(bits, step, levels, levels * step, middles * step)
