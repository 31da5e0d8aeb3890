"""Compare policies at one budget: perplexity after a prompt, passkey, hit rate, chosen sets and bytes.

The prompt of a text is read once with the exact cache. Each policy gets its queries, keys and values, chooses
what stays, and the model goes on from there. So all policies see the same prompt, and "none" keeps all of it.
"""

from __future__ import annotations

import math
import time
from functools import cache as cached
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrs.eval import capture, passkey, perplexity, selection, spec
from kvrs.eval.forward import greedy, kvrs_cache, no_progress
from kvrs.eval.results import Record, digest, store_bytes, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import kvrs
    from kvrs.eval.capture import LayerTokens

NONE = "none"
BASELINES = ("random", "streamingllm")
METHODS = (
    *("knorm", "tova", "scissorhands", "h2o", "snapkv", "caote(h2o)", "caote(snapkv)"),
    *("pyramidkv", "adakv(snapkv)", "entropy(snapkv)"),
)
THRESHOLD = 0.01
CHUNK = 64
"""Tokens in one call behind the prompt: fewer than the newest ones that no policy drops."""


def specifications(names: Sequence[str], budget: str) -> dict[str, str | None]:
    """Return the specification of each policy at a budget, by its name; the full cache has none.

    Raises
    ------
    kvrs.PlanError
        If a name or the budget cannot be read.
    """
    found: dict[str, str | None] = {NONE: None}
    for name in names:
        if name != NONE:
            has_fields = ":" in name.rpartition(")")[2]
            found[name] = f"{name}:budget={budget}" if has_fields else f"{name}:{budget}"
            spec.parse_policy(found[name] or "")
    return found


def continued(
    model: Any,
    plan: kvrs.Plan,
    layers: Sequence[LayerTokens],
    ids: Sequence[int],
    prompt: int,
    threshold: float,
) -> dict[str, Any]:
    """Return perplexity behind a prompt, bytes at its end, and how well its tokens were chosen.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    plan : kvrs.Plan
        With or without a policy.
    layers : sequence of LayerTokens
        What `capture` took from the whole text.
    ids : sequence of int
        The text.
    prompt : int
        How many of its tokens are the prompt.
    threshold : float
        Attention above it is important.
    """
    begin = time.perf_counter()
    with kvrs_cache(model, plan) as cache:
        capture.fill(cache, [layer.part(0, prompt) for layer in layers])
        filled = time.perf_counter()
        size = store_bytes(cache.store) | {"rows": _row_bytes(cache.store)}
        judged = []
        for index, layer in enumerate(layers):
            if plan.shape.spec()[index]["sliding"] is None:
                kept = selection.kept_of_prompt(cache.store, cache.seqs[0], index, prompt)
                seen = capture.attention(layer, prompt).numpy()
                judged.append(selection.judged(seen, kept, threshold))
        loss = perplexity.negative_log_likelihood(model, cache, ids[prompt:], chunk=CHUNK)
    return {
        "perplexity": math.exp(loss),
        "loss": loss,
        "bytes": size,
        "select_seconds": round(filled - begin, 3),
        "layers": judged,
    }


def asked(
    model: Any, tokenizer: Any, plan: kvrs.Plan, captured: capture.Captured, case: passkey.Trial
) -> dict[str, Any]:
    """Return whether a number hidden in a prompt is found, and the answer."""
    with kvrs_cache(model, plan) as cache:
        capture.fill(cache, captured.layers)
        stop = passkey.stop_rule(model, tokenizer)
        ids = greedy(model, cache, captured.next_id, tokens=passkey.ANSWER_TOKENS, stop=stop)
    text = tokenizer.decode(ids)
    return {"depth": case.depth, "answer": text, "found": passkey.is_found(case.number, text)}


