"""The record of a run of ``benches.decode``: plain JSON, and what tables and plots ask of it."""

from __future__ import annotations

from typing import Any

from benches.floor import floor_ms

Record = dict[str, Any]
"""``machine``; ``bandwidth`` in bytes per second by thread count; ``rows``, ``group_one`` (the same with as
many query heads as key-value heads) and ``extras``; ``families``: the family of each form in the order of the
table; ``missing``: why a form was not measured."""


def axis(record: Record, name: str) -> list[int]:
    """Return the values of ``"threads"`` or ``"tokens"`` in a record, ascending."""
    return sorted({row[name] for row in record["rows"]})


def forms(record: Record, family: str) -> list[str]:
    """Return the names of a family's forms, those that are missing on this machine included."""
    return [name for name, belongs in record["families"].items() if belongs == family]


def find(rows: list[Record], form: str, threads: int, tokens: int) -> Record | None:
    """Return one row, None if it was not measured."""
    wanted = {"form": form, "threads": threads, "tokens": tokens}
    return next((row for row in rows if wanted.items() <= row.items()), None)


def torch_best(rows: list[Record], threads: int, tokens: int) -> Record:
    """Return the row of torch's fastest form."""
    theirs = [
        row
        for row in rows
        if row["family"] == "torch" and (row["threads"], row["tokens"]) == (threads, tokens)
    ]
    return min(theirs, key=lambda row: row["median_ms"])


def speedup(rows: list[Record], row: Record) -> float:
    """Return how many times faster than torch's best a row is."""
    best = torch_best(rows, row["threads"], row["tokens"])["median_ms"]
    return float(best / row["median_ms"])


def floor_of(record: Record, row: Record) -> float:
    """Return the milliseconds that reading a row's bytes takes at the bandwidth of the run."""
    return floor_ms(row["read_bytes"], record["bandwidth"][str(row["threads"])])
