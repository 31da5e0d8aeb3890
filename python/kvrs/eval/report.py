"""Print results of evaluations as tables, and show how far a run has come."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
WIDTH = 120
"""Characters of a table that goes to a file."""
POLICY_MEASURES = ("ratio", "hits", "recall", "overlap", "mass", "key", "rows", "MiB")
"""Behind the perplexities: their mean ratio to the full cache's; hit rate; recall of and overlap with the
best set of the same size; share of later attention that was kept; passkeys found; bytes of rows to the full
cache's; the store."""


@contextmanager
def progress(label: str, tokens: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs.

    Parameters
    ----------
    label : str
        What is going on.
    tokens : int
        How many tokens there are to do.
    quiet : bool
        Show nothing.

    Yields
    ------
    callable
        To be told how many tokens were done.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task(label, total=tokens)
        yield lambda done: bar.advance(task, done)


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the table of one evaluation's result."""
    tables = {
        "perplexity": _perplexity,
        "passkey": _passkey,
        "generation": _generation,
        "policies": _policies,
    }
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(tables[result["task"]](result))


def mib(count: int) -> str:
    """Return a byte count in MiB, without the unit."""
    return f"{count / MIB:.2f}"


def _perplexity(result: dict[str, Any]) -> Table:
    table = _table(f"perplexity, {result['model']}", result)
    headings = (
        "text",
        "tokens",
        "exact",
        "kvrs",
        "ratio",
        "MiB exact",
        "MiB kvrs",
        "constants",
        "s exact",
        "s kvrs",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "text" else "right")
    exact, ours = result["exact"], result["kvrs"]
    for name, ratio in result["ratio"].items():
        table.add_row(
            name,
            str(result["tokens"][name]),
            f"{exact['perplexity'][name]:.3f}",
            f"{ours['perplexity'][name]:.3f}",
            f"{ratio:.4f}",
            mib(exact["bytes"][name]["total"]),
            mib(ours["bytes"][name]["total"]),
            mib(ours["bytes"][name]["constants"]),
            f"{exact['seconds'][name]:.1f}",
            f"{ours['seconds'][name]:.1f}",
        )
    return table


def _passkey(result: dict[str, Any]) -> Table:
    table = _table(f"passkey, {result['model']}, {result['length']} tokens", result)
    for heading in ("depth", "number", "exact", "kvrs"):
        table.add_column(heading, justify="right")
    exact, ours = result["exact"], result["kvrs"]
    for one, other in zip(exact["trials"], ours["trials"], strict=True):
        table.add_row(f"{one['depth']:.2f}", str(one["number"]), _verdict(one), _verdict(other))
    table.add_section()
    table.add_row("found", "", f"{exact['accuracy']:.0%}", f"{ours['accuracy']:.0%}")
    table.add_row("MiB", "", mib(exact["bytes"]["total"]), mib(ours["bytes"]["total"]))
    table.add_row("MiB constants", "", "", mib(ours["bytes"]["constants"]))
    table.add_row("seconds", "", f"{exact['seconds']:.1f}", f"{ours['seconds']:.1f}")
    return table


def _generation(result: dict[str, Any]) -> Table:
    table = _table(f"generate, {result['model']}, raw pages beside the rounded cache", result)
    for heading in ("prompts", "new tokens", "same tokens", "first logits differ by", "all by", "of up to"):
        table.add_column(heading, justify="right")
    for batch in result["batches"]:
        table.add_row(
            " ".join(map(str, batch["lengths"])),
            str(batch["new_tokens"]),
            "yes" if batch["equal_tokens"] else "no",
            f"{batch['first_logit_difference']:.1e}",
            f"{batch['largest_logit_difference']:.1e}",
            f"{batch['largest_logit']:.1f}",
        )
    return table


def _policies(result: dict[str, Any]) -> Table:
    texts = list(result["texts"])
    budget = next(
        (row["spec"].rpartition(":")[2].removeprefix("budget=") for row in result["rows"] if row["spec"]), ""
    )
    title = f"policies, {result['model']}, {budget} of prompts of {result['prompt']} tokens"
    table = _table(title, result)
    for heading in ("policy", *(Path(text).name for text in texts), *POLICY_MEASURES):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(row["policy"], *policy_cells(row, texts))
    return table


def policy_cells(row: dict[str, Any], texts: list[str]) -> list[str]:
    """Return what a row of the table of policies says, behind its name."""
    key = row["passkey"]
    return [
        *(f"{row['perplexity'][text]:.3f}" for text in texts),
        f"{row['mean_ratio']:.4f}",
        *("" if row[field] is None else f"{row[field]:.3f}" for field in ("hit_rate", "recall", "overlap")),
        f"{row['mass']:.3f}",
        f"{key['found']}/{key['of']}" if key["of"] else "",
        f"{row['bytes_ratio']:.3f}",
        mib(row["bytes"]["total"]),
    ]


def _verdict(result: dict[str, Any]) -> str:
    return "found" if result["found"] else f"{result['answer'].strip()!r}"


def _table(title: str, result: dict[str, Any]) -> Table:
    plan = result["plan"]
    caption = f"plan {plan.get('spec', '')} ({plan['hash'][:12]}), {result['dtype'].removeprefix('torch.')}"
    return Table(title=title, caption=caption)
