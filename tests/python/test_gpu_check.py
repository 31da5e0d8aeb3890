"""The script for machines with a GPU: what it concludes, and what it does where there is none."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvrs
import pytest
from kvrs import cuda

pytest.importorskip("torch")
from rich.console import Console

from benches import gpu_check, gpu_steps, roofline

ROOT = Path(__file__).resolve().parents[2]


def record(**changes: Any) -> dict[str, Any]:
    """Return a record in which everything holds, changed."""
    rows = []
    for tokens in gpu_check.TOKENS:
        for batch in gpu_check.BATCHES:
            mine = {f"kvrs{bits}": {"ms": 1.0, "share": 0.8, "error": 0.1} for bits in gpu_check.BITS}
            rows.append(
                {"tokens": tokens, "batch": batch, "torch_ms": 3.5, "flashinfer": "not installed", **mine}
            )
    made = {
        "conformance": {"ran": True, "passed": True, "why": ""},
        "copy_bandwidth": 4e12,
        "decode": rows,
        "append": {"prompt": 1e6, "decode": 1e5},
        "generate": {"ran": False, "why": "no model"},
        "left_out": ["131072 tokens x 64: does not fit into memory"],
    }
    return made | changes


def conclude(made: dict[str, Any]) -> tuple[bool, str]:
    """Return whether everything holds that must, and what is printed."""
    console = Console(width=110, file=io.StringIO(), highlight=False)
    holds = gpu_check.show(made, console)
    return holds, console.file.getvalue()


def test_a_good_run_holds_and_shows_what_was_left_out() -> None:
    holds, text = conclude(record())
    assert holds
    assert "FAIL" not in text
    assert "left out: 131072 tokens x 64: does not fit into memory" in text
    assert "3.50 times torch's flash attention, the goal is 3" in text
    assert "1.000 (80%)" in text
    assert "prompt 1,000,000 tokens/s" in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"share": 0.69}, "FAIL 32768 tokens x 8, 4 bits: 69% of copy bandwidth, at least 70%"),
        ({"error": 0.2}, "FAIL 32768 tokens x 8, 4 bits: error 0.200, at most 0.188"),
    ],
)
def test_a_run_that_is_too_slow_or_wrong_fails_by_name(change: dict[str, float], line: str) -> None:
    made = record()
    next(row for row in made["decode"] if (row["tokens"], row["batch"]) == (32768, 8))["kvrs4"] |= change
    holds, text = conclude(made)
    assert not holds
    assert line in text


def test_a_missed_goal_is_said_and_does_not_fail() -> None:
    made = record()
    for row in made["decode"]:
        row["torch_ms"] = 2.0
    holds, text = conclude(made)
    assert holds
    assert "goal not reached 32768 tokens x 64, 4 bits: 2.00 times" in text


@pytest.mark.parametrize("ran", [True, False])
def test_conformance_that_failed_or_did_not_run_fails(ran: bool) -> None:
    holds, text = conclude(record(conformance={"ran": ran, "passed": False, "why": "the reason"}))
    assert not holds
    assert "FAIL conformance tests on the device: the reason" in text


def test_conformance_runs_the_newest_test_programs_up_to_the_first_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARGO_TARGET_DIR", raising=False)
    folder = tmp_path / "target" / "release" / "deps"
    folder.mkdir(parents=True)
    for name in gpu_check.CONFORMANCE:
        assert gpu_check.conformance(tmp_path)["why"] == f"{tmp_path / 'target'} holds no test program {name}"
        program = folder / f"{name}-0123"
        (folder / f"{name}-0123.d").write_text("no program")
        for script, expected in (
            ("echo not run: no device", {"ran": False, "passed": False, "why": ""}),
            ("echo seed 3; exit 101", {"ran": True, "passed": False, "why": "seed 3\n"}),
            ('test "$KVRS_TEST_DEVICE" = 0', {"ran": True, "passed": True, "why": ""}),
        ):
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
            if not expected["passed"] or name == gpu_check.CONFORMANCE[-1]:
                assert gpu_check.conformance(tmp_path) == expected


def test_cases_that_do_not_fit_into_memory_are_known_before() -> None:
    whole = 2 * 64 * 131072 * 8 * 128 * 2 * 2
    assert not gpu_steps.fits(131072, 64, whole)
    assert gpu_steps.fits(131072, 64, whole + 1)


def test_without_a_gpu_the_script_says_so_and_exits_with_2(tmp_path: Path) -> None:
    if cuda.is_available():
        pytest.skip("this machine has a GPU that kvrs can use")
    command = [sys.executable, "-m", "benches.gpu_check", "--json", str(tmp_path / "made.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert f"nothing was checked: {cuda.status().missing}" in " ".join(done.stdout.split())
    assert not (tmp_path / "made.json").exists()


def test_a_saved_record_is_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    for made, status in ((record(), 0), (record(conformance={"ran": False, "passed": False, "why": "x"}), 1)):
        path.write_text(json.dumps(made))
        command = [sys.executable, "-m", "benches.gpu_check", "--from", str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert "copy bandwidth 4.00 TB/s" in done.stdout


def test_the_bytes_of_a_step_are_those_of_the_pages_that_it_reads() -> None:
    whole, packed = roofline.read(kvrs.Raw16()), roofline.read(kvrs.TurboQuant(4))
    assert whole.per_token == 8 * (128 + 128) * 2
    assert packed.window == (4 + 128 + 12) * 4096
    sealed = 32768 - packed.window // 4096
    assert packed.packed == pytest.approx(sealed * 8 * 2 * (64 + 2), rel=0.001)
    assert packed.microseconds(4.8e12, 64) == pytest.approx(64e6 * packed.total / 4.8e12)


def test_the_table_of_the_documentation_is_the_one_that_is_computed() -> None:
    assert roofline.markdown() in (ROOT / "docs" / "cuda.md").read_text()
