"""Save and load of a long sequence beside the disk's own sequential speed: ``python -m benches.files``."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import kvrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


def filled(tokens: int, layers: int, bits: float) -> tuple[kvrs.KVStore, int]:
    """Return a store of Qwen2.5-1.5B's shape with one sequence of random tokens."""
    shape = kvrs.ModelShape(layers, query_heads=12, kv_heads=2, head_dim=128, rope=kvrs.Rope(1e6))
    codec = kvrs.TurboQuant(bits) if bits < 16 else kvrs.Raw16()
    store = kvrs.KVStore(kvrs.Plan(shape, codec, codec))
    (seq,) = store.new()
    rng = np.random.default_rng(1)
    k = rng.standard_normal((1, 2, tokens, 128), dtype=np.float32).astype(np.float16)
    for layer in range(layers):
        store.append(layer, k, k[:, ::-1], [seq])
    return store, seq


def seconds(work: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_plain(path: Path, data: bytes) -> None:
    """Write a file in pieces of 1 MiB and sync it."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), MIB):
            file.write(data[at : at + MIB])
        os.fsync(file.fileno())


def read_pieces(path: Path) -> None:
    """Read a file in pieces of 1 MiB into one buffer: nothing is kept, no memory is taken."""
    piece = bytearray(MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def measure(folder: Path, tokens: int, layers: int, bits: float, rounds: int) -> dict[str, float]:
    """Return medians in MiB/s of the disk and of the store, by turns in the same run.

    "disk read" reads into new memory, as a load must; "in pieces" into one buffer that is used again.
    """
    store, seq = filled(tokens, layers, bits)
    path, plain, cold = folder / "one", folder / "plain", folder / "cold"
    store.save(path, seq)
    data = path.read_bytes()
    times: dict[str, list[float]] = {
        name: [] for name in ("disk write", "save", "disk read", "in pieces", "load")
    }
    loaded: list[int] = []
    for _ in range(rounds):
        times["disk write"].append(seconds(lambda: write_plain(plain, data)))
        times["save"].append(seconds(lambda: store.save(path, seq)))
        times["disk read"].append(seconds(plain.read_bytes))
        times["in pieces"].append(seconds(lambda: read_pieces(plain)))
        times["load"].append(seconds(lambda: loaded.append(store.load(path))))
        store.free(loaded.pop())
    speeds = {name: len(data) / MIB / median(values) for name, values in times.items()}
    deflate = seconds(lambda: store.save(cold, seq, compress="deflate"))
    inflate = seconds(lambda: store.free(store.load(cold)))
    return {
        "MiB": len(data) / MIB,
        **speeds,
        "save / disk": speeds["save"] / speeds["disk write"],
        "load / disk": speeds["load"] / speeds["disk read"],
        "load / pieces": speeds["load"] / speeds["in pieces"],
        "deflate MiB/s": len(data) / MIB / deflate,
        "inflate MiB/s": len(data) / MIB / inflate,
        "deflate ratio": len(data) / cold.stat().st_size,
    }


def main() -> None:
    """Measure, print and, if asked, write a record."""
    parser = argparse.ArgumentParser(prog="python -m benches.files", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--bits", type=float, default=4, help="of the codes; 16: raw rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(Path(folder), options.tokens, options.layers, options.bits, options.rounds)
    for name, value in result.items():
        print(f"{name:<14}{value:10.2f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(vars(options) | result, indent=1, default=str))


if __name__ == "__main__":
    main()