def evaluate(
    model: Any,
    tokenizer: Any,
    model_name: str,
    line: str,
    policies: dict[str, str | None],
    documents: dict[str, list[int]],
    record: Record,
    *,
    prompt: int,
    threshold: float = THRESHOLD,
    length: int = 2048,
    depths: int = 0,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return one row a policy.

    Parameters
    ----------
    model, tokenizer
        In evaluation mode.
    model_name : str
        Stands in the result and tells results of different models apart.
    line : str
        The rest of the plan, as `spec.plan_from_spec` takes it, without a policy.
    policies : dict of str to str or None
        As `specifications` returns them.
    documents : dict of str to list of int
        Token ids by the text's name.
    record : Record
        Where finished parts are kept and looked up.
    prompt : int
        Tokens of each text that are its prompt.
    threshold : float
        Attention above it is important, for the hit rate.
    length, depths : int
        Tokens of a passkey prompt, and how many there are.
    advance : callable
        Told 1 for each policy and text that is done.

    Returns
    -------
    dict
        ``rows`` with ``policy``, ``perplexity`` and ``ratio`` by text, ``hit_rate``, ``recall``, ``overlap``,
        ``mass``, ``bytes``, ``bytes_ratio`` (rows and codes of layers with full attention, to those of the
        full cache) and ``passkey``; and what they depend on.
    """
    plans = {name: _plan(model, line, text) for name, text in policies.items()}
    common = {"model": model_name, "dtype": str(model.dtype)}
    texts: dict[str, dict[str, Any]] = {name: {} for name in plans}
    for title, ids in documents.items():
        take = cached(partial(capture.capture, model, ids))
        for name, plan in plans.items():
            key = {"task": "policies", **common, "ids": digest(ids), "prompt": prompt, "threshold": threshold}

            def compute(plan: kvrs.Plan = plan, ids: list[int] = ids, take: Any = take) -> dict[str, Any]:
                return continued(model, plan, take().layers, ids, prompt, threshold)

            texts[name][title] = record.part({**key, "plan": plan.hash}, compute)
            advance(1)
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for depth in passkey.depths(depths) if depths else []:
        case = passkey.trial(model_name, tokenizer, length, depth)
        take = cached(partial(capture.capture, model, case.ids))
        for name, plan in plans.items():
            key = {"task": "policies passkey", **common, "length": length, "depth": depth}

            def answer(plan: kvrs.Plan = plan, case: Any = case, take: Any = take) -> dict[str, Any]:
                return asked(model, tokenizer, plan, take(), case)

            trials[name].append(record.part({**key, "plan": plan.hash}, answer))
            advance(1)
    full = texts[NONE]
    return {
        "task": "policies",
        **common,
        "rows": [_row(name, policies[name], texts[name], full, trials[name]) for name in plans],
        "texts": {title: len(ids) for title, ids in documents.items()},
        "prompt": prompt,
        "threshold": threshold,
        "passkey": {"length": length, "depths": depths},
        "plan": {"hash": plans[NONE].hash},
        "versions": versions(),
    }


def _row_bytes(store: kvrs.KVStore) -> int:
    """Return the bytes of codes, scales and 16-bit rows in the layers that a policy may act on."""
    shapes = store.plan.shape.spec()
    full = [x for x, layer in zip(store.stats().per_layer, shapes, strict=True) if layer["sliding"] is None]
    return sum(x.bytes_codes + x.bytes_scales + x.bytes_window for x in full)


def _plan(model: Any, line: str, policy: str | None) -> kvrs.Plan:
    return spec.plan_from_spec(line if policy is None else f"{line},evict={policy}", model)


def _row(
    name: str,
    text: str | None,
    results: dict[str, Any],
    full: dict[str, Any],
    trials: list[dict[str, Any]],
) -> dict[str, Any]:
    layers = [layer for result in results.values() for layer in result["layers"]]
    ratios = {title: results[title]["perplexity"] / full[title]["perplexity"] for title in results}
    important = sum(layer["important"] for layer in layers)
    return {
        "policy": name,
        "spec": text,
        "perplexity": {title: result["perplexity"] for title, result in results.items()},
        "ratio": ratios,
        "mean_ratio": math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
        "hit_rate": sum(layer["hits"] for layer in layers) / important if important else None,
        **{field: _mean([layer[field] for layer in layers]) for field in ("recall", "overlap", "mass")},
        "bytes": {x: _mean([result["bytes"][x] for result in results.values()]) for x in ("total", "rows")},
        "bytes_ratio": _mean([results[x]["bytes"]["rows"] / full[x]["bytes"]["rows"] for x in results]),
        "select_seconds": _mean([result["select_seconds"] for result in results.values()]),
        "passkey": {"found": sum(trial["found"] for trial in trials), "of": len(trials), "trials": trials},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
