"""What a store gives back of keys and values, without a store: encode and decode in one step, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from kvrs import _kvrs
from kvrs.calibration.rope import Phasors, phasors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from kvrs.calibration.layers import Layer
    from kvrs.calibration.transform import Transform

CHUNK = 16
"""Tokens in one call of the model: a query sees those of its own call as they are."""
GROUP = 16
"""Tokens that are encoded together."""


@dataclass(frozen=True)
class SideCoder:
    """One side of one layer: what transform coding makes of it.

    Attributes
    ----------
    layer : Layer
        Its heads and rotation.
    side : str
        ``"keys"`` or ``"values"``.
    mean : ndarray
        What is taken out, ``[kv_heads, d]``; of keys without rotation.
    transforms : sequence of Transform
        One a head.
    pre_rope : bool
        Keys without rotation.
    """

    layer: Layer
    side: str
    mean: np.ndarray
    transforms: Sequence[Transform]
    pre_rope: bool

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """Return keys or values ``[kv_heads, tokens, d]`` as a store gives them back; positions from 0."""
        tokens = x.shape[1]
        constant = torch.from_numpy(self.mean).float()[:, None].expand(-1, tokens, -1)
        turn = self._turn(tokens)
        if turn is not None and self.pre_rope:
            x = turn.turn(x, back=True)
        elif turn is not None:
            constant = turn.turn(constant)
        heads = zip(x - constant, self.transforms, strict=True)
        back = torch.stack([coded(rows, transform) for rows, transform in heads]) + constant
        return turn.turn(back) if turn is not None and self.pre_rope else back

    def _turn(self, tokens: int) -> Phasors | None:
        if self.side == "values" or self.layer.rope is None:
            return None
        return phasors(self.layer.rope, self.layer.key_dim, tokens)


def coded(rows: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Return centred vectors ``[tokens, n]`` after transform, quantisation and back."""
    channels = rows @ torch.from_numpy(transform.analysis).T
    scale = channels.square().mean(dim=1, keepdim=True).sqrt()
    unit = torch.where(scale > 0, channels / scale, 0.0)
    start = 0
    for bits in transform.widths.astype(int):
        run = slice(start, start + GROUP)
        values, borders = book(int(bits))
        unit[:, run] = values[torch.bucketize(unit[:, run].contiguous(), borders, right=True)]
        start += GROUP
    return (unit * scale.half().float()) @ torch.from_numpy(transform.synthesis)


@cache
def book(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of a gaussian codebook and the borders between them."""
    values = torch.tensor(_kvrs.codebook(bits))
    return values, (values[1:] + values[:-1]) / 2


def packed_mask(tokens: int, sinks: int, recent: int, chunk: int = CHUNK) -> torch.Tensor:
    """Return which tokens each query sees packed, bool ``[tokens, tokens]``.

    Parameters
    ----------
    tokens : int
        Length of the text.
    sinks, recent : int
        First and newest tokens that stay as they are.
    chunk : int
        Tokens in one call of the model.
    """
    index = torch.arange(tokens)
    length = index // chunk * chunk
    sealed = sinks + (length - sinks - recent).clamp_min(0) // GROUP * GROUP
    return (index[None] >= sinks) & (index[None] < sealed[:, None])
