"""Attention in float64: what every backend's output is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]


def visible(
    query_index: ArrayLike, key_index: ArrayLike, causal: bool = True, sliding: int | None = None
) -> NDArray[np.bool_]:
    """Return which keys each query sees ``[queries, keys]``, by index.

    Causal: ``j <= i``. Sliding: ``i - j < sliding`` (keys ahead of a query are left to `causal`).
    """
    gap = np.asarray(query_index)[:, None] - np.asarray(key_index)[None, :]
    seen = np.ones(gap.shape, dtype=bool)
    if causal:
        seen &= gap >= 0
    if sliding is not None:
        seen &= gap < sliding
    return seen


def query_indices(rows: int, length: int, mask: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the index of each query row: the r-th of n True rows stands at ``length - n + r``.

    A False row gets -1: causally it sees nothing.
    """
    on = np.ones(rows, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    count = int(on.sum())
    return np.where(on, length - count + np.cumsum(on) - 1, -1)


def head_attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    seen: NDArray[np.bool_],
    scale: float,
    softcap: float | None = None,
    sink_logit: float | None = None,
) -> tuple[F64, F64]:
    """Return output ``[queries, value_dim]`` and log-sum-exp ``[queries]`` of one query head.

    Parameters
    ----------
    q, k, v
        ``[queries, dim]``, ``[keys, dim]``, ``[keys, value_dim]``. Rows of k and v that no query sees
        may hold anything.
    seen
        ``[queries, keys]``.
    scale
        Factor on the scores.
    softcap
        Scores become ``cap * tanh(score / cap)``, after the scale and before the mask.
    sink_logit
        A learned logit without a value: it joins the denominator and the log-sum-exp.

    A query that sees nothing gets zeros and -inf, whatever the sink.
    """
    used = seen.any(axis=0)
    seen = seen[:, used]
    scores: F64 = np.einsum("qd,kd->qk", q.astype(np.float64), k[used].astype(np.float64)) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    live: NDArray[np.bool_] = np.asarray(seen.any(axis=1))
    top: F64 = np.where(live, scores.max(axis=1, initial=-np.inf), 0.0)
    if sink_logit is not None:
        top = np.maximum(top, np.float64(sink_logit))
    weights = np.exp(scores - top[:, None])
    total: F64 = np.asarray(weights.sum(axis=1))
    if sink_logit is not None:
        total = total + np.exp(sink_logit - top)
    total = np.where(live, total, 1.0)
    out = np.einsum("qk,kd->qd", weights, v[used].astype(np.float64)) / total[:, None]
    return np.where(live[:, None], out, 0.0), np.where(live, np.log(total) + top, -np.inf)


def attention(
    q: NDArray[Any],
    k: Sequence[NDArray[Any]] | NDArray[Any],
    v: Sequence[NDArray[Any]] | NDArray[Any],
    *,
    length: int | None = None,
    key_index: list[NDArray[np.int64]] | NDArray[np.int64] | None = None,
    mask: NDArray[np.bool_] | None = None,
    causal: bool = True,
    sliding: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: ArrayLike | None = None,
) -> tuple[F64, F64]:
    """Return output ``[Hq, Tq, Dv]`` and log-sum-exp ``[Hq, Tq]`` of grouped-query attention, one row.

    Parameters
    ----------
    q
        ``[Hq, Tq, D]``; query head h reads KV head ``h // (Hq / Hkv)``.
    k, v
        ``[Hkv, T, D]`` and ``[Hkv, T, Dv]``, or one array a head where heads keep different tokens.
    length
        Logical length of the sequence; default the number of keys.
    key_index
        Index of each key, ``[T]``, or a list of one array a head; default ``0 .. T-1``.
    mask
        ``[Tq]`` bool; a False row gives zeros.
    causal, sliding, scale, softcap, sink_logits
        As in `visible` and `head_attention`; scale defaults to ``D**-0.5``, sink_logits is ``[Hq]``.
    """
    heads, rows, dim = q.shape
    group = heads // len(k)
    if length is None:
        length = len(k[0])
    at = query_indices(rows, length, mask)
    outs, sums = [], []
    for h in range(heads):
        g = h // group
        if key_index is None:
            index = np.arange(len(k[g]))
        else:
            index = np.asarray(key_index[g] if isinstance(key_index, list) else key_index)
        seen = visible(at, index, causal, sliding) & (at >= 0)[:, None]
        sink = None if sink_logits is None else float(np.asarray(sink_logits)[h])
        out, lse = head_attention(
            q[h], k[g], v[g], seen, dim**-0.5 if scale is None else scale, softcap, sink
        )
        outs.append(out)
        sums.append(lse)
    return np.stack(outs), np.stack(sums)


def merge(outs: list[F64], sums: list[F64]) -> tuple[F64, F64]:
    """Return the merge of partial outputs ``[.., Dv]`` over disjoint keys by their log-sum-exps ``[..]``."""
    lse = np.stack(sums)
    top = lse.max(axis=0)
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(lse - safe)
    total = weights.sum(axis=0)
    share = weights / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        return (share[..., None] * np.stack(outs)).sum(axis=0), np.log(total) + safe
