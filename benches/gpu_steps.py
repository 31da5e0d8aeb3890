"""What ``benches.gpu_check`` times on a GPU, and how."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import kvrs
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benches import roofline
from benches.roofline import DIM, KV_HEADS, QUERY_HEADS

CHUNK = 4096
"""Tokens of one append while a store is filled."""


def median_ms(step: Callable[[], object], calls: int = 30) -> float:
    """Return the median time of a call on the device in milliseconds."""
    for _ in range(3):
        step()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for start, end in marks:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def replayed(step: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """Return the step as a CUDA graph, as engines run it, and whether it can be one; else the step itself."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except (kvrs.KVError, RuntimeError):
        return step, False
    return graph.replay, True


def copy_bandwidth(count: int = 1 << 30) -> float:
    """Return the bytes per second, read and written, of a copy on the device."""
    source = torch.empty(count, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * count / (median_ms(lambda: target.copy_(source)) / 1e3)


def fits(tokens: int, batch: int, free: int) -> bool:
    """Return whether keys and values of a case, in 16 bits and twice, fit into free memory."""
    return 2 * batch * tokens * KV_HEADS * DIM * 2 * 2 < free


def tensors(tokens: int, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q ``[B, Hq, 1, D]`` and k, v ``[B, Hkv, T, D]`` in bfloat16, the same ones at every call."""
    random = torch.Generator("cuda").manual_seed(tokens + batch)
    options: dict[str, Any] = {"generator": random, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, QUERY_HEADS, 1, DIM, **options)
    k, v = (torch.randn(batch, KV_HEADS, tokens, DIM, **options) for _ in range(2))
    return q, k, v


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention by torch's flash kernel, which splits the keys for a single query."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def flashinfer_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """Return FlashInfer's decode over pages of 16 tokens; it must be installed."""
    import flashinfer

    batch, page = q.shape[0], 16
    pages = k.shape[2] // page
    by_page = [x.transpose(1, 2).reshape(batch * pages, page, KV_HEADS, DIM).contiguous() for x in (k, v)]
    index = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((batch,), page, dtype=torch.int32, device="cuda")
    space = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
    heads = (QUERY_HEADS, KV_HEADS, DIM, page)
    decode.plan(starts, index, last, *heads, q_data_type=q.dtype, kv_data_type=k.dtype)
    rows = q.squeeze(2).contiguous()
    return lambda: decode.run(rows, tuple(by_page)).unsqueeze(2)


def filled(bits: int, k: torch.Tensor, v: torch.Tensor) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store on the device with one sequence a row."""
    store = kvrs.KVStore(roofline.plan(kvrs.TurboQuant(bits)), device="cuda:0")
    seqs = store.new(k.shape[0])
    for start in range(0, k.shape[2], CHUNK):
        store.append(0, k[:, :, start : start + CHUNK], v[:, :, start : start + CHUNK], seqs)
    return store, seqs


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative error of an output."""
    return float((out.float() - truth).norm() / truth.norm())


def append_rates() -> dict[str, Any]:
    """Return tokens per second of appends: long prompts, and one token a sequence of 64."""
    rates: dict[str, Any] = {}
    for name, tokens, batch in (("prompt", 8192, 1), ("decode", 1, 64)):
        _, k, v = tensors(tokens, batch)
        store = kvrs.KVStore(roofline.plan(kvrs.TurboQuant(4)), device="cuda:0")
        seqs = store.new(batch)
        ms = median_ms(partial(store.append, 0, k, v, seqs))
        rates[name] = tokens * batch / (ms / 1e3)
    return rates


def generation(new_tokens: int = 64) -> dict[str, Any]:
    """Return tokens per second of `generate` on Gemma by kvrs and by transformers' own cache."""
    from kvrs.eval import models
    from kvrs.hf import KVCache

    if not models.is_ready("gemma"):
        return {"ran": False, "why": f"{models.model_folder('gemma')} holds no model"}
    model, tokenizer = models.load("gemma", "bfloat16", quiet=True)
    model = model.cuda()
    inputs = tokenizer("The history of the lighthouse begins", return_tensors="pt").to("cuda")
    row: dict[str, Any] = {"ran": True}
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    for name in ("transformers", "kvrs"):
        seconds = []
        for _ in range(2):
            cache = {"past_key_values": KVCache(model, gemma_plan(model))} if name == "kvrs" else {}
            start = time.perf_counter()
            model.generate(**inputs, **cache, **options)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        row[name] = new_tokens / min(seconds)
    return row


def gemma_plan(model: Any) -> kvrs.Plan:
    """Return the plan of the generation: 4 bits."""
    return kvrs.Plan.for_model(model, keys=kvrs.TurboQuant(4), values=kvrs.TurboQuant(4))
