"""Bytes that eviction frees, and limits that it stays within."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import tensors
from evicting import RAW, SINKS, TQ4, Data, append, kept, make


def bytes_of(policy: Any, codec: Any, heads: tuple[int, int], tokens: int, layers: int = 1) -> kvrs.Stats:
    """Return the statistics of a store after a prompt, on layers of 128 channels."""
    query_heads, kv_heads = heads
    fields = {"layers": layers, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": 128}
    store = make(policy, codec, fields, sinks=4, recent=128)
    generator = np.random.default_rng(0)
    k = generator.standard_normal((1, kv_heads, tokens, 128)).astype(np.float16)
    q = generator.standard_normal((1, query_heads, tokens, 128)).astype(np.float16)
    seqs = store.new()
    for layer in range(layers):
        store.append(layer, k, k, seqs, q=q)
    store.check()
    return store.stats()


def test_the_bytes_of_a_prompt_that_snapkv_cuts_are_gone() -> None:
    """1024 of 8192 tokens on Qwen's heads."""
    full = bytes_of(None, RAW, (12, 2), 8192, layers=8)
    cut = bytes_of(kvrs.SnapKV(1024), RAW, (12, 2), 8192, layers=8)
    packed = bytes_of(kvrs.SnapKV(1024), TQ4, (12, 2), 8192, layers=8)
    exact = 8 * 8192 * 2 * 2 * 128 * 2
    assert cut.bytes_total <= 0.14 * full.bytes_total, (cut, full)
    assert packed.bytes_total <= 0.055 * exact, packed
    assert cut.tokens_kept == packed.tokens_kept == 8 * 2 * 1024
    assert packed.bytes_codes > 0


@pytest.mark.parametrize("heads", [(32, 8), (24, 4), (21, 3), (14, 2), (8, 1), (8, 8), (7, 1)])
def test_case_b10_bytes_follow_the_key_value_heads_alone(heads: tuple[int, int]) -> None:
    few = bytes_of(kvrs.SnapKV(256), RAW, heads, 1024)
    assert few.tokens_kept == heads[1] * 256
    assert few.bytes_window == heads[1] * 256 * 2 * 128 * 2


def test_case_b10_snapkv_1024_of_8192_takes_what_eight_heads_take() -> None:
    wide, narrow = (bytes_of(kvrs.SnapKV(1024), RAW, heads, 8192) for heads in ((32, 8), (8, 8)))
    assert wide.tokens_kept == narrow.tokens_kept == 8 * 1024
    assert wide.bytes_total == pytest.approx(narrow.bytes_total, rel=0.05)


def test_ragged_heads_take_the_pages_that_each_of_them_fills(rng: np.random.Generator) -> None:
    store, data = make(kvrs.AdaKV(kvrs.SnapKV(160, window=16)), TQ4), Data.random(rng, 1000)
    seqs = store.new()
    append(store, seqs, data)
    counts = np.array([[len(head) for head in layer] for layer in kept(store, seqs[0])])
    assert counts.sum() == 4 * 160
    assert (counts[:, 0] != counts[:, 1]).all(), "heads differ"
    packed = -(-(counts - SINKS - 16) // 64)
    codes = sum(layer.bytes_codes for layer in store.stats().per_layer)
    assert codes <= (packed + 1).sum() * 64 * 64
    store.check()


def test_case_b32_a_store_with_a_limit_stays_within_it_and_agrees_with_what_it_keeps(
    rng: np.random.Generator,
) -> None:
    limit = 8 << 20
    fields = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 128}
    store = make(kvrs.StreamingLLM(1024), fields=fields, sinks=4, recent=64, capacity=limit)
    seqs = store.new()
    k = tensors(rng, 1, 512, dim=128)
    for _ in range(4 * limit // (2 * 2 * 512 * 2 * 128 * 2) + 1):
        for layer in range(2):
            store.append(layer, k, k, seqs)
        stats = store.stats()
        assert stats.bytes_total <= limit
        positions = store.kept_positions(seqs[0], 1, 1)
        assert len(positions) <= 1024 + 15
        assert stats.tokens_kept == sum(len(head) for layer in kept(store, seqs[0]) for head in layer)
    assert store.length(seqs[0]) > 15_000
    assert positions[:4].tolist() == [0, 1, 2, 3]
    assert positions[4] > store.length(seqs[0]) - 1100


def test_case_b32_a_prompt_beyond_the_limit_is_an_error_and_changes_nothing(rng: np.random.Generator) -> None:
    store = make(kvrs.SnapKV(256), capacity=1 << 20, recent=64)
    seqs = store.new()
    data = Data.random(rng, 4096)
    with pytest.raises(kvrs.CapacityError):
        append(store, seqs, data)
    assert store.length(seqs[0]) == 0
    append(store, seqs, data.part(0, 512))
    assert len(store.kept_positions(seqs[0], 0, 0)) == 256
    assert store.stats().bytes_total <= 1 << 20


@pytest.mark.slow
def test_case_b32_snapkv_holds_its_budget_and_says_what_decoding_adds(rng: np.random.Generator) -> None:
    """SnapKV acts on the prompt alone; every later token stays."""
    store = make(kvrs.SnapKV(1024), TQ4, {"layers": 1}, sinks=4, recent=64)
    seqs = store.new()
    data = Data.random(rng, 2048, layers=1)
    append(store, seqs, data)
    prompt = len(store.kept_positions(seqs[0], 0, 0))
    for start in range(0, 4000, 500):
        append(store, seqs, data.part(start % 1500, start % 1500 + 500))
    positions = store.kept_positions(seqs[0], 0, 0)
    assert (prompt, len(positions)) == (1024, 1024 + 4000)
    assert positions[-4000:].tolist() == list(range(2048, 6048))


def test_case_b49_a_window_of_queries_scores_a_long_prompt_without_a_matrix(rng: np.random.Generator) -> None:
    """What is kept of queries and sums for a prompt is linear in it, far below the prompt's own rows."""
    store = make(kvrs.SnapKV(256), fields={"layers": 1, "query_heads": 8}, recent=64)
    seqs = store.new()
    k = rng.standard_normal((1, 2, 8192, 64)).astype(np.float16)
    q = rng.standard_normal((1, 8, 8192, 64)).astype(np.float16)
    store.begin_prompt(seqs)
    store.append(0, k, k, seqs, q=q)
    stats = store.stats()
    assert 0 < stats.bytes_statistics <= 32 * 8 * 64 * 4 + 4 * 2 * 8192
    store.end_prompt(seqs)
    stats = store.stats()
    assert stats.bytes_statistics <= 4096
    assert stats.bytes_window == 2 * 256 * 2 * 64 * 2
