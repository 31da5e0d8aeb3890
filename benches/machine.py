"""What a measurement depends on besides the code: the CPU, its instruction sets, versions, the date."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import kvrs
import torch
from kvrs.eval.results import versions

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16")
"""Instruction sets that decide which kernels run, in the spelling of Linux."""


def _cpuinfo() -> dict[str, str]:
    """Return the first CPU's fields as Linux reports them; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().split("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}


def describe() -> dict[str, Any]:
    """Return CPU, instruction sets, cores, versions and date."""
    info = _cpuinfo()
    have = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "flags": [flag for flag in FLAGS if flag in have],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": kvrs.isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **versions(),
    }


def set_threads(threads: int) -> None:
    """Let torch and kvrs use some threads each."""
    torch.set_num_threads(threads)
    kvrs.set_num_threads(threads)


def line(machine: dict[str, Any]) -> str:
    """Return the description as one line for the head of a table."""
    flags = " ".join(machine["flags"]) or "none of " + " ".join(FLAGS)
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({flags}); kvrs {machine['kvrs']} on its "
        f"{machine['isa']} kernels; torch {machine['torch']}; {machine['date']}"
    )
