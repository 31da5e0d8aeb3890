"""One file with the compiled code of all kernels, each part deflated on its own; kvrs-cuda reads it.

::

    8 bytes   KVCUDA01
    4 bytes   length of the index, little-endian
    index     lines of text:
                source HASH            of the sources, to refuse code that is older than they are
                compiler NAME VERSION
                module FILE TARGET OFFSET PACKED SIZE KERNEL,KERNEL,...
    parts     raw deflate streams; OFFSET counts from their beginning
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"KVCUDA01"


@dataclass(frozen=True)
class Part:
    """One compiled file for one target: its code, and the kernels in it."""

    file: str
    target: str
    code: bytes
    kernels: tuple[str, ...]


def deflate(code: bytes) -> bytes:
    """Return bytes as a raw deflate stream."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    return packer.compress(code) + packer.flush()


def pack(parts: Iterable[Part], compiler: str, source: str) -> bytes:
    """Return the archive of some parts."""
    lines, streams, at = [f"source {source}", f"compiler {compiler}"], [], 0
    for part in parts:
        stream = deflate(part.code)
        names = ",".join(part.kernels)
        lines.append(f"module {part.file} {part.target} {at} {len(stream)} {len(part.code)} {names}")
        streams.append(stream)
        at += len(stream)
    index = ("\n".join(lines) + "\n").encode()
    return b"".join([MAGIC, len(index).to_bytes(4, "little"), index, *streams])


def source_files(folder: Path) -> list[Path]:
    """Return what device code is made of: the kernels by name, then their headers by name."""
    return sorted(folder.glob("*.cu")) + sorted(folder.glob("include/kvrs/*.cuh"))


def source_hash(folder: Path) -> str:
    """Return the 64-bit FNV-1a hash over names and bytes of the sources, as 16 hex digits."""
    state = 0xCBF29CE484222325
    for path in source_files(folder):
        for byte in path.name.encode() + b"\0" + path.read_bytes() + b"\0":
            state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"
