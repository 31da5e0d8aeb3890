"""kvrs: attention on the packed bytes of a store."""

from __future__ import annotations

from functools import partial

import kvrs
import torch
from kvrs.codecs import Codec

from benches.inputs import Case
from benches.peers.builder import Builder
from benches.timing import Form

WIDTHS = (4, 3, 2)


def plan(case: Case, codec: Codec) -> kvrs.Plan:
    """Return a plan of one layer of the case's shape with the default window of 4 + 128 tokens."""
    shape = kvrs.ModelShape(
        layers=1, query_heads=case.query_heads, kv_heads=case.kv_heads, head_dim=case.q.shape[3]
    )
    return kvrs.Plan(shape, keys=codec, values=codec)


def filled(case: Case, codec: Codec) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store with the case's keys and values in one sequence."""
    store = kvrs.KVStore(plan(case, codec))
    seqs = store.new()
    store.append(0, case.k, case.v, seqs)
    return store, seqs


def read_bytes(store: kvrs.KVStore) -> int:
    """Return the bytes that one attention over everything reads: codes, scales and 16-bit rows."""
    stats = store.stats()
    return stats.bytes_codes + stats.bytes_scales + stats.bytes_window


def attend(case: Case, codec: Codec, name: str, tolerance: float) -> Form:
    """Build the attention of one query a head over a store."""
    store, seqs = filled(case, codec)
    out = torch.empty_like(case.q)
    step = partial(store.attend, 0, case.q, seqs, out=out)
    facts = {"read_bytes": read_bytes(store), "huge_pages": store.stats().huge_pages}
    return Form("kvrs", name, step, tolerance=tolerance, facts=facts)


def packed(case: Case, bits: int) -> Form:
    """Build `attend` with keys and values of some bits; the error allowed is three steps of the codebook."""
    return attend(case, kvrs.TurboQuant(bits=bits), f"kvrs {bits} bits", 3 * 2.0**-bits)


def raw16(case: Case) -> Form:
    """Build `attend` with everything kept as it came."""
    return attend(case, kvrs.Raw16(), "kvrs raw16", 0.02)


FORMS: dict[str, Builder] = {
    "kvrs raw16": raw16,
    **{f"kvrs {bits} bits": partial(packed, bits=bits) for bits in WIDTHS},
}
