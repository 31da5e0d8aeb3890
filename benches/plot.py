"""One plot of a record of ``benches.decode``: milliseconds against tokens, a panel for each thread count."""

from __future__ import annotations

from typing import Any

from benches.record import Record, axis, find, floor_of, forms, torch_best

WIDTHS = {4: ("#08306b", "o"), 3: ("#2171b5", "s"), 2: ("#6baed6", "D")}
PEERS = {
    "SDPA enable_gqa bf16": ("#969696", "^", "torch SDPA, enable_gqa, bf16"),
    "DynamicCache bf16": ("#238b45", "s", "transformers DynamicCache"),
    "QuantizedCache quanto 4 bits": ("#74c476", "D", "transformers QuantizedCache, quanto 4"),
    "QuantizedCache hqq 4 bits": ("#a1d99b", "d", "transformers QuantizedCache, hqq 4"),
    "QuantizedCache fp8": ("#41ab5d", "v", "transformers QuantizedCache, fp8"),
    "ggml f16": ("#d94801", "P", "ggml flash attention, f16"),
    "ggml q8_0": ("#fd8d3c", "X", "ggml flash attention, q8_0"),
    "ggml q4_0": ("#fdbe85", "*", "ggml flash attention, q4_0"),
}


def figure(record: Record) -> Any:
    """Return a matplotlib figure; it needs no display.

    Parameters
    ----------
    record : dict
        See `benches.record`.
    """
    from matplotlib.figure import Figure

    counts = axis(record, "threads")
    plot = Figure(figsize=(5.2 * len(counts) + 0.8, 6.4), layout="constrained")
    panels = plot.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, threads in zip(panels, counts, strict=True):
        _panel(panel, record, threads)
    panels[0].set_ylabel("milliseconds, one layer")
    handles, labels = panels[0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    machine = record["machine"]
    title = f"One decode step: 32 query and 8 KV heads, d 128\n{machine['cpu']}, {machine['isa']} kernels"
    plot.suptitle(f"{title}, {machine['date']}", fontsize=11)
    return plot


def _panel(panel: Any, record: Record, threads: int) -> None:
    """Draw all lines of one thread count, the slowest first, as they stand in the legend."""
    lengths = axis(record, "tokens")
    for name, (colour, marker, label) in PEERS.items():
        _line(panel, record, name, threads, label, color=colour, marker=marker, lw=1, ms=5)
    best = [torch_best(record["rows"], threads, tokens)["median_ms"] for tokens in lengths]
    panel.plot(lengths, best, color="black", marker="o", lw=2, ms=5, label="torch's best")
    _line(panel, record, "kvrs raw16", threads, "kvrs, raw16", color="#9e9ac8", marker="o", lw=1.5, ms=4)
    for bits, (colour, marker) in WIDTHS.items():
        label = f"kvrs, {bits} bits"
        _line(panel, record, f"kvrs {bits} bits", threads, label, color=colour, marker=marker, lw=1.6, ms=5)
    _floor(panel, record, threads, lengths)
    _dress(panel, lengths, f"{threads} thread{'s' if threads > 1 else ''}")


def _line(panel: Any, record: Record, name: str, threads: int, label: str, **style: Any) -> None:
    """Draw one form, if it was measured."""
    rows = [find(record["rows"], name, threads, tokens) for tokens in axis(record, "tokens")]
    points = [(row["tokens"], row["median_ms"]) for row in rows if row is not None]
    if points:
        panel.plot(*zip(*points, strict=True), label=label, **style)


def _floor(panel: Any, record: Record, threads: int, lengths: list[int]) -> None:
    """Draw the time that the mere reading of the 4-bit store takes."""
    name = "kvrs 4 bits"
    if name not in forms(record, "kvrs"):
        return
    rows = [find(record["rows"], name, threads, tokens) for tokens in lengths]
    points = [(row["tokens"], floor_of(record, row)) for row in rows if row is not None]
    panel.plot(*zip(*points, strict=True), color="#cb181d", ls="--", lw=1.5, label="memory floor, 4 bits")


def _dress(panel: Any, lengths: list[int], title: str) -> None:
    """Set scales, ticks and grid."""
    panel.set(xscale="log", yscale="log", xlabel="tokens", title=title)
    panel.set_xticks(lengths, [str(tokens) for tokens in lengths])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.grid(True, which="major", color="#e0e0e0", lw=0.8)
    panel.spines[["top", "right"]].set_visible(False)
