"""What sharing costs: fork, beam reorder, snapshot and truncate of a long sequence.

Each is to stay far below one decode step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import kvrs
import numpy as np

CHUNK = 2048


def filled(tokens: int, layers: int, heads: int, dim: int) -> tuple[kvrs.KVStore, int]:
    """Return a store with one 4-bit sequence of random tokens."""
    shape = kvrs.ModelShape(layers=layers, query_heads=6 * heads, kv_heads=heads, head_dim=dim)
    store = kvrs.KVStore(kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4)))
    (seq,) = store.new()
    x = np.random.default_rng(1).standard_normal((1, heads, CHUNK, dim)).astype(np.float16)
    for start in range(0, tokens, CHUNK):
        part = x[:, :, : min(CHUNK, tokens - start)]
        for layer in range(layers):
            store.append(layer, part, part, seq)
    return store, seq


def median_ms(work: Callable[[], object], after: Callable[[], object], runs: int) -> float:
    """Return the median milliseconds of `work`; `after` undoes it outside of the clock."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        after()
    return statistics.median(times) * 1e3


def measure(tokens: int, layers: int, heads: int, dim: int, runs: int) -> dict[str, float]:
    """Return milliseconds of each operation."""
    store, seq = filled(tokens, layers, heads, dim)
    last: list[int] = []
    result = {"fork": median_ms(lambda: last.append(store.fork(seq)), lambda: store.free(last.pop()), runs)}
    beams = [seq, *(store.fork(seq) for _ in range(3))]
    rows = store.stats()
    result["reorder [1,0,3,2]"] = median_ms(lambda: store.reorder(beams, [1, 0, 3, 2]), lambda: None, runs)
    result["reorder [2,0,0,1]"] = median_ms(lambda: store.reorder(beams, [2, 0, 0, 1]), lambda: None, runs)
    now = store.stats()
    result["sealed bytes copied"] = float(
        now.bytes_codes + now.bytes_scales - rows.bytes_codes - rows.bytes_scales
    )
    result["snapshot"] = median_ms(lambda: store.snapshot(seq), lambda: None, runs)

    def again() -> None:
        store.free(last.pop())
        last.append(store.fork(seq))

    last.append(store.fork(seq))
    result["truncate by 5"] = median_ms(lambda: store.drop_last(last[0], 5), again, runs)
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benches.fork", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=2, help="key-value heads")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write the record")
    arguments = parser.parse_args()
    shape = (arguments.layers, arguments.heads, arguments.dim)
    results = {tokens: measure(tokens, *shape, arguments.runs) for tokens in arguments.tokens}
    for tokens, times in results.items():
        print(f"{tokens} tokens, {shape[0]} layers of {shape[1]} key-value heads, milliseconds, medians")
        for name, value in times.items():
            print(f"  {name:20} {value:10.3f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
