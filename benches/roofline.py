"""What the memory of a GPU allows: the bytes of a decode step by layout, at published rates.

``python -m benches.roofline`` prints the table of ``docs/cuda.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import kvrs
from kvrs.codecs import Codec

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
TOKENS = 32768

LAYOUTS: dict[str, Codec] = {
    "raw, 16 bits": kvrs.Raw16(),
    "int8": kvrs.Int8(),
    "TurboQuant, 4 bits": kvrs.TurboQuant(4),
    "TurboQuant, 3 bits": kvrs.TurboQuant(3),
    "TurboQuant, 2 bits": kvrs.TurboQuant(2),
    "KIVI, 4 bits": kvrs.KIVI(4),
    "KIVI, 2 bits": kvrs.KIVI(2),
}
PUBLISHED = {"H200": 4.8e12, "RTX 4090": 1.008e12}
"""Bytes per second that the makers state."""
GATE = 0.7
"""Share of the copy bandwidth that attention must reach."""


def plan(codec: Codec) -> kvrs.Plan:
    """Return a plan of one layer with the default window of 4 + 128 tokens."""
    shape = kvrs.ModelShape(layers=1, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    return kvrs.Plan(shape, keys=codec, values=codec)


@dataclass(frozen=True)
class Read:
    """What attention over one sequence and layer reads.

    Attributes
    ----------
    tokens : int
        Length of the sequence.
    packed : int
        Bytes of codes and scales.
    window : int
        Bytes of 16-bit rows.
    """

    tokens: int
    packed: int
    window: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.packed + self.window

    @property
    def per_token(self) -> float:
        """Bytes a token, of all heads, keys and values."""
        return self.total / self.tokens

    def microseconds(self, bytes_per_second: float, batch: int = 1) -> float:
        """Return the least time that reading it takes."""
        return 1e6 * batch * self.total / bytes_per_second


def read(codec: Codec, tokens: int = TOKENS) -> Read:
    """Return what attention over a sequence of one layer reads, every byte once."""
    memory = plan(codec).memory(tokens=tokens)
    return Read(tokens, memory.bytes_codes + memory.bytes_scales, memory.bytes_window)


def markdown(tokens: int = TOKENS) -> str:
    """Return the table as it stands in the documentation."""
    heads = [f"{name}, {rate / 1e12:.4g} TB/s" for name, rate in PUBLISHED.items()]
    lines = [
        f"| layout | bytes a token | of 16 bits | {' | '.join(heads)} |",
        f"|---|---:|---:|{'---:|' * len(heads)}",
    ]
    exact = read(LAYOUTS["raw, 16 bits"], tokens)
    for name, codec in LAYOUTS.items():
        mine = read(codec, tokens)
        times = " | ".join(f"{mine.microseconds(rate):.1f} µs" for rate in PUBLISHED.values())
        lines.append(f"| {name} | {mine.per_token:.0f} | {mine.total / exact.total:.1%} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
