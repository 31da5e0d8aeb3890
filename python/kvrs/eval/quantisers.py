"""Write the table of all codecs: ``python -m kvrs.eval.quantisers``.

Nothing is measured here: perplexities come out of what ``kvrs eval rate-distortion`` wrote, speeds out of
``python -m benches.codecs``. The page keeps what stands outside of its two marks.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST, LAST = "<!-- generated: make quantisers -->", "<!-- end -->"
MODELS = ("gemma", "qwen")
SPEEDS = "bench-codecs-avx2.json"
STORED = {
    "raw16": "16-bit rows",
    "turboquant": "codes of one rotation, a scale a token",
    "rabitq": "codes on an even grid, a scale a token",
    "qjl": "signs of m random projections, a length a token",
    "kivi": "codes; range per channel and group (keys), per token and block (values)",
    "int8": "bytes, a scale a token",
    "fp8": "8-bit floats, a scale a token",
    "aatc": "codes of runs of uncorrelated channels, a scale a token",
    "kvtc": "codes of principal components before RoPE, a scale a token",
    "palu": "codes of a low-rank latent before RoPE, a scale a token",
    "kvquant": "codes of a fitted codebook before RoPE, 1 % of the entries apart",
}


def read(path: Path) -> dict[str, Any]:
    """Return a result; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def perplexity_table(model: str, result: dict[str, Any]) -> list[str]:
    """Return the lines of one model's table, by falling bits."""
    texts = list(result["texts"])
    heads = ["plan", "what is stored", "bits", "MiB", "smaller", *texts]
    lengths = " and ".join(f"{tokens} of {text}" for text, tokens in result["texts"].items())
    lines = [
        f"**{model}**, ratio of perplexities to the exact cache over {lengths}; bytes of "
        f"{result['tokens']} tokens:",
        "",
    ]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in sorted(result["rows"], key=lambda row: -row["bits_per_element"]):
        cells = [
            f"`{row['spec']}`",
            STORED.get(row["method"], ""),
            f"{row['bits_per_element']:.2f}",
            f"{row['bytes'] / 2**20:.2f}",
            f"{row['compression']:.2f}x",
            *(f"{row['ratio'][text]:.4f}" for text in texts),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def speed_table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the speeds of all codecs."""
    lines = [
        f"One new query over {result['tokens']} tokens, {result['threads']} thread(s), and appending them; "
        "ratios to TurboQuant at 4 bits (`python -m benches.codecs`).",
        "",
        "| codec | path | bits | attend | append |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['codec']} | {row['path']} | {row['bits_per_element']:.2f} | {row['to_base']:.2f} "
            f"| {row['append_to_base']:.2f} |"
        )
    return [*lines, ""]


def page(results: Path) -> list[str]:
    """Return the generated lines."""
    lines: list[str] = []
    for model in MODELS:
        for path in sorted(results.glob(f"{model}-quantisers*.json")):
            allocation = path.stem.removeprefix(f"{model}-quantisers").removeprefix("-")
            lines += perplexity_table(f"{model}, bits by {allocation}" if allocation else model, read(path))
    speeds = read(results / SPEEDS)
    return lines + (speed_table(speeds) if speeds else [])


def write(out: Path, lines: Sequence[str]) -> None:
    """Replace what stands between the marks.

    Raises
    ------
    ValueError
        If the page has no marks.
    """
    text = out.read_text()
    if FIRST not in text or LAST not in text:
        raise ValueError(f"{out} has no marks; allowed: a page with {FIRST} and {LAST}")
    before, after = text.split(FIRST)[0], text.split(LAST)[1]
    out.write_text(before + FIRST + "\n\n" + "\n".join(lines) + LAST + after)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvrs.eval.quantisers", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--out", type=Path, default=Path("docs/quantisers.md"), help="the page")
    options = parser.parse_args(arguments)
    write(options.out, page(options.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
