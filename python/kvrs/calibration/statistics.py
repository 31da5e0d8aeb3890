"""Means and second moments of queries, keys and values, summed text by text in float64.

Nothing of a text is stored but these sums. Keys lose their rotated mean, which is known only at the end: the
sums also hold the products of keys with the cosines and sines of their positions, out of which the moment of
what is left follows exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrs.calibration.hooks import Call, attention_calls
from kvrs.calibration.layers import Layer
from kvrs.calibration.rope import Phasors, phasors
from kvrs.errors import PlanError

Array = np.ndarray[Any, np.dtype[np.float64]]
SKIPPED = 4
"""First positions of each text that are left out: attention sinks are like no other token."""
TOKENS_PER_CHANNEL = 4
SAMPLED = 1024
"""Most tokens of which a head keeps a sample, for codebooks."""


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer's queries, keys and values are like.

    Attributes
    ----------
    tokens : int
        How many were seen.
    key_mean, value_mean : ndarray
        ``[heads, d]``; keys without their rotation.
    keys, queries : ndarray
        Second moments with rotation, ``[heads, d, d]``: of keys without their rotated mean, and of queries,
        summed over the query heads of each key-value head.
    values : list of ndarray
        Covariance of each head group.
    turned_keys : list of ndarray
        Covariance of keys without their rotation, of each head group; empty if nothing needs it.
    turned_queries : ndarray
        As `queries`, without rotation.
    key_sample, value_sample : ndarray
        Some centred keys (without rotation) and values, ``[heads, tokens, d]``; without tokens if nothing
        needs them.
    """

    tokens: int
    key_mean: Array
    value_mean: Array
    keys: Array
    queries: Array
    values: list[Array]
    turned_keys: list[Array]
    turned_queries: Array
    key_sample: Array
    value_sample: Array


