"""What the compiler says of each kernel: launch bounds in the PTX, registers and spills in the log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_MAXNTID = re.compile(r"\.maxntid (\d+)")
_MINNCTA = re.compile(r"\.minnctapersm (\d+)")
_COMPILING = re.compile(r"Compiling entry function '(\w+)'")
_NUMBERS = {
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture.

    Attributes
    ----------
    threads, wanted_blocks : int
        Its launch bounds: threads of a block, and blocks on a multiprocessor that it asks for.
    registers : int
        A thread's.
    stack, spill_stores, spill_loads : int
        Bytes of local memory a thread, and bytes that registers were spilled to.
    shared : int
        Bytes of shared memory a block.
    """

    threads: int
    wanted_blocks: int
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0


def kernels(ptx: str, log: str = "") -> dict[str, Kernel]:
    """Return the kernels of a file by name, in its order; without a log, their bounds only."""
    usage = _usage(log)
    starts = [*_ENTRY.finditer(ptx)]
    ends = [match.start() for match in starts[1:]] + [len(ptx)]
    found = {}
    for match, end in zip(starts, ends, strict=True):
        head = ptx[match.end() : ptx.find("{", match.end(), end)]
        threads, blocks = (_number(pattern, head) for pattern in (_MAXNTID, _MINNCTA))
        found[match[1]] = Kernel(threads, blocks, **usage.get(match[1], {}))
    return found


def warnings(log: str) -> list[str]:
    """Return the lines of a log that are no report of registers."""
    report = ("ptxas info", "ptxas         .")
    return [line for line in log.splitlines() if line.strip() and not line.startswith(report)]


def _usage(log: str) -> dict[str, dict[str, int]]:
    """Return the numbers of each kernel in the assembler's report."""
    parts = _COMPILING.split(log)[1:]
    return {
        name: {key: _number(pattern, text) for key, pattern in _NUMBERS.items()}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0
