"""The rotary position embedding of many tokens at once, there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import kvrs


@dataclass(frozen=True)
class Phasors:
    """Cosines and sines of the first positions, for one layer's keys.

    Attributes
    ----------
    cos, sin : Tensor
        ``[tokens, pairs]``, float64, with the attention factor.
    first, second : Tensor
        The two channels of each pair, ``[pairs]``.
    factor : float
        By how much the embedding stretches a pair.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    factor: float

    def turn(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Return vectors with the embedding of their positions, or without the one that they have.

        Parameters
        ----------
        x : Tensor
            ``[..., tokens, d]``, positions from 0 on.
        back : bool
            Undo the embedding.
        """
        cos, sin = (part[: x.shape[-2]].to(x.dtype) for part in (self.cos, self.sin))
        if back:
            cos, sin = cos / self.factor**2, -sin / self.factor**2
        a, b = x[..., self.first], x[..., self.second]
        turned = x.clone()
        turned[..., self.first] = a * cos - b * sin
        turned[..., self.second] = b * cos + a * sin
        return turned

    def features(self, tokens: int) -> torch.Tensor:
        """Return cosines, sines and 1 of each position, ``[tokens, 2 * pairs + 1]``."""
        ones = torch.ones(tokens, 1, dtype=self.cos.dtype)
        return torch.cat([self.cos[:tokens], self.sin[:tokens], ones], dim=1)

    def constant(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the matrix ``[d, features]`` from the features of a position to the turned vector."""
        pairs = len(self.first)
        matrix = torch.zeros(len(vector), 2 * pairs + 1, dtype=vector.dtype)
        matrix[:, -1] = vector
        matrix[self.first, -1] = matrix[self.second, -1] = 0.0
        each, a, b = torch.arange(pairs), vector[self.first], vector[self.second]
        matrix[self.first, each], matrix[self.first, pairs + each] = a, -b
        matrix[self.second, each], matrix[self.second, pairs + each] = b, a
        return matrix


def phasors(rope: kvrs.Rope | None, head_dim: int, tokens: int) -> Phasors:
    """Return the embedding of the first positions; without a rotation it has no pairs.

    Parameters
    ----------
    rope : kvrs.Rope or None
        As in the model's shape.
    head_dim : int
        Channels of a key.
    tokens : int
        How many positions.
    """
    dim = 0 if rope is None else head_dim if rope.dim is None else rope.dim
    pairs = dim // 2
    frequencies = np.zeros(0)
    if rope is not None and rope.inv_freq is not None:
        frequencies = np.asarray(rope.inv_freq, np.float64)
    elif rope is not None:
        frequencies = (
            (float(rope.theta) ** (-np.arange(pairs) / max(pairs, 1))).astype(np.float32).astype(float)
        )
    factor = 1.0 if rope is None else float(rope.attention_factor)
    angles = torch.from_numpy(np.arange(tokens)[:, None] * frequencies[None, :])
    each = torch.arange(pairs)
    interleaved = rope is not None and rope.pairing == "interleaved"
    first, second = (2 * each, 2 * each + 1) if interleaved else (each, each + pairs)
    return Phasors(angles.cos() * factor, angles.sin() * factor, first, second, factor)
