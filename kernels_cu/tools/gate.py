"""Hold the compiled kernels against the committed table: ``python -m kernels_cu.tools.gate [--update]``.

What the compiler and the disassembler say of each kernel is compared with ``kernels_cu/gate.json``. Numbers
may get better; a kernel that gets worse fails with what it had and has. The compiler is pinned, so a number
moves only when a source does, and ``--update`` writes the table again for the review.

A kernel named in the table's ``cold`` list may spill; all others may not, whatever the table says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels_cu.tools import occupancy, sass, toolkit

TABLE = toolkit.SOURCES / "gate.json"
GATED = ("sm_80", "sm_90", "sm_120")
REPORTED = ("sm_89", "sm_100")
SHARED_LIMIT = 48 << 10
"""Bytes of shared memory that a block may declare; more could only be asked for at the launch."""
GROWTH = 1.1
"""Instructions may grow by this factor."""
KEYS = (
    "registers", "spills", "local", "shared", "threads", "blocks", "instructions",
    *sass.WANTED, "narrow", "generic", "double", "float_atomic",
)  # fmt: skip

Row = dict[str, int]
Rows = dict[str, dict[str, Row]]
"""Rows by kernel and architecture."""


def measure(code: Path, nvidia: Path) -> Rows:
    """Return the row of each compiled kernel on each architecture.

    Parameters
    ----------
    code : Path
        Where the compiler's output lies: cubins, and a report beside each.
    nvidia : Path
        The folder of the unpacked readers.
    """
    reports = [json.loads(path.read_text()) for path in code.glob("*.sm_*.json")]
    reports.sort(key=lambda made: [*occupancy.MULTIPROCESSORS].index(made["target"]))
    cubins = [code / f"{made['file']}.{made['target']}.cubin" for made in reports]
    with ThreadPoolExecutor() as pool:
        listings = [*pool.map(lambda cubin: sass.disassemble(cubin, nvidia), cubins)]
    rows: Rows = {}
    for made, listing in zip(reports, listings, strict=True):
        for name, kernel in made["kernels"].items():
            rows.setdefault(name, {})[made["target"]] = row(made["target"], kernel, listing[name])
    return dict(sorted(rows.items()))


def row(arch: str, kernel: dict[str, int], instructions: list[str]) -> Row:
    """Return what the gate looks at, of one kernel on one architecture."""
    fit, _ = occupancy.blocks(arch, kernel["threads"], kernel["registers"], kernel["shared"])
    counts = sass.count(instructions)
    spills = kernel["spill_stores"] + kernel["spill_loads"]
    own = {**counts, "registers": kernel["registers"], "shared": kernel["shared"], "spills": spills}
    own |= {"threads": kernel["threads"], "blocks": fit}
    return {key: own[key] for key in KEYS}


def faults(have: Row, before: Row | None, hot: bool) -> Iterator[str]:
    """Yield what is wrong with a kernel: by itself, and beside its row of the table."""
    if hot and have["spills"]:
        yield f"spills {have['spills']} bytes; allowed: 0 in a hot kernel"
    if hot and have["local"]:
        yield f"has {have['local']} local-memory instructions; allowed: 0 in a hot kernel"
    if have["shared"] > SHARED_LIMIT:
        yield f"takes {have['shared']} bytes of shared memory; allowed: {SHARED_LIMIT}"
    if have["float_atomic"]:
        yield f"adds floats by {have['float_atomic']} atomics; allowed: 0, their order is not fixed"
    if not have["blocks"]:
        yield "does not fit on a multiprocessor"
    if before is None:
        yield "is not in the table; --update puts it there"
        return
    for key in ("spills", "local", "shared", "narrow", "generic", "double"):
        if have[key] > before[key]:
            yield f"{key}: {have[key]}, was {before[key]}"
    for key in ("blocks", *sass.WANTED):
        if have[key] < before[key]:
            yield f"{key}: {have[key]}, was {before[key]}"
    if have["instructions"] > GROWTH * before["instructions"]:
        yield f"instructions: {have['instructions']}, was {before['instructions']}"


def check(rows: Rows, table: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines that fail the gate, and those of the architectures that are only reported."""
    failed, noted = [], []
    known, cold = table.get("kernels", {}), table.get("cold", [])
    for name, by_arch in rows.items():
        for arch, have in by_arch.items():
            lines = failed if arch in GATED else noted
            before = known.get(name, {}).get(arch)
            lines += [f"{name} on {arch}: {fault}" for fault in faults(have, before, name not in cold)]
    gone = sorted(set(known) - set(rows))
    return failed + [f"{name}: in the table, not compiled; --update takes it out" for name in gone], noted


def show(rows: Rows) -> str:
    """Return the rows as a table of text."""
    width = max((len(name) for name in rows), default=6)
    heads = {key: max(len(key), 6) for key in KEYS}
    lines = [" " * (width + 9) + " ".join(f"{key:>{size}}" for key, size in heads.items())]
    for name, by_arch in rows.items():
        for arch, have in by_arch.items():
            numbers = " ".join(f"{have[key]:>{size}}" for key, size in heads.items())
            lines.append(f"{name:{width}} {arch:7} {numbers}")
    return "\n".join(lines)


def text(rows: Rows, cold: list[str]) -> str:
    """Return the table as it is committed: one line for each kernel and architecture."""
    kernels = []
    for name, by_arch in rows.items():
        lines = ",\n".join(f'   "{arch}": {json.dumps(have)}' for arch, have in by_arch.items())
        kernels.append(f'  "{name}": {{\n{lines}\n  }}')
    listed = ",\n".join(kernels)
    compiler = json.dumps(toolkit.COMPILER[0])
    return f'{{\n "compiler": {compiler},\n "cold": {json.dumps(cold)},\n "kernels": {{\n{listed}\n }}\n}}\n'


def main() -> None:
    """Print all rows; fail where a kernel got worse, or write the table again."""
    name = "python -m kernels_cu.tools.gate"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.split(":")[0])
    parser.add_argument("--update", action="store_true", help="write the table again")
    parser.add_argument("--code", type=Path, default=toolkit.BUILD / "kernels", help="compiled kernels")
    parser.add_argument("--table", type=Path, default=TABLE, help="the committed table")
    wheels = toolkit.WHEELS / "readers"
    parser.add_argument("--wheels", type=Path, default=wheels, help="where the readers are unpacked")
    options = parser.parse_args()
    rows = measure(options.code, toolkit.fetch(toolkit.READERS, options.wheels))
    if not rows:
        sys.exit(f"{options.code} holds no compiled kernels; `make cuda` makes them")
    table = json.loads(options.table.read_text()) if options.table.is_file() else {}
    print(show(rows))
    if options.update:
        options.table.write_text(text(rows, table.get("cold", [])))
        table = json.loads(options.table.read_text())
    failed, noted = check(rows, table)
    for line in noted:
        print(f"note: {line}")
    for line in failed:
        print(f"FAIL: {line}")
    if failed:
        sys.exit(f"{len(failed)} lines fail the gate")
    print(f"{len(rows)} kernels are as good as the table says, on {', '.join(GATED)}")


if __name__ == "__main__":
    main()
