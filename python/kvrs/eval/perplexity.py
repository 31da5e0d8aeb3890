"""Teacher-forced perplexity of a model with kvrs's cache, beside the exact one on the same tokens.

The text goes through the model in chunks of 16 tokens, so that nearly every token is predicted from keys
and values that are stored, as in decoding. The exact model reads the same ids with its own cache; its
result does not depend on the chunks, so they are longer.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvrs.eval.forward import exact_cache, feed, kvrs_cache, no_progress
from kvrs.eval.results import Record, digest, exact_bytes, store_bytes, versions
from kvrs.policies import acts_after_prompt, base

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import kvrs

DECODE_CHUNK = 16
EXACT_CHUNK = 256


def negative_log_likelihood(
    model: Any, cache: Any, ids: Sequence[int], *, chunk: int, advance: Callable[[int], None] = no_progress
) -> float:
    """Return the mean of ``-log p(id | all ids before)`` over all but the first id, in nats.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    cache : Cache
        Empty; it takes up the keys and values.
    ids : sequence of int
        At least 2 tokens.
    chunk : int
        Tokens in one call of the model.
    advance : callable
        Told the number of tokens done after each chunk.
    """
    total, start = 0.0, 1
    target = torch.tensor(list(ids))
    for logits in feed(model, cache, ids, chunk=chunk, keep=0, advance=advance):
        next_ids = target[start : start + len(logits)].to(logits.device)
        losses = torch.nn.functional.cross_entropy(logits[: len(next_ids)], next_ids, reduction="sum")
        total += float(losses.double()) if len(next_ids) else 0.0
        start += len(logits)
    return total / (len(ids) - 1)


def measure(
    model: Any,
    ids: Sequence[int],
    plan: kvrs.Plan | None,
    *,
    chunk: int | None = None,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return perplexity, seconds and bytes of one text, exact if `plan` is None.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    ids : sequence of int
        The text.
    plan : kvrs.Plan or None
        How kvrs keeps the cache; None for transformers' own.
    chunk : int, optional
        Tokens in one call of the model; 16 with kvrs and 256 without.
    advance : callable
        Told the number of tokens done after each chunk.
    """
    begin = time.perf_counter()
    chunk = chunk or (EXACT_CHUNK if plan is None else DECODE_CHUNK)
    with exact_cache(model) if plan is None else kvrs_cache(model, plan) as cache:
        loss = negative_log_likelihood(model, cache, ids, chunk=chunk, advance=advance)
        seconds = time.perf_counter() - begin
        size = {"total": exact_bytes(model.config, len(ids))} if plan is None else store_bytes(cache.store)
    return {"perplexity": math.exp(loss), "seconds": round(seconds, 3), "bytes": size}


def evaluate(
    model: Any,
    model_name: str,
    plan: kvrs.Plan,
    documents: dict[str, list[int]],
    record: Record,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return the perplexity of both caches on each text, and their ratio.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    model_name : str
        Stands in the result and tells results of different models apart.
    plan : kvrs.Plan
        How kvrs keeps the cache.
    documents : dict of str to list of int
        Token ids by the text's name.
    record : Record
        Where finished texts are kept and looked up.
    advance : callable
        Told the number of tokens done.

    Returns
    -------
    dict
        ``exact`` and ``kvrs`` with ``perplexity``, ``bytes`` and ``seconds`` by text; ``ratio``; ``plan``,
        ``model``, ``tokens`` and ``versions``.
    """
    _check_policies(plan)
    sides: dict[str, dict[str, Any]] = {"exact": {}, "kvrs": {}}
    for name, ids in documents.items():
        for side, side_plan in (("exact", None), ("kvrs", plan)):
            key = {
                "task": "perplexity",
                "model": model_name,
                "dtype": str(model.dtype),
                "ids": digest(ids),
                "plan": None if side_plan is None else side_plan.hash,
            }
            compute = partial(measure, model, ids, side_plan, advance=advance)
            sides[side][name] = record.part(key, compute)
    return {
        "task": "perplexity",
        "exact": _by_field(sides["exact"]),
        "kvrs": _by_field(sides["kvrs"]),
        "ratio": {
            name: sides["kvrs"][name]["perplexity"] / sides["exact"][name]["perplexity"] for name in documents
        },
        "model": model_name,
        "dtype": str(model.dtype),
        "tokens": {name: len(ids) for name, ids in documents.items()},
        "plan": {"hash": plan.hash},
        "versions": versions(),
    }


def _check_policies(plan: kvrs.Plan) -> None:
    """Refuse policies that need to know the end of a prompt: the text goes through without one."""
    for layer, policy in enumerate(plan.evict):
        if policy is None:
            continue
        budget = getattr(base(policy), "budget", None)
        if not acts_after_prompt(policy) or isinstance(budget, float):
            raise ValueError(
                f"evict[{layer}] is {policy!r}, which chooses at the end of a prompt, and here is none; "
                "allowed: policies that also act later, as StreamingLLM and H2O, with a budget in tokens or "
                "bytes; `kvrs.eval policies` compares all"
            )


def _by_field(side: dict[str, dict[str, Any]]) -> dict[str, Any]:
    fields = ("perplexity", "bytes", "seconds")
    return {field: {name: result[field] for name, result in side.items()} for field in fields}
