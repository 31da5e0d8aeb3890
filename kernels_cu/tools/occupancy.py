"""How many blocks of a kernel fit on a multiprocessor at once.

The numbers are those of the CUDA C++ Programming Guide, compute capabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536
WARP = 32
REGISTERS_UNIT = 256
"""A warp takes registers in units of this many."""
SHARED_UNIT = 128
SHARED_RESERVED = 1024
"""Bytes of shared memory of a block that the system takes."""


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has: warps and blocks at once, and bytes of shared memory."""

    warps: int
    blocks: int
    shared: int


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 164 << 10),
    "sm_89": Multiprocessor(48, 24, 100 << 10),
    "sm_90": Multiprocessor(64, 32, 228 << 10),
    "sm_100": Multiprocessor(64, 32, 228 << 10),
    "sm_120": Multiprocessor(48, 24, 100 << 10),
}


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def blocks(arch: str, threads: int, registers: int, shared: int) -> tuple[int, str]:
    """Return the blocks that fit at once, and what limits them.

    Parameters
    ----------
    arch : str
        A key of `MULTIPROCESSORS`.
    threads : int
        Of a block.
    registers : int
        Of a thread.
    shared : int
        Bytes of a block.
    """
    have = MULTIPROCESSORS[arch]
    warps = -(-threads // WARP)
    by = {
        "blocks": have.blocks,
        "warps": have.warps // warps,
        "registers": REGISTERS // _up(max(registers, 1) * WARP, REGISTERS_UNIT) // warps,
        "shared memory": have.shared // _up(shared + SHARED_RESERVED, SHARED_UNIT),
    }
    limit = min(by, key=lambda name: by[name])
    return by[limit], limit
