"""What kvrs does on a real GPU: right first, then fast. ``python -m benches.gpu_check --json FILE``.

Conformance tests of the kernels on the device; a decode step of one layer (32 query and 8 key-value heads of
128 channels) beside torch's flash attention in bfloat16 and FlashInfer where it is installed; append; copy
bandwidth; `generate` on Gemma where its files are at hand. Every answer is compared with exact attention, and
what does not run says why.

Exit status: 0 if all that must hold does, 1 if something does not, 2 if there is no GPU that kvrs can use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import kvrs
import torch
from kvrs import cuda
from kvrs.eval.results import versions
from rich.console import Console
from rich.table import Table

from benches import gpu_steps, roofline
from benches.gpu_steps import error, exact, filled, fits, flashinfer_step, median_ms, replayed, tensors
from benches.roofline import GATE

TOKENS = (4096, 32768, 131072)
BATCHES = (1, 8, 64)
BITS = (4, 3, 2)
GOAL = 3.0
"""Times faster than torch's flash attention, at batch 64 and 4 bits."""
SECONDS = 420.0
"""After that long, cases that have not begun are left out; the whole script takes less than eight minutes."""
CONFORMANCE = ("emulator_intrinsics", "device")
"""The Rust test programs for the device that KVRS_TEST_DEVICE names: operations, then whole kernels."""

Row = dict[str, Any]


