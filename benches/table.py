"""Tables of a record of ``benches.decode``, narrow enough for a terminal of 110 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from benches.record import Record, axis, find, floor_of, forms, speedup, torch_best


def number(ms: float) -> str:
    """Return milliseconds with three significant digits."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def main_table(record: Record, threads: int) -> Table:
    """Return all forms at all lengths with one thread count."""
    table = Table(
        title=f"one decode step, {threads} thread{'s' if threads > 1 else ''}: median ms",
        caption=_caption(record, threads),
        caption_justify="left",
    )
    table.add_column("32 query, 8 KV heads, d 128; tokens", max_width=44)
    for tokens in axis(record, "tokens"):
        table.add_column(str(tokens), justify="right", min_width=8)
    for family in dict.fromkeys(record["families"].values()):
        _times(table, record, family, threads)
    _ratios(table, record, threads)
    _floors(table, record, threads)
    _group_one(table, record, threads)
    return table


def _caption(record: Record, threads: int) -> str:
    rate = record["bandwidth"][str(threads)] / 1e9
    text = f"memory floor: a store's bytes at {rate:.1f} GB/s, the fastest streaming read of this run"
    rows = [row for row in record["rows"] if row["threads"] == threads]
    huge = any(row.get("huge_pages") for row in rows)
    text += f"\nkvrs's memory lies on {'huge' if huge else 'small'} pages"
    if any(row["cut"] for row in rows):
        text += "\n~ called once: a call takes longer than the limit"
    return text


def _line(table: Table, record: Record, label: str, cell: Callable[[int], str], style: str = "") -> None:
    """Add one row with a cell for each length."""
    table.add_row(label, *(cell(tokens) for tokens in axis(record, "tokens")), style=style)


def _times(table: Table, record: Record, family: str, threads: int) -> None:
    """Add the median times of a family, and why some of its forms cannot run here."""
    rows = record["rows"]
    for name in forms(record, family):

        def cell(tokens: int, name: str = name) -> str:
            row = find(rows, name, threads, tokens)
            return "-" if row is None else ("~" if row["cut"] else "") + number(row["median_ms"])

        if name not in record["missing"]:
            _line(table, record, name, cell)
    for text in absences(record, family):
        table.add_row(text, style="dim")
    if family == "torch":
        best = _best(rows, threads)
        _line(table, record, "torch's best", lambda tokens: number(best(tokens)), "bold")
    table.add_section()


def absences(record: Record, family: str) -> list[str]:
    """Return why forms of a family were not measured, one line for each reason."""
    names = forms(record, family)
    missing = {name: reason for name, reason in record["missing"].items() if name in names}
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"{family if group == names else ', '.join(group)}: {reason}" for reason, group in by_reason.items()
    ]


def _best(rows: list[Record], threads: int) -> Callable[[int], float]:
    """Return torch's best median time by length."""
    return lambda tokens: float(torch_best(rows, threads, tokens)["median_ms"])


def _ratios(table: Table, record: Record, threads: int) -> None:
    """Add how many times faster than torch's best each width is."""
    rows = record["rows"]
    for name in forms(record, "kvrs"):

        def cell(tokens: int, name: str = name) -> str:
            row = find(rows, name, threads, tokens)
            return "-" if row is None else f"{speedup(rows, row):.2f}x"

        _line(table, record, f"torch's best / {name}", cell, "bold")
    table.add_section()


def _floors(table: Table, record: Record, threads: int) -> None:
    """Add each width's share of the memory floor; in cache it can pass 100 %."""
    for name in forms(record, "kvrs"):

        def cell(tokens: int, name: str = name) -> str:
            row = find(record["rows"], name, threads, tokens)
            return "-" if row is None else f"{floor_of(record, row) / row['median_ms']:.0%}"

        _line(table, record, f"memory floor / {name}", cell)
    table.add_section()


def _group_one(table: Table, record: Record, threads: int) -> None:
    """Add the same step with one query head for each key-value head."""
    rows = record["group_one"]
    names = sorted({row["form"] for row in rows if row["family"] == "kvrs"})
    if not names:
        return
    best = _best(rows, threads)
    _line(table, record, "8 query heads: torch's best", lambda tokens: number(best(tokens)))
    for name in names:
        mine = [find(rows, name, threads, tokens) for tokens in axis(record, "tokens")]
        times = [number(row["median_ms"]) if row else "-" for row in mine]
        ratios = [f"{speedup(rows, row):.2f}x" if row else "-" for row in mine]
        table.add_row(f"8 query heads: {name}", *times)
        table.add_row(f"8 query heads: torch's best / {name}", *ratios, style="bold")


def extras_table(record: Record) -> Table:
    """Return the measurements beside the decode step, one column for each thread count."""
    extras = record["extras"]
    counts = sorted({extra["threads"] for extra in extras})
    table = Table(title=f"beside it, 4 bits, {record['extras_tokens']} tokens")
    table.add_column("")
    for threads in counts:
        table.add_column(f"{threads} thread{'s' if threads > 1 else ''}", justify="right", no_wrap=True)
    table.add_column(f"with {counts[0]} thread{'s' if counts[0] > 1 else ''}", overflow="fold")
    for name in dict.fromkeys(extra["name"] for extra in extras):
        mine = {extra["threads"]: extra for extra in extras if extra["name"] == name}
        cells = [f"{mine[threads]['value']:.2f} {mine[threads]['unit']}" for threads in counts]
        table.add_row(name, *cells, mine[counts[0]]["detail"])
    return table
