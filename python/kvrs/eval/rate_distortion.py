"""Perplexity against true bits per element, for a list of plans: a table, a JSON file and a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

import kvrs
from kvrs.calibrated import AATC, KVTC, PALU, KVQuant
from kvrs.eval import perplexity, spec
from kvrs.eval.forward import no_progress
from kvrs.eval.results import Record, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

TOKENS = 8192
"""Length of the sequence whose bytes are counted."""
CALIBRATED = (AATC, KVTC, PALU, KVQuant)


def plan_for(
    line: str,
    model: Any,
    rows: Sequence[torch.Tensor],
    *,
    resume: Path | None = None,
    allocation: str = "sensitivity",
    progress: bool = False,
) -> kvrs.Plan:
    """Return the plan of a specification, calibrated if its codecs need data.

    Parameters
    ----------
    line : str
        As `spec.plan_from_spec` takes it.
    model : PreTrainedModel
        In evaluation mode.
    rows : sequence of Tensor
        Calibration texts.
    resume, allocation, progress
        As for `kvrs.calibrate`.
    """
    if line.endswith(spec.PLAN_FILE_ENDING):
        return spec.plan_from_spec(line, model)
    settings = spec.parse_settings(line)
    if not any(isinstance(settings[side], CALIBRATED) for side in ("keys", "values")):
        return spec.plan_from_spec(line, model)
    from kvrs.calibration import calibrate

    settings.pop("offset", None)
    return calibrate(model, rows, resume=resume, allocation=allocation, progress=progress, **settings)


def evaluate(
    model: Any,
    model_name: str,
    lines: Sequence[str],
    rows: Sequence[torch.Tensor],
    documents: dict[str, list[int]],
    record: Record,
    *,
    resume: Path | None = None,
    allocation: str = "sensitivity",
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return one row a plan.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    model_name : str
        Stands in the result and tells results of different models apart.
    lines : sequence of str
        Specifications of plans.
    rows : sequence of Tensor
        Calibration texts.
    documents : dict of str to list of int
        Evaluation texts by name.
    record : Record
        Where finished parts are kept and looked up.
    resume, allocation
        As for `kvrs.calibrate`.
    advance : callable
        Told the number of tokens done.

    Returns
    -------
    dict
        ``rows`` with ``spec``, ``method``, ``perplexity`` and ``ratio`` by text, their geometric mean
        ``mean_ratio``, ``bits_per_element``, ``bytes`` and ``compression`` of a sequence of 8192 tokens,
        everything counted, and the plan's ``constants``.
    """
    found = []
    for line in lines:
        plan = plan_for(line, model, rows, resume=resume, allocation=allocation)
        result = perplexity.evaluate(model, model_name, plan, documents, record, advance)
        memory = plan.memory(tokens=TOKENS)
        logs = [math.log(ratio) for ratio in result["ratio"].values()]
        found.append(
            {
                "spec": line,
                "method": plan.keys[0].name,
                "plan": plan.hash,
                "perplexity": result["kvrs"]["perplexity"],
                "exact": result["exact"]["perplexity"],
                "ratio": result["ratio"],
                "mean_ratio": math.exp(sum(logs) / len(logs)),
                "bits_per_element": memory.bits_per_element,
                "bytes": memory.bytes_total,
                "compression": memory.ratio,
                "constants": memory.bytes_constants,
            }
        )
    return {
        "task": "rate-distortion",
        "model": model_name,
        "dtype": str(model.dtype),
        "rows": found,
        "texts": {name: len(ids) for name, ids in documents.items()},
        "tokens": TOKENS,
        "versions": versions(),
    }


def table(result: dict[str, Any]) -> Table:
    """Return one line a plan."""
    shown = Table(title=f"rate and distortion, {result['model']}, bytes of {result['tokens']} tokens")
    headings = ("plan", *result["texts"], "mean ratio", "bits", "MiB", "smaller", "constants MiB")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "plan" else "right")
    for row in result["rows"]:
        shown.add_row(
            row["spec"],
            *(f"{row['ratio'][text]:.4f}" for text in result["texts"]),
            f"{row['mean_ratio']:.4f}",
            f"{row['bits_per_element']:.3f}",
            f"{row['bytes'] / 2**20:.2f}",
            f"{row['compression']:.2f}x",
            f"{row['constants'] / 2**20:.2f}",
        )
    return shown


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG: loss of perplexity against bits per element, one curve a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for method in sorted({row["method"] for row in result["rows"]}):
        rows = sorted(
            (row for row in result["rows"] if row["method"] == method),
            key=lambda row: row["bits_per_element"],
        )
        loss = [100 * (row["mean_ratio"] - 1) for row in rows]
        axes.plot([row["bits_per_element"] for row in rows], loss, marker="o", label=method)
    axes.set_yscale("symlog", linthresh=0.5)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"bits per element of {result['tokens']} tokens, everything counted")
    axes.set_ylabel("loss of perplexity in % (mean over texts)")
    axes.set_title(f"{result['model']}: rate and distortion")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
