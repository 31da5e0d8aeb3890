"""The promises of docs/guarantees.md: each names tests, and each test that is named is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import kvrs
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
PROOF = re.compile(r"`([\w/.-]+\.(?:rs|py))::(\w+)`")
ROW = re.compile(r"^\| (?P<number>[\w.]+) \| (?P<promise>.+?) \| (?P<proofs>.+) \|$", re.MULTILINE)


@cache
def rows() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Return promise and proofs by number."""
    found = ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return {
        row["number"]: (row["promise"], PROOF.findall(row["proofs"]))
        for row in found
        if row["number"] != "number"
    }


@cache
def names_in(path: str) -> set[str]:
    """Return the names of all tests in a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    # A test's attributes stand above it, others like `ignore` or `cfg` between.
    return set(re.findall(r"#\[test\]\s+(?:#\[[^\n]*\]\s+)*fn (\w+)\(", text))


@pytest.mark.parametrize("number", rows())
def test_every_promise_names_tests_that_exist(number: str) -> None:
    promise, proofs = rows()[number]
    assert proofs, f"{promise!r} is a promise without a proof"
    for path, name in proofs:
        assert (ROOT / path).is_file(), f"{number}: {path} is not there"
        assert name in names_in(path), f"{number}: {path} has no test {name}"


def test_every_invariant_of_the_architecture_is_a_promise() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Invariants")[2]
    numbers = re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    assert len(numbers) >= 9
    assert {f"I{number}" for number in numbers} <= set(rows())


def test_a_test_that_is_gone_is_noticed() -> None:
    assert "test_a_test_that_is_gone_is_noticed" in names_in("tests/python/test_guarantees.py")
    assert "rows" in names_in("tests/python/test_guarantees.py")
    assert "a_test_that_never_was" not in names_in("tests/rust/store.rs")
    assert "codes_do_not_depend_on_the_sizes_of_calls" in names_in("tests/rust/store.rs")


def test_every_line_of_the_page_that_looks_like_a_proof_is_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"::\w+`", text)) == sum(len(proofs) for _, proofs in rows().values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ["model", "NoneType", "a transformers model"]),
        ({"model": "gemma"}, ["model", "str", "a transformers model"]),
        ({"batches": None}, ["batches", "None", "token ids"]),
        ({"batches": 3}, ["batches", "3", "token ids"]),
        ({"batches": [None]}, ["batches[0]", "None", "token ids"]),
        ({"batches": ["text"]}, ["batches[0]", "'text'", "token ids"]),
        ({"batches": []}, ["batches", "no texts"]),
        ({"keys": None}, ["keys[0]", "None", "a codec"]),
        ({"values": "aatc"}, ["values[0]", "'aatc'", "a codec"]),
        ({"allocation": "best"}, ["allocation", "'best'", "sensitivity"]),
    ],
    ids=str,
)
def test_calibration_names_what_is_no_model_no_texts_and_no_codec(
    changes: dict[str, Any], words: list[str]
) -> None:
    torch = pytest.importorskip("torch")
    from test_calibration import qwen2

    codec = kvrs.AATC(bits=3)
    given = {"model": qwen2(), "batches": [torch.arange(50)], "keys": codec, "values": codec} | changes
    with pytest.raises(kvrs.PlanError) as caught:
        kvrs.calibrate(**given, progress=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)
