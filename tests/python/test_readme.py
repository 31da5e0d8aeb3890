"""The examples of the README run as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "crates/kvrs/examples/quickstart.rs"


def first_block(language: str) -> str:
    """Return the first fenced block of a language."""
    text = (ROOT / "README.md").read_text()
    block = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None, f"README.md has no ```{language} block"
    return block.group(1)


def lines_of_code(text: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith(("//", "#")) for line in text.splitlines())


def test_the_python_example_runs() -> None:
    pytest.importorskip("torch", reason="the README's Python example uses torch, which is not installed")
    example = first_block("python")
    assert lines_of_code(example) <= 12
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([1, 8, 1, 128])")


def test_the_rust_example_is_the_one_that_is_built() -> None:
    assert first_block("rust").strip() == EXAMPLE.read_text().strip()


@pytest.mark.slow
def test_the_rust_example_runs() -> None:
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not on the PATH: crates/kvrs/examples/quickstart.rs was not run")
    command = [cargo, "run", "-q", "-p", "kvrs", "--example", "quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
