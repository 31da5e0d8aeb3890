"""Take the queries, keys and values of a text out of a model, and put them into kvrs caches.

A text is read once, with the exact cache; each plan then starts from the prompt as it was, without another
pass of the model. What later tokens really look at follows from the same queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvrs.calibration.hooks import Call, attention_calls
from kvrs.eval.forward import exact_cache, feed, no_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrs.hf import KVCache

CHUNK = 256


@dataclass
class LayerTokens:
    """What one layer's attention was called with: q ``[Hq, T, D]``, k ``[Hkv, T, D]``, v ``[Hkv, T, Dv]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    sink_logits: torch.Tensor | None

    def part(self, start: int, end: int) -> LayerTokens:
        """Return some of the tokens."""
        q, k, v = (x[:, start:end] for x in (self.q, self.k, self.v))
        return LayerTokens(q, k, v, self.scale, self.softcap, self.sink_logits)


@dataclass
class Captured:
    """What a text was to a model: the calls of each layer, and the token that follows it greedily."""

    layers: list[LayerTokens]
    next_id: int


def capture(model: Any, ids: Sequence[int], advance: Callable[[int], None] = no_progress) -> Captured:
    """Read a text and return what each layer's attention was called with.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    ids : sequence of int
        One row of tokens.
    advance : callable
        Told the number of tokens done after each call of the model.
    """
    parts: dict[int, list[LayerTokens]] = {}

    def keep(call: Call) -> None:
        """Keep the new tokens of a call; those before them stand in the cache."""
        k, v = (x[:, -call.q.shape[1] :] for x in (call.k, call.v))
        tokens = LayerTokens(call.q, k, v, call.scale, call.softcap, call.sink_logits)
        parts.setdefault(call.layer, []).append(tokens)

    with attention_calls(model, keep), exact_cache(model) as cache:
        *_, last = feed(model, cache, ids, chunk=CHUNK, advance=advance)
    layers = [_joined(parts[layer]) for layer in sorted(parts)]
    return Captured(layers, int(last[-1].argmax()))


def fill(cache: KVCache, layers: Sequence[LayerTokens]) -> None:
    """Give an empty kvrs cache a prompt, as if the model had read it."""
    with cache.prompt():
        seqs = cache.sequences(1)
        for index, layer in enumerate(layers):
            cache.store.append(
                index,
                layer.k[None],
                layer.v[None],
                seqs,
                q=layer.q[None],
                scale=layer.scale,
                softcap=layer.softcap,
                sink_logits=layer.sink_logits,
            )
            cache.layers[index].columns += layer.k.shape[1]


def attention(layer: LayerTokens, prompt: int) -> torch.Tensor:
    """Return what the tokens behind a prompt look at in it, ``[Hkv, T - prompt, prompt]``.

    The mean over the query heads of each group, of attention over everything before.
    """
    heads, tokens, dim = layer.k.shape
    group = layer.q.shape[0] // heads
    q = layer.q[:, prompt:].reshape(heads, group, tokens - prompt, dim)
    logits = torch.einsum("hgqd,hkd->hgqk", q, layer.k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    index = torch.arange(tokens)
    logits = logits.masked_fill(index[None] > index[prompt:, None], float("-inf"))
    if layer.sink_logits is not None:
        sinks = layer.sink_logits.reshape(heads, group, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=3)
    return logits.softmax(dim=3)[..., :prompt].mean(dim=1)


def _joined(parts: list[LayerTokens]) -> LayerTokens:
    q, k, v = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("q", "k", "v"))
    return LayerTokens(q, k, v, parts[0].scale, parts[0].softcap, parts[0].sink_logits)
