"""One decode step of kvrs beside its peers, in the same run: ``python -m benches.decode``.

One layer, one sequence, 32 query and 8 key-value heads of 128 channels, bfloat16; the default window of
4 + 128 tokens. All forms of a length are measured in turn, several rounds of that, and the medians count.
The answer of every form is compared with exact attention before it is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benches import extras, floor, inputs, machine, peers, plot, table, timing
from benches.peers import store, torch_forms
from benches.record import Record, axis

TOKENS = (512, 1024, 4096, 16384, 65536)
EXTRAS_TOKENS = 16384
WIDTH = 110
"""Columns of the tables where no terminal says how wide it is."""
GROUP_ONE_WIDTH = "kvrs 4 bits"


def run(
    tokens: list[int], threads: list[int], seconds: float, extras_tokens: int, progress: Console
) -> Record:
    """Return the record of a whole run.

    Parameters
    ----------
    tokens, threads : list of int
        Lengths, and thread counts.
    seconds : float
        For each form at each length and thread count.
    extras_tokens : int
        Length at which chunks, batches and encoding are measured; 0: they are not.
    progress : Console
        Where the current length shows.
    """
    record: Record = {"machine": machine.describe(), "bandwidth": {}, "rows": [], "group_one": []}
    record |= {"missing": {}, "extras": [], "extras_tokens": extras_tokens}
    record["families"] = {name: family for family, forms in peers.FAMILIES.items() for name in forms}
    buffer = floor.huge_buffer()
    for length in tokens:
        for count in threads:
            machine.set_threads(count)
            rate = floor.read_bandwidth(buffer, count)
            record["bandwidth"][str(count)] = max(rate, record["bandwidth"].get(str(count), 0.0))
        _length(record, length, threads, seconds, progress)
    for count in threads if extras_tokens else []:
        machine.set_threads(count)
        with progress.status(f"chunks, batches, encoding; {count} threads"):
            rows = extras.measure_all(extras_tokens, seconds)
        record["extras"] += [{"threads": count, **row} for row in rows]
    return record


def _length(record: Record, length: int, threads: list[int], seconds: float, progress: Console) -> None:
    """Measure all forms at one length."""
    few = torch_forms.FORMS | {GROUP_ONE_WIDTH: store.FORMS[GROUP_ONE_WIDTH]}
    for key, heads, builders, share in (
        ("rows", inputs.QUERY_HEADS, peers.all_forms(), 1.0),
        ("group_one", inputs.KV_HEADS, few, 0.5),
    ):
        with progress.status(f"{length} tokens, {heads} query heads"):
            forms, missing = peers.build(inputs.make(length, heads), builders)
            for count in threads:
                machine.set_threads(count)
                record[key] += _rows(forms, length, count, share * seconds)
        record["missing"] |= missing


def _rows(forms: list[timing.Form], length: int, threads: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row of the record for each form."""
    times = timing.measure(forms, seconds)
    return [
        {"tokens": length, "threads": threads, "family": form.family, "form": form.name}
        | times[form.name].summary()
        | form.facts
        for form in forms
    ]


def show(record: Record, console: Console) -> None:
    """Print the record as tables."""
    console.print(machine.line(record["machine"]))
    for threads in axis(record, "threads"):
        console.print(table.main_table(record, threads))
    if record["extras"]:
        console.print(table.extras_table(record))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benches.decode", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="lengths")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2), help="thread counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each form and length (1)")
    parser.add_argument(
        "--extras", type=int, default=EXTRAS_TOKENS, help="length of the second table, 0: none"
    )
    parser.add_argument("--json", type=Path, help="write the record")
    parser.add_argument("--plot", type=Path, help="write a plot of milliseconds against tokens")
    parser.add_argument("--from", type=Path, dest="source", help="measure nothing, read this record")
    options = parser.parse_args()
    if options.source:
        record = json.loads(options.source.read_text())
    else:
        progress = Console(stderr=True)
        record = run([*options.tokens], [*options.threads], options.seconds, options.extras, progress)
    for path in filter(None, (options.json, options.plot)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot:
        plot.figure(record).savefig(options.plot, dpi=150)
    show(record, Console(width=None if sys.stdout.isatty() else WIDTH))


if __name__ == "__main__":
    main()
