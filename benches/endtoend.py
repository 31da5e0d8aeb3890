"""Tokens per second of a real model's decode step over a long cache: ``python -m benches.endtoend``.

The caches are filled with random keys and values of the right shape instead of a prompt, which takes seconds
and not the better part of an hour; the numbers that attention reads do not change how long it takes. All
caches take one step in turn, several rounds of that, and the medians count.

The time of a step is split by clocks around what the cache decides, in every layer: ``cache.update`` and the
attention function that transformers calls with its result. kvrs does all its work in the second, the other
caches concatenate or decode in the first. All else is the model's weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kvrs.eval import models
from kvrs.eval.spec import plan_from_spec
from kvrs.hf import KVCache
from kvrs.hf.cache import per_layer
from kvrs.hf.compat import CACHE_ARGUMENT
from kvrs.hf.shapes import shape_from_config
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benches import machine
from benches.peers.builder import MissingPeerError
from benches.peers.transformers_caches import make_quantized

PLAN = "turboquant:4"
BACKENDS = ("fp8", "quanto", "hqq")
WIDTH = 110


class Clock:
    """Seconds spent in the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


@contextmanager
def attention_clock(cache: Any) -> Iterator[Clock]:
    """Time a cache's `update` and the attention functions, for as long as the block runs."""
    clock = Clock()
    functions = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "kvrs")}
    for name, function in functions.items():
        ALL_ATTENTION_FUNCTIONS[name] = clock.around(function)
    cache.update = clock.around(cache.update)
    try:
        yield clock
    finally:
        del cache.update
        for name, function in functions.items():
            ALL_ATTENTION_FUNCTIONS[name] = function


def random_layers(model: Any, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield keys and values ``[1, Hkv, T, D]`` of every layer, the same ones at every call."""
    shape = shape_from_config(model.config)
    fields = [per_layer(shape, name) for name in ("kv_heads", "head_dim", "value_dim")]
    random = torch.Generator().manual_seed(tokens)
    for heads, *widths in zip(*fields, strict=True):
        k, v = (torch.randn(1, heads, tokens, dim, generator=random, dtype=model.dtype) for dim in widths)
        yield k, v


def kvrs_cache(model: Any, tokens: int) -> KVCache:
    """Return a kvrs cache of 4 bits that holds random tokens."""
    cache = KVCache(model, plan_from_spec(PLAN, model))
    seqs = cache.sequences(1)
    for index, (k, v) in enumerate(random_layers(model, tokens)):
        cache.store.append(index, k, v, seqs)
        cache.layers[index].columns = tokens
        cache.layers[index].is_initialized = True
    return cache


def transformers_cache(cache: Any, model: Any, tokens: int) -> Any:
    """Return one of transformers' caches after it took up random tokens."""
    for index, (k, v) in enumerate(random_layers(model, tokens)):
        cache.update(k, v, index)
    return cache


def make_caches(model: Any, tokens: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the filled caches by name, and why the others cannot be had."""
    dynamic = transformers_cache(DynamicCache(config=model.config), model, tokens)
    caches = {"DynamicCache": dynamic, "kvrs 4 bits": kvrs_cache(model, tokens)}
    missing = {}
    for backend in BACKENDS:
        name = f"QuantizedCache {backend}"
        try:
            caches[name] = transformers_cache(make_quantized(model.config, backend), model, tokens)
        except MissingPeerError as reason:
            missing[name] = str(reason)
    return caches, missing


def step(model: Any, cache: Any) -> tuple[float, float]:
    """Return the seconds of one decode step, and those of them in attention."""
    token = torch.tensor([[1]])
    with attention_clock(cache) as clock, torch.no_grad():
        start = time.perf_counter()
        model(token, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        return time.perf_counter() - start, clock.seconds


def measure(model: Any, tokens: int, steps: int) -> dict[str, Any]:
    """Return medians of all caches at one length, in milliseconds."""
    caches, missing = make_caches(model, tokens)
    for cache in caches.values():
        step(model, cache)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
    for _ in range(steps):
        for name, cache in caches.items():
            times[name].append(step(model, cache))
    caches["kvrs 4 bits"].close()
    return {"tokens": tokens, "missing": missing, "caches": {name: _medians(t) for name, t in times.items()}}


def _medians(times: list[tuple[float, float]]) -> dict[str, float]:
    whole, attention = (statistics.median(part) for part in zip(*times, strict=True))
    weights = statistics.median(step - inside for step, inside in times)
    return {"ms": whole * 1e3, "attention_ms": attention * 1e3, "weights_ms": weights * 1e3}


def result_table(record: dict[str, Any]) -> Table:
    """Return the table of a whole run."""
    threads = f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"
    table = Table(title=f"{record['model']}: one decode step, {threads}, {record['dtype']}")
    for heading in ("tokens", "cache", "tokens/s", "step, ms", "weights, ms", "attention, ms", "vs Dynamic"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for length in record["lengths"]:
        exact = length["caches"]["DynamicCache"]["attention_ms"]
        for name, row in length["caches"].items():
            figures = [f"{row[field]:.1f}" for field in ("ms", "weights_ms", "attention_ms")]
            gain = f"{exact / row['attention_ms']:.2f}x"
            table.add_row(str(length["tokens"]), name, f"{1e3 / row['ms']:.2f}", *figures, gain)
        table.add_section()
    table.caption, table.caption_justify = "\n".join(absences(record["lengths"])), "left"
    return table


def absences(lengths: list[dict[str, Any]]) -> list[str]:
    """Return why caches were not measured, one line for each reason."""
    missing = {name: reason for length in lengths for name, reason in length["missing"].items()}
    names = {reason: [n for n, why in missing.items() if why == reason] for reason in missing.values()}
    return [f"{', '.join(group)}: {reason}" for reason, group in names.items()]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benches.endtoend", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="gemma", help="gemma, qwen or a model folder (gemma)")
    parser.add_argument("--tokens", type=int, nargs="+", default=(4096, 16384), help="lengths of the cache")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=8, help="steps of each cache at each length (8)")
    parser.add_argument("--dtype", default="float32", help="of the weights and the exact cache (float32)")
    parser.add_argument("--json", type=Path, help="write the record")
    options = parser.parse_args()
    machine.set_threads(options.threads)
    progress = Console(stderr=True)
    with progress.status(f"load {options.model}"):
        model, _ = models.load(options.model, options.dtype, quiet=True)
    record = {name: getattr(options, name) for name in ("model", "threads", "dtype", "steps")}
    record |= {"machine": machine.describe(), "plan": PLAN, "lengths": []}
    for tokens in options.tokens:
        with progress.status(f"{tokens} tokens"):
            record["lengths"].append(measure(model, tokens, options.steps))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(machine.line(record["machine"]))
    console.print(result_table(record))


if __name__ == "__main__":
    main()