class Moments:
    """Running sums of one layer.

    Parameters
    ----------
    layer : Layer
        The layer's attention.
    pre_rope : bool
        Whether keys are coded without rotation.
    sampled : bool
        Whether some tokens are kept, for codebooks.
    """

    def __init__(self, layer: Layer, *, pre_rope: bool, sampled: bool) -> None:
        self.layer = layer
        self.pre_rope, self.sampled = pre_rope, sampled
        self.tokens = 0
        self.sums: dict[str, torch.Tensor] = {}
        self._phasors = phasors(layer.rope, layer.key_dim, 0)

    def add(self, call: Call) -> None:
        """Add the tokens of one text."""
        total = call.k.shape[1]
        if len(self._phasors.cos) < total:
            self._phasors = phasors(self.layer.rope, self.layer.key_dim, total)
        q, k, v = (x.double() for x in (call.q, call.k, call.v))
        turned = self._phasors.turn(k, back=True)
        features = self._phasors.features(total)[SKIPPED:]
        kept = [x[:, SKIPPED:] for x in (q, k, v, turned)]
        self.tokens += total - SKIPPED
        self._sum("key_sum", kept[3].sum(1))
        self._sum("value_sum", kept[2].sum(1))
        for head, keys in enumerate(kept[1]):
            both = torch.cat([keys, features], dim=1)
            self._sum(f"keys.{head}", _gram(both))
            self._sum(f"values.{head}", _gram(kept[2][head]))
        self._sum("queries", self._by_head(kept[0]))
        if self.pre_rope:
            self._sum("turned_queries", self._by_head(self._phasors.turn(q, back=True)[:, SKIPPED:]))
            for head, keys in enumerate(kept[3]):
                self._sum(f"turned_keys.{head}", _gram(keys))
        if self.sampled:
            self._sample("key_sample", kept[3])
            self._sample("value_sample", kept[2])

    def _sum(self, name: str, more: torch.Tensor) -> None:
        self.sums[name] = self.sums[name] + more if name in self.sums else more

    def _by_head(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the second moment of the queries that read each key-value head."""
        heads = self.layer.kv_heads
        rows = queries.reshape(heads, -1, queries.shape[-1])
        return rows.transpose(1, 2) @ rows

    def _sample(self, name: str, rows: torch.Tensor) -> None:
        """Keep whole stretches of tokens of each text, as tiles of 16 are what outliers are chosen from."""
        stretch = 64
        starts = range(0, rows.shape[1] - stretch + 1, max(stretch, rows.shape[1] // 4))
        more = torch.cat([rows[:, start : start + stretch] for start in starts], dim=1).float()
        kept = torch.cat([self.sums[name], more], dim=1) if name in self.sums else more
        self.sums[name] = kept[:, :SAMPLED]

    def finish(self) -> LayerStatistics:
        """Return the statistics.

        Raises
        ------
        kvrs.PlanError
            If there were too few tokens, or a sum is not finite.
        """
        self._check()
        n, layer = self.tokens, self.layer
        key_mean, value_mean = self.sums["key_sum"] / n, self.sums["value_sum"] / n
        keys = [
            residual_moment(self.sums[f"keys.{head}"] / n, key_mean[head], self._phasors)
            for head in range(layer.kv_heads)
        ]
        values = self._covariances("values", value_mean)
        turned = self._covariances("keys", key_mean) if self.pre_rope else []
        none = torch.zeros(layer.kv_heads, 0, layer.key_dim)
        queries = self.sums["queries"] / n
        return LayerStatistics(
            tokens=n,
            key_mean=key_mean.numpy(),
            value_mean=value_mean.numpy(),
            keys=torch.stack(keys).numpy(),
            queries=queries.numpy(),
            values=values,
            turned_keys=turned,
            turned_queries=(self.sums["turned_queries"] / n if self.pre_rope else queries).numpy(),
            key_sample=(self.sums["key_sample"] - key_mean[:, None] if self.sampled else none).numpy(),
            value_sample=(self.sums["value_sample"] - value_mean[:, None] if self.sampled else none).numpy(),
        )

    def _covariances(self, side: str, mean: torch.Tensor) -> list[Array]:
        name = "values" if side == "values" else "turned_keys"
        found = []
        for head, centre in enumerate(mean):
            found.append((self.sums[f"{name}.{head}"] / self.tokens - torch.outer(centre, centre)).numpy())
        return found

    def _check(self) -> None:
        need = TOKENS_PER_CHANNEL * max(self.layer.key_dim, self.layer.value_dim)
        if self.tokens < need:
            raise PlanError(
                f"batches have {self.tokens} tokens behind the first {SKIPPED} of each text; allowed for "
                f"heads of {need // TOKENS_PER_CHANNEL} channels: {need} or more"
            )
        for name, total in self.sums.items():
            if not torch.isfinite(total).all():
                raise PlanError(
                    f"calibration: {name} of layer {self.layer.index} is not finite; allowed: a model and "
                    "texts that give finite queries, keys and values"
                )


def residual_moment(gram: torch.Tensor, mean: torch.Tensor, turn: Phasors) -> torch.Tensor:
    """Return the second moment of keys without their rotated mean.

    Parameters
    ----------
    gram : Tensor
        Second moment of keys and features together, ``[d + features, d + features]``.
    mean : Tensor
        Mean of the keys without rotation, ``[d]``.
    turn : Phasors
        The layer's rotation.
    """
    d = len(mean)
    constant = turn.constant(mean)
    cross = gram[:d, d:] @ constant.T
    moment = gram[:d, :d] - cross - cross.T + constant @ gram[d:, d:] @ constant.T
    return (moment + moment.T) / 2


def observe(model: Any, ids: torch.Tensor, moments: dict[int, Moments]) -> None:
    """Add one text to the sums of each layer.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    ids : Tensor
        One row of token ids.
    moments : dict of int to Moments
        By layer; others are left out.
    """

    def look(call: Call) -> None:
        if call.layer in moments:
            moments[call.layer].add(call)

    with attention_calls(model, look), torch.no_grad():
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        decoder(ids[None].to(model.device), use_cache=False)


def rows_of(batches: Any) -> list[torch.Tensor]:
    """Return the texts of batches as rows of token ids.

    Parameters
    ----------
    batches : iterable of Tensor
        ``[T]`` or ``[B, T]``, without padding.

    Raises
    ------
    kvrs.PlanError
        If there are none, or one is no tensor of token ids with more than `SKIPPED` tokens.
    """
    rows: list[torch.Tensor] = []
    if not isinstance(batches, Iterable) or isinstance(batches, str):
        raise PlanError(f"batches is {batches!r:.80}; allowed: tensors of token ids [T] or [B, T]")
    for index, batch in enumerate(batches):
        try:
            ids = torch.as_tensor(batch)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(f"batches[{index}] is {batch!r:.80}; allowed: token ids [T] or [B, T]") from error
        if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex():
            raise PlanError(
                f"batches[{index}] has shape {tuple(ids.shape)} and dtype "
                f"{str(ids.dtype).removeprefix('torch.')}; "
                "allowed: token ids [T] or [B, T]"
            )
        if ids.shape[-1] <= SKIPPED:
            raise PlanError(f"batches[{index}] has {ids.shape[-1]} tokens; allowed: {SKIPPED + 1} or more")
        rows += list(ids.long().reshape(-1, ids.shape[-1]))
    if not rows:
        raise PlanError("batches has no texts; allowed: one tensor of token ids [T] or [B, T], or more")
    return rows


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """Return the second moment of vectors ``[tokens, d]``, summed."""
    return rows.T @ rows
