"""Stand in a model's attention: see each layer's queries, keys and values, and change what it computes."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from kvrs.hf.compat import text_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPLEMENTATION = "kvrs-calibration"


@dataclass
class Call:
    """One layer's attention over a text, as the model asks for it.

    Attributes
    ----------
    layer : int
        Index of the layer.
    q, k, v : Tensor
        ``[Hq, T, d]``, ``[Hkv, T, d]``, ``[Hkv, T, dv]``, float32 in CPU memory; queries and keys rotated.
    mask : Tensor or None
        Added to the scores, ``[T, T]``: zero or a very negative number.
    scale, softcap, sink_logits
        As in `KVStore.attend`.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None

    def attention(
        self, coded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each query head gets, ``[Hq, T, dv]``, and its attention ``[Hq, T, T]``.

        Parameters
        ----------
        coded : tuple, optional
            Keys and values as a store gives them back, shaped as `k` and `v`, and which of them each query
            sees so, bool ``[T, T]``.
        """
        heads, tokens, _ = self.k.shape
        q = self.q.reshape(heads, -1, tokens, self.q.shape[-1])
        keys, values = (self.k, self.v) if coded is None else coded[:2]
        logits = q @ self.k[:, None].transpose(-1, -2)
        if coded is not None and keys is not self.k:
            logits = torch.where(coded[2], q @ keys[:, None].transpose(-1, -2), logits)
        weights = self._softmax(logits * self.scale)
        if coded is None or values is self.v:
            out = weights @ self.v[:, None]
        else:
            packed = weights.masked_fill(~coded[2], 0.0)
            out = packed @ values[:, None] + (weights - packed) @ self.v[:, None]
        return out.flatten(0, 1), weights.flatten(0, 1)

    def _softmax(self, logits: torch.Tensor) -> torch.Tensor:
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.mask is not None:
            logits = logits + self.mask
        if self.sink_logits is None:
            return logits.softmax(-1)
        sinks = self.sink_logits.reshape(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


_RUNNING: list[Callable[[Call], torch.Tensor | None]] = []


@contextmanager
def attention_calls(model: Any, handler: Callable[[Call], torch.Tensor | None]) -> Iterator[None]:
    """Show each layer's attention to a function while the block runs.

    Parameters
    ----------
    model : PreTrainedModel
        On any device. Called with one row of tokens; with a cache, `k` and `v` of a call begin with its
        content.
    handler : callable
        Given a `Call`; what it returns, ``[Hq, T, dv]``, takes the place of the model's own result; None: the
        model's own.
    """
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation_internal = IMPLEMENTATION
    _RUNNING.append(handler)
    try:
        yield
    finally:
        _RUNNING.pop()
        config._attn_implementation_internal = before


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    scale, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    call = Call(
        module.layer_idx,
        query[0].float().cpu(),
        key[0].float().cpu(),
        value[0].float().cpu(),
        None if attention_mask is None else attention_mask[0, 0].float().cpu(),
        query.shape[3] ** -0.5 if scale is None else float(scale),
        kwargs.get("softcap"),
        None if sinks is None else sinks.detach().float().cpu(),
    )
    changed = _RUNNING[-1](call)
    if changed is not None:
        return changed.transpose(0, 1)[None].to(query), None
    # The attention that the model's own file writes out: it knows soft caps and sinks.
    plain = sys.modules[type(module).__module__].eager_attention_forward
    return plain(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
