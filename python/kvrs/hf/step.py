"""One call of the model: what its layers share while they go through the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvrs import KVError, SequenceError, ShapeError

if TYPE_CHECKING:
    from kvrs.hf.cache import KVCache


class Step:
    """Lead each layer of one model call from `update` to the attention on the store.

    Parameters
    ----------
    cache : KVCache
        The cache that was passed to the model.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._pending: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def announce(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the new keys and values that a layer's attention is about to be called with."""
        self.finish()
        self._pending = (layer, key, value)

    def finish(self) -> None:
        """Raise if a layer updated the cache and never called the attention function."""
        if self._pending is not None:
            raise KVError(
                f"layer {self._pending[0]} updates its cache but does not call transformers' attention "
                "interface; allowed: models whose every layer does"
            )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scale: float | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
        sliding: int | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run one layer's new tokens through `kvrs.KVStore.extend`.

        Returns
        -------
        Tensor
            ``[B, Hq, T, Dv]``
        """
        layer = self._take(query, key, value)
        self._check_window(layer, sliding)
        mask = self._new_columns(layer, attention_mask, query)
        if sink_logits is not None:
            sink_logits = _without_grad("s_aux", sink_logits.reshape(-1).float()).cpu()
        output = self.cache.store.extend(
            layer,
            _without_grad("query", query),
            _without_grad("key", key),
            _without_grad("value", value),
            self.cache.sequences(query.shape[0]),
            mask=mask,
            positions=self._start(layer, positions, mask, query),
            scale=scale,
            softcap=softcap,
            sink_logits=sink_logits,
        )
        self.cache.layers[layer].grow(query.shape[2], mask)
        return output

    def _take(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the layer that announced these keys, and refuse any that did not come through the cache."""
        pending, self._pending = self._pending, None
        if pending is None or pending[1] is not key or pending[2] is not value:
            raise KVError(
                "attention was called with keys that did not come from the cache (cross-attention, KV shared "
                "between layers, or keys changed after update); allowed: causal self-attention"
            )
        if query.shape[2] != key.shape[2]:
            raise ShapeError(f"query has {query.shape[2]} tokens; allowed: {key.shape[2]}, as many as key")
        return pending[0]

    def _check_window(self, layer: int, sliding: int | None) -> None:
        planned = self.cache.layers[layer].sliding_window
        if sliding is not None and sliding != planned:
            raise KVError(f"sliding_window of layer {layer} is {sliding}; allowed: {planned}, as in the plan")

    def _new_columns(self, layer: int, mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask ``[B, T]`` of the new tokens, in host memory; None if all are real."""
        if mask is None:
            return None
        if id(mask) not in self._masks:
            new = self._checked(layer, mask, query)
            self._masks[id(mask)] = (mask, None if bool(new.all()) else new)
        return self._masks[id(mask)][1]

    def _checked(self, layer: int, mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        rows, tokens = query.shape[0], query.shape[2]
        past = self.cache.layers[layer].columns
        if mask.ndim != 2:
            raise KVError(
                f"attention_mask has shape {tuple(mask.shape)} (a tree or a custom mask); "
                f"allowed: {(rows, past + tokens)}, a padding mask"
            )
        if tuple(mask.shape) != (rows, past + tokens):
            raise ShapeError(
                f"attention_mask has shape {tuple(mask.shape)}; allowed: {(rows, past + tokens)}"
            )
        mask = mask.bool().cpu()
        if past:
            self._check_past(layer, mask[:, :past])
        return mask[:, past:].contiguous()

    def _check_past(self, layer: int, past: torch.Tensor) -> None:
        """Refuse a mask that hides tokens which an earlier call stored: they are in the store for good."""
        seen = past.sum(dim=1).tolist()
        stored = [self.cache.store.length(sequence, layer) for sequence in self.cache.seqs]
        for row, (columns, tokens) in enumerate(zip(seen, stored, strict=True)):
            if columns != tokens:
                raise SequenceError(
                    f"attention_mask shows {columns} earlier tokens in row {row}; allowed: {tokens}, those "
                    "that are stored (tokens cannot be masked later, for instance padding after the end)"
                )

    def _start(
        self,
        layer: int,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        query: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the positions of a sequence's first tokens, in host memory, unless they count from 0."""
        if self.cache.layers[layer].columns or positions is None or positions.ndim != 2:
            return None
        rows, tokens = query.shape[0], query.shape[2]
        positions = positions[:, -tokens:].expand(rows, tokens).cpu()
        first = positions[:, 0] if mask is None else positions.gather(1, mask.int().argmax(1, keepdim=True))
        real = first if mask is None else first[mask.any(1)]
        return positions.long().contiguous() if bool((real != 0).any()) else None


def _without_grad(name: str, tensor: Any) -> torch.Tensor:
    """Return the tensor without its graph; refuse it where gradients are asked for."""
    if not tensor.requires_grad:
        return tensor
    if torch.is_grad_enabled():
        raise KVError(
            f"{name} requires grad; allowed: calls under torch.no_grad() (the store has no gradients)"
        )
    return tensor.detach()
