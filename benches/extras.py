"""What one decode step does not show: chunks, batches, encoding, and the price of a call from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import kvrs
import torch

from benches import inputs
from benches.inputs import DIM, KV_HEADS, QUERY_HEADS, Case
from benches.peers import store as stores
from benches.timing import Form, Times, measure

BITS = 4
CHUNK_ROWS = 16
RAGGED_EIGHTHS = (8, 7, 5, 4, 3, 2, 1, 0.5)
"""Lengths of the batch's rows in eighths of the longest; each is made odd, so that no tail is a round one."""


def _random(heads: int, tokens: int) -> torch.Tensor:
    """Return ``[1, heads, tokens, D]`` in bfloat16."""
    return torch.randn(1, heads, tokens, DIM, generator=torch.Generator().manual_seed(heads)).bfloat16()


def extend(case: Case, rows: int) -> Form:
    """Build a step that takes some tokens at once; afterwards the sequence is cut back to its length."""
    store, seqs = stores.filled(case, kvrs.TurboQuant(bits=BITS))
    q, k = _random(QUERY_HEADS, rows), _random(KV_HEADS, rows)
    step = partial(store.extend, 0, q, k, k, seqs)
    return Form("kvrs", f"extend {rows}", step, partial(store.truncate, seqs[0], case.tokens))


def chunk(case: Case, seconds: float) -> dict[str, Any]:
    """Compare `extend` of a chunk with `extend` of one token."""
    times = measure([extend(case, 1), extend(case, CHUNK_ROWS)], seconds)
    one, many = times["extend 1"].median, times[f"extend {CHUNK_ROWS}"].median
    return _row(
        f"extend of {CHUNK_ROWS} rows / of one row", many / one, "x", f"{many:.3f} ms / {one:.3f} ms", times
    )


def ragged_lengths(tokens: int) -> list[int]:
    """Return the lengths of the rows of the batch."""
    return [max(1, int(tokens * eighths / 8)) | 1 for eighths in RAGGED_EIGHTHS]


def batch(case: Case, seconds: float) -> dict[str, Any]:
    """Compare one call for rows of unequal lengths with one call for each of them."""
    store = kvrs.KVStore(stores.plan(case, kvrs.TurboQuant(bits=BITS)))
    lengths = ragged_lengths(case.tokens - 1)
    seqs = store.new(len(lengths))
    for seq, length in zip(seqs, lengths, strict=True):
        store.append(0, case.k[:, :, :length], case.v[:, :, :length], [seq])
    q = case.q.expand(len(seqs), -1, -1, -1).contiguous()

    def one_by_one() -> None:
        for row, seq in enumerate(seqs):
            store.attend(0, q[row : row + 1], [seq])

    forms = [Form("kvrs", "batch", partial(store.attend, 0, q, seqs)), Form("kvrs", "rows", one_by_one)]
    times = measure(forms, seconds)
    whole, rows = times["batch"].median, times["rows"].median
    detail = f"{whole:.3f} ms / {rows:.3f} ms; lengths {min(lengths)} to {max(lengths)}"
    return _row(f"batch of {len(seqs)} ragged rows / its rows", whole / rows, "x", detail, times)


def encode(case: Case, seconds: float) -> dict[str, Any]:
    """Measure the encoding of a prompt: every key and every value of a head is one vector."""
    store = kvrs.KVStore(stores.plan(case, kvrs.TurboQuant(bits=BITS)))
    seqs: list[int] = store.new()

    def renew() -> None:
        store.free(seqs.pop())
        seqs.extend(store.new())

    step = partial(store.append, 0, case.k, case.v, seqs)
    times = measure([Form("kvrs", "append", step, renew)], seconds)
    vectors, ms = 2 * case.kv_heads * case.tokens, times["append"].median
    return _row(
        "append of a prompt", vectors / ms / 1e3, "Mvec/s", f"{vectors} vectors in {ms:.2f} ms", times
    )


def call(_case: Case, seconds: float) -> dict[str, Any]:
    """Measure `extend` of one token on a fresh sequence, where nearly all of the time is the call itself."""
    shape = kvrs.ModelShape(layers=1, query_heads=4, kv_heads=1, head_dim=DIM)
    codec = kvrs.TurboQuant(bits=BITS)
    store = kvrs.KVStore(kvrs.Plan(shape, keys=codec, values=codec))
    seqs, q, k = store.new(), _random(4, 1), _random(1, 1)

    def renew() -> None:
        store.free(seqs.pop())
        seqs.extend(store.new())

    times = measure([Form("kvrs", "call", partial(store.extend, 0, q, k, k, seqs), renew)], seconds)
    detail = "4 query heads, 1 KV head, empty sequence"
    return _row("extend of one token from Python", times["call"].median * 1e3, "us", detail, times)


def _row(name: str, value: float, unit: str, detail: str, times: dict[str, Times]) -> dict[str, Any]:
    """Return a row of the record."""
    summaries = {form: sample.summary() for form, sample in times.items()}
    return {"name": name, "value": value, "unit": unit, "detail": detail, "times": summaries}


ALL: tuple[Callable[[Case, float], dict[str, Any]], ...] = (chunk, batch, encode, call)


def measure_all(tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Return all rows at one length, with as many threads as are set.

    Parameters
    ----------
    tokens : int
        Length of the sequence, of the batch's longest row, and of the prompt.
    seconds : float
        For each form of each row.
    """
    case = inputs.make(tokens)
    return [extra(case, seconds) for extra in ALL]
