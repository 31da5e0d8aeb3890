"""Run `cargo bench` and keep what it measured, with the machine, as `benches/record/<date>-<isa>.json`."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benches.machine import describe

RECORDS = Path(__file__).parent / "record"


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def criterion_folder() -> Path:
    """Return where criterion keeps its estimates."""
    metadata = json.loads(output("cargo", "metadata", "--format-version=1", "--no-deps"))
    return Path(metadata["target_directory"]) / "criterion"


def result(estimates: Path) -> dict[str, Any]:
    """Return the median of one benchmark in nanoseconds, its 95 % interval and bytes per second."""
    benchmark = json.loads(estimates.with_name("benchmark.json").read_text())
    median = json.loads(estimates.read_text())["median"]
    interval, size = median["confidence_interval"], benchmark["throughput"]["Bytes"]
    return {
        "name": benchmark["full_id"],
        "median_ns": round(median["point_estimate"], 1),
        "interval_ns": [round(interval["lower_bound"], 1), round(interval["upper_bound"], 1)],
        "bytes": size,
        "gb_per_s": round(size / median["point_estimate"], 3),
    }


def results(folder: Path, since: float) -> list[dict[str, Any]]:
    """Return the benchmarks that were measured after a time, by name."""
    files = [path for path in folder.glob("**/new/estimates.json") if path.stat().st_mtime >= since]
    return sorted(map(result, files), key=lambda row: row["name"])


def main() -> None:
    """Measure, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("filter", nargs="?", help="measure only benchmarks whose name contains this")
    parser.add_argument("--folder", type=Path, default=RECORDS)
    arguments = parser.parse_args()
    start = time.time()
    wanted = ["--", arguments.filter] if arguments.filter else []
    subprocess.run(["cargo", "bench", "-p", "kvrs-testkit", "--bench", "*", *wanted], check=True)
    machine = describe() | {"rustc": output("rustc", "--version").strip()}
    record = {"machine": machine, "results": results(criterion_folder(), start)}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / f"{machine['date']}-{machine['isa']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(record['results'])} results in {path}")


if __name__ == "__main__":
    main()
