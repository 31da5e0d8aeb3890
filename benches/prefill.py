"""Prefill of a long prompt on a real model: kvrs beside transformers' own cache, time and peak memory.

Each run is a process of its own, so that the peak is its own too; runs alternate and the medians count.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def run(side: str, model_name: str, tokens: int) -> dict[str, float]:
    """Return seconds of the second prefill and the process's peak memory in MiB."""
    import torch
    from kvrs.eval import models
    from kvrs.eval.forward import exact_cache, kvrs_cache
    from kvrs.eval.passkey import trial
    from kvrs.eval.spec import plan_from_spec
    from kvrs.hf.compat import CACHE_ARGUMENT

    model, tokenizer = models.load(model_name, quiet=True)
    ids = torch.tensor([trial(model_name, tokenizer, tokens, 0.35).ids])
    plan = plan_from_spec("turboquant:4", model)
    seconds = 0.0
    for prompt in (ids[:, :64], ids):
        with (
            exact_cache(model) if side == "transformers" else kvrs_cache(model, plan) as cache,
            torch.no_grad(),
        ):
            start = time.perf_counter()
            model(prompt, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
            seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def spawn(side: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one side in a new process."""
    command = [sys.executable, "-m", "benches.prefill", "--side", side, "--model", arguments.model]
    done = subprocess.run(
        [*command, "--tokens", str(arguments.tokens)], stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benches.prefill", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="gemma")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--side", choices=("transformers", "kvrs"), help="one run of one side, as JSON")
    parser.add_argument("--json", type=Path, help="write the record")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(run(arguments.side, arguments.model, arguments.tokens)))
        return
    sides = ("transformers", "kvrs")
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for side in sides * arguments.runs:
        results[side].append(spawn(side, arguments))
    median = {
        side: {field: statistics.median(run[field] for run in runs) for field in ("seconds", "peak_mib")}
        for side, runs in results.items()
    }
    print(f"\nprefill of {arguments.tokens} tokens, {arguments.model}, medians of {arguments.runs}")
    for side in sides:
        print(f"  {side:14} {median[side]['seconds']:8.2f} s   peak {median[side]['peak_mib']:8.0f} MiB")
    print(f"  ratio          {median['kvrs']['seconds'] / median['transformers']['seconds']:8.2f}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
