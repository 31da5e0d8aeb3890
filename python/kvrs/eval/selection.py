"""How good a choice of tokens was, judged by what later tokens looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import kvrs

Array = np.ndarray[Any, Any]


def kept_of_prompt(store: kvrs.KVStore, seq: int, layer: int, prompt: int) -> list[Array]:
    """Return the kept indices of a prompt's tokens, one array a key-value head."""
    shape = store.plan.shape.spec()[layer]
    heads = (store.kept_positions(seq, layer, head) for head in range(shape["kv_heads"]))
    return [positions[positions < prompt] for positions in heads]


def hits(attention: Array, kept: Sequence[Array], threshold: float) -> tuple[int, int]:
    """Return how many places had attention above a threshold, and how many of them were kept.

    The hit rate (SnapKV, Li et al., 2024, arXiv:2404.14469, section 3) is the second over the first, taken of
    sums over all layers.

    Parameters
    ----------
    attention : array ``[heads, steps, prompt]``
        What later steps looked at.
    kept : sequence of int arrays
        Indices of the kept tokens of each head.
    threshold : float
        Attention above it is important.
    """
    important = attention > threshold
    chosen = np.zeros((len(kept), attention.shape[2]), bool)
    for head, indices in enumerate(kept):
        chosen[head, indices] = True
    return int(important.sum()), int((important & chosen[:, None]).sum())


def best(attention: Array, count: int) -> Array:
    """Return the tokens ``[count]`` with the largest attention ``[steps, prompt]`` of all later steps."""
    return np.sort(np.argsort(-attention.sum(axis=0), kind="stable")[:count])


def overlap(one: Array, other: Array) -> float:
    """Return the size of the intersection of two sets over that of their union; 1 for two empty sets."""
    union = len(np.union1d(one, other))
    return len(np.intersect1d(one, other)) / union if union else 1.0


def recall(kept: Array, wanted: Array) -> float:
    """Return the share of a set `wanted` that is in `kept`; 1 if nothing is wanted."""
    return float(np.isin(wanted, kept).mean()) if len(wanted) else 1.0


def judged(attention: Array, kept: Sequence[Array], threshold: float) -> dict[str, Any]:
    """Return hits, and the means over heads of recall and overlap with the best set of the same size.

    Parameters
    ----------
    attention, kept, threshold
        As in `hits`.
    """
    wanted = [best(seen, len(indices)) for seen, indices in zip(attention, kept, strict=True)]
    pairs = list(zip(kept, wanted, strict=True))
    important, hit = hits(attention, kept, threshold)
    mass = [float(seen[:, indices].sum() / seen.sum()) for seen, indices in zip(attention, kept, strict=True)]
    return {
        "important": important,
        "hits": hit,
        "recall": float(np.mean([recall(*pair) for pair in pairs])),
        "overlap": float(np.mean([overlap(*pair) for pair in pairs])),
        "mass": float(np.mean(mass)),
    }
