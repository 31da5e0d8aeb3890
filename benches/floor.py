"""The memory floor: how long the mere reading of a store's bytes takes on this machine."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BUFFER_BYTES = 256 << 20
"""Many times the last-level cache of one socket."""


def huge_buffer() -> np.ndarray:
    """Return float32 ones in anonymous memory, on huge pages where the system gives them.

    With small pages a stream of reads stays well below what the memory can deliver, and so would the floor.
    """
    memory = mmap.mmap(-1, BUFFER_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.float32)
    buffer.fill(1.0)
    return buffer


def readers(buffer: np.ndarray, pool: ThreadPoolExecutor, threads: int) -> Iterator[Callable[[], object]]:
    """Yield ways to read the whole buffer with some threads; which is fastest depends on the machine."""
    parts = np.array_split(buffer, threads)
    words = [part.view(np.int32) for part in parts]
    whole = torch.from_numpy(buffer.view(np.int64))
    yield whole.sum
    yield lambda: list(pool.map(lambda part: np.dot(part, part), parts))
    yield lambda: list(pool.map(np.maximum.reduce, words))
    yield lambda: list(pool.map(lambda part: np.add.reduce(part.view(np.uint64)), parts))


def read_bandwidth(buffer: np.ndarray, threads: int, repeats: int = 3) -> float:
    """Return the fastest streaming read in bytes per second; torch must be set to as many threads."""
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for read in readers(buffer, pool, threads):
            for _ in range(repeats):
                start = time.perf_counter()
                read()
                best = min(best, time.perf_counter() - start)
    return buffer.nbytes / best


def floor_ms(read_bytes: int, bytes_per_second: float) -> float:
    """Return the milliseconds that reading takes at a bandwidth."""
    return read_bytes / bytes_per_second * 1e3
