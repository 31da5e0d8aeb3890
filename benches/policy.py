"""What policies cost: ``python -m benches.policy``.

One decode step under each policy, 1024 tokens kept, beside a step without a policy and beside attention
alone over the same store; one layer of 32 query and 8 key-value heads of 128 channels. Steps of all policies
take turns, and ratios are to the attention of the same policy's store, whose pages may be fuller or emptier
than another's.

Then SnapKV at the end of a long prompt on a real model's layers, as a share of the time that the prompt
takes. The caches are filled with random queries, keys and values; the prompt is a shorter one, and its time
is scaled with the number of tokens. The long one takes longer than that, since attention grows faster: the
share is an upper bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import kvrs
import torch
from kvrs.eval import models
from kvrs.eval.spec import plan_from_spec
from kvrs.hf import KVCache
from kvrs.hf.cache import per_layer
from kvrs.hf.compat import CACHE_ARGUMENT
from kvrs.policies import acts_after_prompt
from kvrs.policy import Policy
from rich.console import Console
from rich.table import Table

from benches import inputs, machine, timing
from benches.endtoend import random_layers

KEPT = 1024
CODECS: dict[str, Any] = {"raw16": kvrs.Raw16(), "4 bits": kvrs.TurboQuant(4)}
WIDTH = 110
PLAN = "keys=turboquant:4,values=turboquant:4,evict=snapkv:1024"


def policies(kept: int) -> dict[str, Policy | None]:
    """Return the policies by name, None first; a policy of the prompt's end alone stands for all of them."""
    h2o = kvrs.H2O(kept)
    acting = (kvrs.StreamingLLM(kept), h2o, kvrs.Scissorhands(kept), kvrs.TOVA(kept), kvrs.KNorm(kept))
    named: dict[str, Policy | None] = {"none": None, "snapkv": kvrs.SnapKV(kept)}
    return named | {policy.name: policy for policy in acting} | {"caote(h2o)": kvrs.CAOTE(h2o)}


def filled(case: inputs.Case, codec: Any, policy: Policy | None) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store after a prompt of the case's tokens, whose last query is repeated for all."""
    shape = kvrs.ModelShape(
        layers=1, query_heads=case.query_heads, kv_heads=case.kv_heads, head_dim=case.q.shape[3]
    )
    store = kvrs.KVStore(kvrs.Plan(shape, codec, codec, evict=policy))
    seqs = store.new()
    q = case.q.expand(-1, -1, case.tokens, -1)
    store.append(0, case.k, case.v, seqs, **({} if policy is None else {"q": q}))
    return store, seqs


