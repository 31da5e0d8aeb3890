"""One decode step of kvrs beside torch's attention, in the same run.

Prints medians in milliseconds and the ratio to each of torch's forms. Shapes: 32 query heads, 8 key-value
heads, head dimension 128, one layer, one sequence; default window of 4 + 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import kvrs
import torch
import torch.nn.functional as F  # noqa: N812

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128


def median_ms(step: Callable[[], object], seconds: float) -> float:
    """Median time of a call in milliseconds, after two warm-up calls."""
    step(), step()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 9 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def torch_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Torch's ways to attend over an uncompressed cache."""
    group = QUERY_HEADS // KV_HEADS
    steps: dict[str, Callable[[], object]] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b, c = q.to(dtype), k.to(dtype), v.to(dtype)
        grouped = a.reshape(1, KV_HEADS, group, DIM)
        steps[f"sdpa enable_gqa {name}"] = lambda a=a, b=b, c=c: F.scaled_dot_product_attention(
            a, b, c, enable_gqa=True
        )
        steps[f"sdpa grouped q {name}"] = lambda g=grouped, b=b, c=c: F.scaled_dot_product_attention(g, b, c)
    return steps


def filled(k: torch.Tensor, v: torch.Tensor, bits: float) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store with the tokens in it."""
    shape = kvrs.ModelShape(layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    codec = kvrs.TurboQuant(bits=bits)
    store = kvrs.KVStore(kvrs.Plan(shape, keys=codec, values=codec))
    seqs = store.new()
    store.append(0, k, v, seqs)
    return store, seqs


def measure(tokens: int, bits: list[float], seconds: float) -> dict[str, float]:
    """Median milliseconds of every form at one length."""
    torch.manual_seed(0)
    q = torch.randn(1, QUERY_HEADS, 1, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, tokens, DIM).bfloat16()
    query, out = q.bfloat16(), torch.empty(1, QUERY_HEADS, 1, DIM, dtype=torch.bfloat16)
    times = {name: median_ms(step, seconds) for name, step in torch_steps(q, k, v).items()}
    for b in bits:
        store, seqs = filled(k, v, b)
        step = partial(store.attend, 0, query, seqs, out=out)
        times[f"kvrs {b:g} bits"] = median_ms(step, seconds)
    return times


def report(tokens: int, threads: int, times: dict[str, float]) -> None:
    """Print one length."""
    best = min(t for name, t in times.items() if name.startswith("sdpa"))
    gqa = times["sdpa enable_gqa bf16"]
    print(f"\n{tokens} tokens, {threads} thread(s)   [ms, times enable_gqa bf16, times torch's best]")
    for name, ms in times.items():
        print(f"  {name:24} {ms:9.3f} {gqa / ms:8.2f} {best / ms:8.2f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--bits", type=float, nargs="+", default=[4.0, 3.0, 2.0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        kvrs.set_num_threads(threads)
        for tokens in args.tokens:
            times = measure(tokens, args.bits, args.seconds)
            report(tokens, threads, times)
            results.append({"tokens": tokens, "threads": threads, "ms": times})
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
