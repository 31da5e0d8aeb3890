"""Compile every kernel for every architecture that kvrs ships: ``python -m kernels_cu.tools.compile``.

Code lies under ``build/cuda/kernels``, one file for each kernel file and target, with a report beside it;
what has not changed is not compiled again. ``build/cuda/kernels.kvcuda`` is all of it, for the crate;
``build/cuda/check.kvcuda`` holds in addition the kernels that try single instructions on a device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels_cu.tools import archive, nvrtc, report, toolkit

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120")
LIMIT = 8 << 20
"""Most bytes of the archive."""
ARCHIVE = toolkit.BUILD / "kernels.kvcuda"
TRIALS = Path("emu") / "tests" / "intrinsics.cu"
"""Among the sources: each operation that kernels use, tried on its own."""


@dataclass(frozen=True)
class Job:
    """One file to compile for one target; `key` names everything that the result depends on."""

    source: Path
    include: Path
    nvidia: Path
    out: Path
    target: str
    key: str

    @property
    def code_path(self) -> Path:
        """Where the code goes."""
        suffix = "cubin" if self.target.startswith("sm_") else "ptx"
        return self.out / f"{self.source.stem}.{self.target}.{suffix}"

    @property
    def report_path(self) -> Path:
        """Where the report goes."""
        return self.out / f"{self.source.stem}.{self.target}.json"


def jobs(sources: Path, nvidia: Path, out: Path, targets: tuple[str, ...] = TARGETS) -> list[Job]:
    """Return one job for each kernel file and target; the longest files first, so that cores end together."""
    files = sorted(sources.glob("*.cu"), key=lambda path: -path.stat().st_size)
    return jobs_of(files, sources / "include", nvidia, out, targets)


def jobs_of(
    files: list[Path], include: Path, nvidia: Path, out: Path, targets: tuple[str, ...] = TARGETS
) -> list[Job]:
    """Return one job for each of these files and each target."""
    shared = hashlib.sha256(repr((toolkit.COMPILER, nvrtc.OPTIONS)).encode())
    for header in sorted(include.rglob("*.cuh")):
        shared.update(header.name.encode() + b"\0" + header.read_bytes())
    made = []
    for source in files:
        for target in targets:
            own = shared.copy()
            own.update(target.encode() + b"\0" + source.read_bytes())
            made.append(Job(source, include, nvidia, out, target, own.hexdigest()))
    return made


def remove_others(code: Path, todo: list[Job]) -> None:
    """Remove what kernel files that are gone have left."""
    wanted = {path for job in todo for path in (job.code_path, job.report_path)}
    for path in set(code.iterdir()) - wanted:
        path.unlink()


def compile_one(job: Job) -> dict[str, Any]:
    """Compile a file, or take what an earlier run left; return the report.

    Raises
    ------
    nvrtc.CompileError
        With the compiler's messages.
    """
    if job.report_path.is_file() and job.code_path.is_file():
        known: dict[str, Any] = json.loads(job.report_path.read_text())
        if known["key"] == job.key:
            return {**known, "seconds": 0.0, "cached": True}
    start = time.perf_counter()
    done = nvrtc.Nvrtc(job.nvidia, job.include).compile(job.source, job.target)
    found = report.kernels(done.ptx, done.log)
    made = {
        "key": job.key,
        "file": job.source.stem,
        "target": job.target,
        "kernels": {name: asdict(kernel) for name, kernel in found.items()},
        "warnings": report.warnings(done.log),
        "seconds": round(time.perf_counter() - start, 2),
    }
    job.code_path.write_bytes(done.code)
    job.report_path.write_text(json.dumps(made, indent=1) + "\n")
    return {**made, "cached": False}


def build(todo: list[Job], workers: int) -> list[dict[str, Any]]:
    """Compile all jobs on several cores, each in a process of its own; print each as it comes."""
    reports = []
    with ProcessPoolExecutor(workers) as pool:
        for job, made in zip(todo, pool.map(compile_one, todo), strict=True):
            reports.append(made)
            size = job.code_path.stat().st_size / 1024
            took = "unchanged" if made["cached"] else f"{made['seconds']:.1f} s"
            print(f"{made['file']:20} {made['target']:12} {size:9.1f} KiB  {took}", flush=True)
            for line in made["warnings"]:
                print(f"    {line}", flush=True)
    return reports


def write_archive(path: Path, todo: list[Job], reports: list[dict[str, Any]], source: str) -> int:
    """Write all code as one file and return its size."""
    parts = [
        archive.Part(made["file"], made["target"], job.code_path.read_bytes(), tuple(made["kernels"]))
        for job, made in zip(todo, reports, strict=True)
        if made["kernels"]
    ]
    packed = archive.pack(parts, "NVRTC " + toolkit.COMPILER[0].split("==")[1], source)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(packed)
    fresh.replace(path)
    return len(packed)


def _arguments() -> argparse.Namespace:
    """Read the command line."""
    name = "python -m kernels_cu.tools.compile"
    parser = argparse.ArgumentParser(prog=name, description=__doc__.split(":")[0])
    parser.add_argument("--sources", type=Path, default=toolkit.SOURCES, help="folder of the .cu files")
    wheels = toolkit.WHEELS / "compiler"
    parser.add_argument("--wheels", type=Path, default=wheels, help="where the compiler is unpacked")
    parser.add_argument("--out", type=Path, default=ARCHIVE, help="the archive")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    return parser.parse_args()


def main() -> None:
    """Compile, print sizes and seconds, and fail where a limit is passed."""
    options = _arguments()
    start = time.perf_counter()
    nvidia = toolkit.fetch(toolkit.COMPILER, options.wheels)
    code, check = (options.out.parent / name for name in ("kernels", "check"))
    source = archive.source_hash(options.sources)
    todo = jobs(options.sources, nvidia, code)
    trials = [path for path in [options.sources / TRIALS] if path.is_file()]
    tried = jobs_of(trials, options.sources / "include", nvidia, check)
    if not todo:
        sys.exit(f"{options.sources} holds no .cu files")
    for folder, own in ((code, todo), (check, tried)):
        folder.mkdir(parents=True, exist_ok=True)
        remove_others(folder, own)
    try:
        reports = build(todo + tried, options.jobs)
    except nvrtc.CompileError as error:
        sys.exit(f"{error}")
    write_archive(options.out.with_name("check.kvcuda"), todo + tried, reports, source)
    reports = reports[: len(todo)]
    size = write_archive(options.out, todo, reports, source)
    _tell(todo, reports, size, options.out, time.perf_counter() - start)
    if size > LIMIT:
        sys.exit(f"the archive has {size} bytes; allowed: {LIMIT}")


def _tell(todo: list[Job], reports: list[dict[str, Any]], size: int, out: Path, seconds: float) -> None:
    """Print what the archive holds."""
    whole = sum(job.code_path.stat().st_size for job in todo)
    names = {name for made in reports for name in made["kernels"]}
    print(
        f"{len(names)} kernels, {len(TARGETS)} targets: {whole / 2**20:.2f} MiB, packed {size / 2**20:.2f} "
        f"of {LIMIT >> 20} MiB, {seconds:.1f} s -> {out}"
    )


if __name__ == "__main__":
    main()
