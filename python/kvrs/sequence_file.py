"""What a sequence file holds, without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrs import _kvrs

if TYPE_CHECKING:
    import os

__all__ = ["SequenceFile", "inspect"]


@dataclass(frozen=True)
class SequenceFile:
    """What a sequence file says of itself.

    Attributes
    ----------
    version : str
        Version of the format.
    plan : str
        Hash of the plan that it belongs to.
    tokens : int
        Tokens of the sequence, dropped ones included.
    start : int or None
        Position of its first token; None if it has none.
    window : str or None
        16-bit type of uncompressed tokens; None if it has no tokens.
    compress : str
        ``"none"`` or ``"deflate"``.
    layers : int
        Layers.
    bytes : int
        Bytes of the file.
    sections : dict of str to int
        Bytes by kind of section: ``pages.0`` holds 16-bit rows, ``pages.1`` the codes of the plan's codec.
    """

    version: str
    plan: str
    tokens: int
    start: int | None
    window: str | None
    compress: str
    layers: int
    bytes: int
    sections: dict[str, int]

    def __str__(self) -> str:
        """Return a table for people."""
        lines = [
            f"sequence of {self.tokens} tokens in {self.layers} layers, from position {self.start or 0} on",
            f"plan      {self.plan}",
            f"window    {self.window or 'no tokens yet'}",
            f"format    version {self.version}, compression {self.compress}",
            f"file      {self.bytes:,} bytes",
        ]
        lines += [f"  {name:<10}{count:>16,}" for name, count in sorted(self.sections.items())]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str]) -> SequenceFile:
    """Read the header of a sequence file, and no page.

    Parameters
    ----------
    path : path-like
        A file that `KVStore.save` wrote.

    Raises
    ------
    FormatError
        If it cannot be read, is cut, of another version or no sequence.
    """
    return SequenceFile(**json.loads(_kvrs.inspect(path)))
