"""Instructions per token of attention, counted by valgrind: a slow-down shows on a noisy machine too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TOKENS, KV_HEADS, CALLS = 4096, 2, 40

RECORDED = {4: 201.7, 3: 242.7, 2: 200.1}
"""By bits: instructions per token and key-value head of four query heads, d 128, AVX2, rustc 1.95."""

PROBE = f"""
import sys
import kvrs
import numpy as np

kvrs.set_num_threads(1)
rng = np.random.default_rng(1)
q, k, v = (rng.standard_normal((1, h, t, 128), np.float32) for h, t in ((8, 1), (2, {TOKENS}), (2, {TOKENS})))
for bits, calls in zip({list(RECORDED)}, map(int, sys.argv[1:])):
    codec = kvrs.TurboQuant(bits=bits)
    shape = kvrs.ModelShape(layers=1, query_heads=8, kv_heads={KV_HEADS}, head_dim=128)
    store = kvrs.KVStore(kvrs.Plan(shape, codec, codec))
    seqs = store.new()
    store.append(0, k, v, seqs)
    for _ in range(calls):
        store.attend(0, q, seqs)
"""


def instructions(calls: Sequence[int]) -> int:
    """Return how many instructions a process executes that attends so many times at each width."""
    fixed = {"KVRS_ISA": "avx2", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", PROBE]
    run = subprocess.run(
        [*command, *map(str, calls)], capture_output=True, text=True, env=os.environ | fixed, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return int(run.stderr.split("Collected :")[1].split()[0])


def unavailable() -> tuple[str, str] | None:
    """Return what is missing to count, and why."""
    if shutil.which("valgrind") is None:
        return "valgrind", "there is no valgrind"
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        return "avx2", "this CPU has no avx2"
    return None


@pytest.mark.slow
def test_a_token_costs_no_more_instructions_than_recorded() -> None:
    if missing := unavailable():
        assert missing[0] not in os.environ.get("KVRS_REQUIRE", "").split(",")
        pytest.skip(f"not run: {missing[1]}")
    once = [1] * len(RECORDED)
    more = [[1 + CALLS * (i == j) for j in range(len(RECORDED))] for i in range(len(RECORDED))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        base, *totals = pool.map(instructions, [once, *more])
    for (bits, recorded), total in zip(RECORDED.items(), totals, strict=True):
        got = (total - base) / (CALLS * TOKENS * KV_HEADS)
        print(f"{bits} bits: {got:.1f} instructions per token and key-value head, {recorded} recorded")
        assert got <= 1.05 * recorded