def conformance(root: Path) -> Row:
    """Run the newest builds of the conformance tests on the device, up to the first that fails."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    for name in CONFORMANCE:
        row = run_newest(target, name)
        if not row["passed"]:
            break
    return row


def run_newest(target: Path, name: str) -> Row:
    """Run the newest build of a test program on the device; say so if there is none."""
    found = [path for path in target.glob(f"*/deps/{name}-*") if not path.suffix]
    if not found:
        return {"ran": False, "passed": False, "why": f"{target} holds no test program {name}"}
    program = max(found, key=lambda path: path.stat().st_mtime)
    environment = {**os.environ, "KVRS_TEST_DEVICE": "0"}
    done = subprocess.run([str(program), "--nocapture"], env=environment, capture_output=True, text=True)
    ran = "not run:" not in done.stdout
    why = "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
    return {"ran": ran, "passed": ran and done.returncode == 0, "why": why}


def decode_case(tokens: int, batch: int, bandwidth: float) -> Row:
    """Return milliseconds of all forms of one case, and their errors."""
    q, k, v = tensors(tokens, batch)
    truth = exact(q, k, v).float()
    row: Row = {"tokens": tokens, "batch": batch, "torch_ms": median_ms(replayed(lambda: exact(q, k, v))[0])}
    try:
        step = flashinfer_step(q, k, v)
        row |= {"flashinfer_ms": median_ms(replayed(step)[0]), "flashinfer_error": error(step(), truth)}
    except ImportError:
        row["flashinfer"] = "not installed"
    for bits in BITS:
        store, seqs = filled(bits, k, v)
        out = torch.empty_like(q)
        step, graph = replayed(partial(store.attend, 0, q, seqs, out=out))
        ms = median_ms(step)
        floor = roofline.read(kvrs.TurboQuant(bits), tokens).microseconds(bandwidth, batch) / 1e3
        row[f"kvrs{bits}"] = {"ms": ms, "share": floor / ms, "error": error(out, truth), "graph": graph}
        del store, step
    return row


def verdicts(record: Row) -> list[tuple[bool, bool, str]]:
    """Return what must hold and what is hoped for: whether it holds, whether it must, and a sentence."""
    found = []
    tests = record["conformance"]
    text = "conformance tests on the device" + ("" if tests["passed"] else f": {tests['why']}")
    found.append((tests["passed"], True, text))
    for row in record["decode"]:
        where = f"{row['tokens']} tokens x {row['batch']}"
        for bits in BITS:
            mine = row[f"kvrs{bits}"]
            limit = 3 * 2.0**-bits
            text = f"{where}, {bits} bits: error {mine['error']:.3f}, at most {limit:.3f}"
            found.append((mine["error"] <= limit, True, text))
        mine = row["kvrs4"]
        if row["tokens"] == 32768 and row["batch"] > 1:
            text = f"{where}, 4 bits: {mine['share']:.0%} of copy bandwidth, at least {GATE:.0%}"
            found.append((mine["share"] >= GATE, True, text))
        if row["batch"] == 64:
            times = row["torch_ms"] / mine["ms"]
            text = f"{where}, 4 bits: {times:.2f} times torch's flash attention, the goal is {GOAL:.0f}"
            found.append((times >= GOAL, False, text))
    return found


def table(record: Row) -> Table:
    """Return the decode steps as a table."""
    made = Table(title=f"one decode step: ms; copy bandwidth {record['copy_bandwidth'] / 1e12:.2f} TB/s")
    for name in ("tokens", "batch", "torch flash", "FlashInfer"):
        made.add_column(name, justify="right")
    for bits in BITS:
        made.add_column(f"kvrs {bits} bits (of bandwidth)", justify="right")
    for row in record["decode"]:
        peer = f"{row['flashinfer_ms']:.3f}" if "flashinfer_ms" in row else row["flashinfer"]
        mine = [f"{row[f'kvrs{bits}']['ms']:.3f} ({row[f'kvrs{bits}']['share']:.0%})" for bits in BITS]
        made.add_row(str(row["tokens"]), str(row["batch"]), f"{row['torch_ms']:.3f}", peer, *mine)
    return made


def run(console: Console, root: Path) -> Row:
    """Return the record of a whole run."""
    begin = time.monotonic()
    record: Row = {"versions": versions(), "device": cuda.status().to_dict(), "decode": [], "left_out": []}
    console.print(str(cuda.status()))
    record["conformance"] = conformance(root)
    console.print(f"conformance: {record['conformance']}")
    record["copy_bandwidth"] = gpu_steps.copy_bandwidth()
    for batch, tokens in ((batch, tokens) for batch in BATCHES for tokens in TOKENS):
        name = f"{tokens} tokens x {batch}"
        if time.monotonic() - begin > SECONDS:
            record["left_out"].append(f"{name}: no time left")
        elif not fits(tokens, batch, torch.cuda.mem_get_info()[0]):
            record["left_out"].append(f"{name}: does not fit into memory")
        else:
            console.print(f"decode: {name}")
            record["decode"].append(decode_case(tokens, batch, record["copy_bandwidth"]))
            torch.cuda.empty_cache()
    record["append"] = gpu_steps.append_rates()
    late = time.monotonic() - begin > SECONDS
    record["generate"] = {"ran": False, "why": "no time left"} if late else gpu_steps.generation()
    return record | {"seconds": time.monotonic() - begin}


def show(record: Row, console: Console) -> bool:
    """Print the record; return whether everything holds that must."""
    console.print(table(record))
    rates = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in record["append"].items())
    console.print(f"append of one layer, 4 bits: {rates}")
    console.print(f"generate on Gemma, tokens/s: {record['generate']}")
    for line in record["left_out"]:
        console.print(f"left out: {line}")
    found = verdicts(record)
    for holds, must, text in found:
        console.print(f"{'ok  ' if holds else 'FAIL' if must else 'goal not reached'} {text}")
    return all(holds for holds, must, _ in found if must)


def main() -> None:
    """Run everything, or say what is missing."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu_check", description=__doc__.split(":")[0])
    parser.add_argument("--json", type=Path, help="write the record")
    parser.add_argument("--from", type=Path, dest="source", help="measure nothing, read this record")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    if options.source:
        sys.exit(not show(json.loads(options.source.read_text()), console))
    missing = cuda.status().missing or (None if torch.cuda.is_available() else "torch finds no GPU")
    if missing:
        console.print(f"{cuda.status()}\nnothing was checked: {missing}", markup=False)
        sys.exit(2)
    record = run(console, Path(__file__).resolve().parents[1])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not show(record, console))


if __name__ == "__main__":
    main()
