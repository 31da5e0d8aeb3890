"""The input of one decode step: one query a head over random keys and values, the same for all forms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128


@dataclass(frozen=True)
class Case:
    """One sequence, one layer, one new query a head.

    Attributes
    ----------
    q : Tensor
        ``[1, Hq, 1, D]`` in bfloat16.
    k, v : Tensor
        ``[1, Hkv, T, D]`` in bfloat16.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return int(self.k.shape[2])

    @property
    def query_heads(self) -> int:
        """Query heads."""
        return int(self.q.shape[1])

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return int(self.k.shape[1])

    @property
    def grouped_q(self) -> torch.Tensor:
        """The query as ``[1, Hkv, Hq / Hkv, D]``: the heads that read one key-value head are its rows."""
        return self.q.reshape(1, self.kv_heads, -1, self.q.shape[3])

    @cached_property
    def single(self) -> Case:
        """The same case in float32."""
        return Case(*(x.float() for x in (self.q, self.k, self.v)))

    @cached_property
    def exact(self) -> torch.Tensor:
        """Attention over the bfloat16 keys and values, computed in float32, as ``[Hq * D]``."""
        case = self.single
        return functional.scaled_dot_product_attention(case.grouped_q, case.k, case.v).flatten()

    def error(self, answer: torch.Tensor) -> float:
        """Return the relative error of an attention output with the elements of `exact`, in its order."""
        return float((answer.float().flatten() - self.exact).norm() / self.exact.norm())


def make(tokens: int, query_heads: int = QUERY_HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Case:
    """Return a case of normally distributed numbers, the same ones at every call."""
    random = torch.Generator().manual_seed(tokens)
    q = torch.randn(1, query_heads, 1, dim, generator=random).bfloat16()
    k, v = (torch.randn(1, kv_heads, tokens, dim, generator=random).bfloat16() for _ in range(2))
    return Case(q, k, v)
