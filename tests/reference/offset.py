"""The constant taken out of keys and values before they are encoded (rule E1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .phasor import Rope, rotate


@dataclass(frozen=True, eq=False)
class KeyOffset:
    """The pre-RoPE constant of one head.

    Parameters
    ----------
    rope
        The layer's rotary embedding.
    k0
        ``[head_dim]`` f32.
    keep
        ``[head_dim / 2]`` bool, the pairs that take part; None keeps all.
    """

    rope: Rope
    k0: NDArray[np.float32]
    keep: NDArray[np.bool_] | None = None

    def at(self, positions: ArrayLike) -> NDArray[np.float32]:
        """Return ``R(position) k0`` ``[tokens, head_dim]`` f32; +0 on pairs that are not kept."""
        o = rotate(self.rope, self.rope.constant(self.k0), positions)
        if self.keep is not None:
            for channels in self.rope.pairs():
                o[:, channels[~self.keep]] = 0
        return o


def subtract_key_offset(
    x: NDArray[np.float32], offset: KeyOffset, positions: ArrayLike
) -> NDArray[np.float32]:
    """Return post-RoPE keys `x` ``[tokens, head_dim]`` less the offset at their positions, f32."""
    return x - offset.at(positions)


def subtract_mean(x: NDArray[np.float32], mean: ArrayLike) -> NDArray[np.float32]:
    """Return values `x` ``[tokens, dim]`` less the plain mean ``[dim]``, f32."""
    return x - np.asarray(mean, np.float32)[None, :]
