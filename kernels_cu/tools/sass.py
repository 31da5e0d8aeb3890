"""Instructions of compiled kernels, read by NVIDIA's disassembler and counted."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

WANTED = {
    "load128": re.compile(r"LDG\.(?=.*128)"),
    "async128": re.compile(r"LDGSTS\.(?=.*128)"),
    "dot4": re.compile(r"IDP\."),
    "mma_int8": re.compile(r"IMMA\."),
    "mma_half": re.compile(r"HMMA\."),
    "permute": re.compile(r"PRMT\b"),
}
"""What makes kernels fast: wide loads, dot products of bytes, matrix products, lookups in registers."""

UNWANTED = {
    "local": re.compile(r"(LDL|STL)\b"),
    "narrow": re.compile(r"LDG\.(?!.*(64|128))"),
    "generic": re.compile(r"(LD|ST)\."),
    "float_atomic": re.compile(r"(ATOM|RED)[GS]?\..*F(16|32|64)"),
    "double": re.compile(r"D(ADD|MUL|FMA)\b"),
}
"""What makes kernels slow or their results differ: local memory, loads of 4 bytes and less, pointers into any
memory, sums in no fixed order, doubles."""

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def disassemble(cubin: Path, nvidia: Path) -> dict[str, list[str]]:
    """Return the instructions of each kernel of a cubin, without operands, in order.

    Raises
    ------
    subprocess.CalledProcessError
        If it is no cubin.
    """
    folder = nvidia / "cu13" / "bin"
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(folder / "cuobjdump"), "-sass", str(cubin)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return instructions(done.stdout)


def instructions(listing: str) -> dict[str, list[str]]:
    """Return the instructions in a listing of ``cuobjdump -sass``, by kernel."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in listing.splitlines():
        if match := _FUNCTION.match(line):
            current = found.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            current.append(match[1])
    return found


def count(names: list[str]) -> dict[str, int]:
    """Return how many instructions there are, and how many of each kind of `WANTED` and `UNWANTED`."""
    totals = Counter(
        kind for kind, pattern in (WANTED | UNWANTED).items() for name in names if pattern.match(name)
    )
    return {"instructions": len(names)} | {kind: totals[kind] for kind in WANTED | UNWANTED}
