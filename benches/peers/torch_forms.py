"""Torch's ways to attend over an uncompressed cache; which is fastest depends on the CPU and the length."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from benches.inputs import Case
from benches.peers.builder import Builder
from benches.timing import Form

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def typed(case: Case, dtype: torch.dtype) -> Case:
    """Return the case in bfloat16, as it is, or in float32."""
    return case.single if dtype == torch.float32 else case


def enable_gqa(case: Case, dtype: torch.dtype) -> Form:
    """Build the fused attention that is told of the query groups."""
    case = typed(case, dtype)
    step = partial(functional.scaled_dot_product_attention, case.q, case.k, case.v, enable_gqa=True)
    return Form("torch", f"SDPA enable_gqa {NAMES[dtype]}", step)


def grouped_q(case: Case, dtype: torch.dtype) -> Form:
    """Build the fused attention with a group's query heads as rows of one head."""
    case = typed(case, dtype)
    step = partial(functional.scaled_dot_product_attention, case.grouped_q, case.k, case.v)
    return Form("torch", f"SDPA grouped q {NAMES[dtype]}", step)


def query_first(case: Case, dtype: torch.dtype) -> Form:
    """Build ``softmax(q K^T) V`` of three calls."""
    case = typed(case, dtype)
    q, k, v = case.grouped_q[0], case.k[0], case.v[0]
    scaled, keys = q * q.shape[-1] ** -0.5, k.transpose(1, 2)

    def step() -> torch.Tensor:
        return torch.bmm(torch.bmm(scaled, keys).softmax(-1), v)

    return Form("torch", f"matmul q K' {NAMES[dtype]}", step)


def keys_first(case: Case, dtype: torch.dtype) -> Form:
    """Build ``V^T softmax(K q^T)`` of three calls: the long operand stands first."""
    case = typed(case, dtype)
    q, k, v = case.grouped_q[0], case.k[0], case.v[0]
    queries, values = (q * q.shape[-1] ** -0.5).transpose(1, 2), v.transpose(1, 2)

    def step() -> torch.Tensor:
        return torch.bmm(values, torch.bmm(k, queries).softmax(1)).transpose(1, 2)

    return Form("torch", f"matmul K q' {NAMES[dtype]}", step)


FORMS: dict[str, Builder] = {
    f"{label} {NAMES[dtype]}": partial(builder, dtype=dtype)
    for label, builder in (
        ("SDPA enable_gqa", enable_gqa),
        ("SDPA grouped q", grouped_q),
        ("matmul q K'", query_first),
        ("matmul K q'", keys_first),
    )
    for dtype in (torch.float32, torch.bfloat16)
}