def forms(codec: Any, name: str, policy: Policy | None, kept: int) -> list[timing.Form]:
    """Return attention alone and a policy's step; a store that does not evict is cut back after a step."""
    long = inputs.make(kept if policy is None else kept + kept // 4)
    store, seqs = filled(long, codec, policy)
    new = inputs.make(1)
    length, q = store.length(seqs[0]), new.q
    step = timing.Form("step", f"step {name}", partial(store.extend, 0, q, new.k, new.v, seqs))
    if policy is None or not acts_after_prompt(policy):
        step = dataclasses.replace(step, restore=partial(store.truncate, seqs[0], length))
    return [timing.Form("attend", f"attend {name}", partial(store.attend, 0, q, seqs)), step]


def steps(kept: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row for each codec and policy: microseconds, and ratios to attention and to a plain step."""
    rows = []
    for codec_name, codec in CODECS.items():
        named = policies(kept)
        made = [form for name, policy in named.items() for form in forms(codec, name, policy, kept)]
        times = timing.measure(made, seconds)
        plain = times["step none"].median
        for name in named:
            attend, step = times[f"attend {name}"], times[f"step {name}"]
            rows.append(
                {"codec": codec_name, "policy": name, "attend_ms": attend.median, "step_ms": step.median}
                | {"mean_step_ms": statistics.fmean(step.ms), "to_attend": step.median / attend.median}
                | {"mean_to_attend": statistics.fmean(step.ms) / statistics.fmean(attend.ms)}
                | {"to_plain": step.median / plain}
            )
    return rows


def selection_seconds(model: Any, tokens: int, runs: int) -> float:
    """Return the seconds that the end of a prompt takes in all layers: choice, moving and encoding."""
    cache = KVCache(model, plan_from_spec(PLAN, model))
    store, heads = cache.store, per_layer(cache.store.plan.shape, "query_heads")
    seconds = []
    for _ in range(runs):
        seqs = store.new()
        store.begin_prompt(seqs)
        for layer, (k, v) in enumerate(random_layers(model, tokens)):
            random = torch.Generator().manual_seed(layer)
            q = torch.randn(1, heads[layer], tokens, k.shape[3], generator=random, dtype=k.dtype)
            store.append(layer, k, v, seqs, q=q)
        start = time.perf_counter()
        store.end_prompt(seqs)
        seconds.append(time.perf_counter() - start)
        store.free(seqs[0])
    cache.close()
    return statistics.median(seconds)


def prompt_seconds(model: Any, tokens: int, runs: int) -> float:
    """Return the seconds of the model's forward pass over a prompt, with SnapKV in the cache."""
    ids = torch.arange(tokens)[None] % model.get_input_embeddings().num_embeddings
    seconds = []
    for _ in range(runs):
        cache = KVCache(model, plan_from_spec(PLAN, model))
        with torch.no_grad():
            start = time.perf_counter()
            model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            seconds.append(time.perf_counter() - start)
        cache.close()
    return statistics.median(seconds)


def prompt_end(model: Any, tokens: int, forward_tokens: int, runs: int) -> dict[str, Any]:
    """Return what SnapKV costs at the end of a prompt of `tokens` tokens."""
    selection = selection_seconds(model, tokens, runs)
    forward = prompt_seconds(model, forward_tokens, runs)
    scaled = forward * tokens / forward_tokens
    return {
        "plan": PLAN,
        "tokens": tokens,
        "selection_s": selection,
        "forward_tokens": forward_tokens,
        "forward_s": forward,
        "scaled_s": scaled,
        "share": selection / scaled,
    }


def step_table(record: dict[str, Any]) -> Table:
    """Return the table of decode steps."""
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    table = Table(title=f"one decode step, {record['kept']} tokens kept, {threads}: medians")
    for heading in ("codec", "policy"):
        table.add_column(heading)
    for heading in ("attend, us", "step, us", "mean step, us", "to attend", "means", "to a plain step"):
        table.add_column(heading, justify="right")
    for row in record["steps"]:
        figures = [f"{1e3 * row[field]:.0f}" for field in ("attend_ms", "step_ms", "mean_step_ms")]
        ratios = [f"{row[field]:.2f}" for field in ("to_attend", "mean_to_attend", "to_plain")]
        table.add_row(row["codec"], row["policy"], *figures, *ratios)
    return table


def show(record: dict[str, Any], console: Console) -> None:
    """Print the record."""
    console.print(machine.line(record["machine"]))
    console.print(step_table(record))
    end = record.get("prompt_end")
    if end:
        console.print(
            f"SnapKV at the end of {end['tokens']} tokens of {record['model']}: {end['selection_s']:.3f} s, "
            f"{end['share']:.1%} of the prompt's {end['scaled_s']:.1f} s ({end['forward_s']:.1f} s for "
            f"{end['forward_tokens']} tokens, scaled)"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benches.policy", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kept", type=int, default=KEPT, help="tokens that a step attends to (1024)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each step and attention (1)")
    parser.add_argument("--model", default="gemma", help="gemma, qwen, a model folder, or none")
    parser.add_argument("--tokens", type=int, default=16384, help="of the long prompt")
    parser.add_argument("--forward-tokens", type=int, default=4096, help="of the prompt that is run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the record")
    options = parser.parse_args()
    machine.set_threads(options.threads)
    record = {name: getattr(options, name) for name in ("kept", "threads", "model")}
    progress = Console(stderr=True)
    with progress.status("decode steps"):
        record |= {"machine": machine.describe(), "steps": steps(options.kept, options.seconds)}
    if options.model != "none":
        with progress.status(f"the end of a prompt on {options.model}"):
            model, _ = models.load(options.model, quiet=True)
            record["prompt_end"] = prompt_end(model, options.tokens, options.forward_tokens, options.runs)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    show(record, Console(width=None if sys.stdout.isatty() else WIDTH))


if __name__ == "__main__":
    main()
