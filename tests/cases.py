"""Write `docs/cases.md`, the table of reported faults and the tests that search for them; `--check` compares.

A test of case 17 is called `test_case_b17_...`. The table is made of names, docstrings and marks alone, read
from the sources: nothing is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "cases.md"
NAME = re.compile(r"test_case_(b\d\d)_(\w+)")
WAITING = {"needs_cuda": "waits for a CUDA device", "needs_two": "waits for two CUDA devices", "slow": "slow"}

CASES = {
    "b01": (
        "A constant in a few key channels takes all bits of a codec",
        "transformers#35185, llama.cpp#21385",
    ),
    "b03": ("Zero and constant vectors divide by zero", "faiss#5381, qdrant#8753, cuvs#1866"),
    "b06": ("Dropped keys are replaced by a vector instead of being left out", "kvpress#250, #268, #281"),
    "b08": ("Head sizes that are no power of two", "vllm#41413, llama.cpp#12033, flashinfer#877"),
    "b10": (
        "Query heads that share a key-value head, and who is counted",
        "H2O#32, SnapKV#16, turboquant-vllm#67",
    ),
    "b12": ("A window of uncompressed tokens that never drains", "KIVI#40, VeloxQuant-MLX#86, #162"),
    "b14": ("A ring that wraps", "mistral.rs#2333, transformers#37574, #47708, mlx-vlm#1715"),
    "b15": ("The edges of taking tokens back", "transformers#47433, mlx-lm#1868"),
    "b17": ("Beams that change places", "transformers#45510, #48700"),
    "b19": ("A second prompt in the same store", "KVCache-Factory#15, #54, mistral.rs#1026"),
    "b21": ("Padding spoils scales and masks", "KIVI#18, mlxcel#75"),
    "b23": ("Eviction before the prompt's own queries were served", "VeloxQuant-MLX#370, keys_values#140"),
    "b26": ("Budgets of layers that exceed their total", "VeloxQuant-MLX#76, KVCache-Factory#6"),
    "b29": ("Failed allocations, double frees and leaks", "kvcached#364, inference-sim#200, sglang-jax#982"),
    "b31": ("A pool full of holes", "llama.cpp#17982, #12253, exllamav3#375"),
    "b32": ("A limit that is none", "ik_llama.cpp#2320, vllm-mlx#688, VeloxQuant-MLX#274"),
    "b34": ("Tensors on another device than the current one", "flashinfer#349, #452, vllm#1959"),
    "b36": ("Strided tensors", "aiter#3498, iree-turbine#635, InfiniCore#1148"),
    "b38": ("Rows of a batch that touch each other", "exllamav3#91, sglang#22777, TensorRT-LLM#18244"),
    "b39": ("A sequence on disk and back", "llama.cpp#5648, #14434, maclocal-api#46"),
    "b41": ("Cut files and interrupted saves", "llama.cpp#8699, Rapid-MLX#187, LMCache#3292"),
    "b43": ("Options without effect", "mlx-swift-lm#67, #84, mlx-vlm#1333, vllm-mlx#688"),
    "b45": ("Values that mean nothing", "onnxruntime-genai#2181, lattice#215, kvpress#134"),
    "b47": ("Steps that slow down with the length", "vllm#55610, transformers#34096, omlx#705"),
    "b49": ("Scoring that needs more memory than it saves", "H2O#6, SnapKV#1, #9"),
}
"""What went wrong, and where users of other caches reported it."""

HEAD = """# Cases from the field

Public reports of people who keep compressed KV caches, each as tests with the right value. The tests search
for the whole kind of fault, not for the one input. `python -m tests.cases` writes this table out of their
names and docstrings; `tests/python/test_cases_table.py` fails if it is stale or a case has no test.

| case | fault | tests | reported as |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Test:
    """A test of a case: where it stands, what it says, and what it waits for."""

    case: str
    name: str
    file: str
    says: str
    waits: tuple[str, ...]


@cache
def found() -> tuple[Test, ...]:
    """Return all tests of cases, ascending by case, file and place."""
    tests = []
    for path in sorted((ROOT / "tests" / "python").glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (match := NAME.fullmatch(node.name)):
                tests.append(_test(match, node, path))
    return tuple(sorted(tests, key=lambda test: test.case))


def _test(match: re.Match[str], node: ast.FunctionDef, path: Path) -> Test:
    marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
    waits = tuple(text for word, text in WAITING.items() if re.search(rf"\b{word}\b", marks))
    says = match[2].replace("_", " ")
    doc = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ").strip()
    says = says[0].upper() + says[1:] + (f". {doc.rstrip('.')}" if doc else "")
    return Test(match[1], node.name, path.relative_to(ROOT).as_posix(), says, waits)


def table(tests: tuple[Test, ...]) -> str:
    """Return the text of `docs/cases.md`."""
    parts, sections = [HEAD], []
    for case, (fault, reports) in CASES.items():
        own = [test for test in tests if test.case == case]
        waiting = sum(1 for test in own if any("waits" in text for text in test.waits))
        count = f"{len(own)}, of which {waiting} wait for CUDA" if waiting else str(len(own))
        parts.append(f"| [{case.upper()}](#{case}) | {fault} | {count} | {reports} |\n")
        sections.append(f"\n## {case.upper()}\n\n{fault}.\n\n" + "".join(_line(test) for test in own))
    return "".join(parts + sections)


def _line(test: Test) -> str:
    waits = f" ({', '.join(test.waits)})" if test.waits else ""
    return f"- {test.says}{waits}.\n  `{test.file}`, `{test.name}`\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or say whether it is as it would be written."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the table is stale")
    text = table(found())
    if parser.parse_args(arguments).check:
        fresh = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        if not fresh:
            print("docs/cases.md is stale: python -m tests.cases writes it anew", file=sys.stderr)
        return 0 if fresh else 1
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
