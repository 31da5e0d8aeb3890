"""What each codec costs: ``python -m benches.codecs``.

Attention of one new query a head over a long packed sequence, and appending a prompt, for every codec on
one layer of 32 query and 8 key-value heads of 128 channels. Codecs that need data get matrices and
codebooks of the right shape, out of random numbers: they cost what calibrated ones cost. Transform coding
has widths from 6 to 2 bits, 4 on average. Codecs take turns; ratios are to TurboQuant at 4 bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benches import inputs, machine, timing

BASE = "turboquant 4"
WIDTHS = (6, 6, 5, 4, 4, 3, 2, 2)
"""Bits of the blocks of 16 of 128 channels: 4 on average."""


def transform(side: str, heads: int, dim: int) -> dict[str, np.ndarray]:
    """Return what a transform coder needs of one side of layer 0: random rotations and some widths."""
    rng, arrays = np.random.default_rng(0), {}
    widths = np.repeat(WIDTHS, dim // 16 // len(WIDTHS)) if dim >= 128 else np.array(WIDTHS[: dim // 16])
    for head in range(heads):
        rotation = np.float32(np.linalg.qr(rng.standard_normal((dim, dim)))[0])
        name = f"{side}.0.{head}"
        arrays |= {f"{name}.analysis": rotation, f"{name}.synthesis": rotation}
        arrays[f"{name}.widths"] = np.float32(widths)
    return arrays


def nonuniform(side: str, heads: int, dim: int, bits: int) -> dict[str, np.ndarray]:
    """Return what KVQuant needs of one side of layer 0."""
    sample = np.sort(np.random.default_rng(0).standard_normal(4096))
    levels = np.float32([part.mean() for part in np.array_split(sample, 2**bits)])
    arrays = {f"{side}.0.{head}.codebook": levels for head in range(heads)}
    if side == "keys":
        arrays |= {f"{side}.0.{head}.scale": np.ones(dim, np.float32) for head in range(heads)}
    return arrays


def plan(case: inputs.Case, keys: Any, values: Any, needs: Callable[..., Any] | None = None) -> kvrs.Plan:
    """Return a plan of one layer of the case's shape; `needs` makes the arrays of a side."""
    dim = case.q.shape[3]
    shape = kvrs.ModelShape(
        layers=1,
        query_heads=case.query_heads,
        kv_heads=case.kv_heads,
        head_dim=dim,
        rope=kvrs.Rope(theta=1e4),
    )
    calibration = None
    if needs is not None:
        arrays = needs("keys", case.kv_heads, dim) | needs("values", case.kv_heads, dim)
        calibration = kvrs.Calibration(arrays)
    return kvrs.Plan(shape, keys, values, calibration=calibration)


def plans(case: inputs.Case) -> dict[str, kvrs.Plan]:
    """Return the plans by name."""
    both = {
        "raw16": kvrs.Raw16(),
        BASE: kvrs.TurboQuant(4),
        "turboquant prod 4": kvrs.TurboQuant(4, variant="prod"),
        "rabitq 4": kvrs.RaBitQ(4),
        "kivi 4": kvrs.KIVI(4),
        "kivi 2": kvrs.KIVI(2),
        "int8": kvrs.Int8(),
        "fp8": kvrs.FP8(),
    }
    found = {name: plan(case, codec, codec) for name, codec in both.items()}
    found["qjl, kivi 2"] = plan(case, kvrs.QJL(), kvrs.KIVI(2))
    for name, codec in (
        ("aatc 4", kvrs.AATC(bits=4)),
        ("aatc 4 pre_rope", kvrs.AATC(bits=4, variant="pre_rope")),
    ):
        found[name] = plan(case, codec, codec, transform)
    quant = kvrs.KVQuant(bits=4)
    found["kvquant 4"] = plan(case, quant, quant, partial(nonuniform, bits=4))
    return found


def forms(case: inputs.Case, which: kvrs.Plan, name: str) -> tuple[timing.Form, dict[str, Any]]:
    """Return one attention over a filled store, and what is known of the store."""
    store = kvrs.KVStore(which)
    seqs = store.new()
    start = time.perf_counter()
    store.append(0, case.k, case.v, seqs)
    seconds = time.perf_counter() - start
    stats, out = store.stats(), torch.empty_like(case.q)
    facts = {
        "append_us": seconds / case.tokens * 1e6,
        "path": stats.path,
        "bits_per_element": stats.bits_per_element,
    }
    return timing.Form("kvrs", name, partial(store.attend, 0, case.q, seqs, out=out)), facts


def measure(case: inputs.Case, seconds: float) -> list[dict[str, Any]]:
    """Return one row a codec."""
    made = {name: forms(case, which, name) for name, which in plans(case).items()}
    times = timing.measure([form for form, _ in made.values()], seconds, limit=30)
    base, append = times[BASE].median, made[BASE][1]["append_us"]
    return [
        {"codec": name, "attend_ms": times[name].median, "to_base": times[name].median / base}
        | facts
        | {"append_to_base": facts["append_us"] / append}
        for name, (_, facts) in made.items()
    ]


def table(result: dict[str, Any]) -> Table:
    """Return one line a codec."""
    shown = Table(title=f"attention over {result['tokens']} tokens, {result['threads']} threads")
    for heading in ("codec", "path", "bits", "attend ms", f"/ {BASE}", "append us/token", f"/ {BASE}"):
        shown.add_column(heading, justify="left" if heading in ("codec", "path") else "right")
    for row in result["rows"]:
        shown.add_row(
            row["codec"],
            row["path"],
            f"{row['bits_per_element']:.2f}",
            f"{row['attend_ms']:.2f}",
            f"{row['to_base']:.2f}",
            f"{row['append_us']:.1f}",
            f"{row['append_to_base']:.2f}",
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benches.codecs", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the sequence (16384)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each codec (0.5)")
    parser.add_argument("--json", type=Path, help="file of the result")
    options = parser.parse_args(arguments)
    kvrs.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    case = inputs.make(options.tokens)
    result = {
        "bench": "codecs",
        "machine": machine.describe(),
        "tokens": options.tokens,
        "threads": options.threads,
        "rows": measure(case, options.seconds),
    }
    Console().print(table(result))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
