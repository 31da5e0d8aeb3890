"""Bytes: what `stats` counts, what a plan promises before, and what the process really holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kvrs
import numpy as np
import pytest

MIB = 2**20
LAST_CHUNK = 256 * 1024
TOKENS = 16384

# The shape of Qwen2.5-Coder-1.5B, and one layer of random tokens that serves all layers.
COMMON = """
import resource, sys
import numpy as np
import kvrs

def rss():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

def store_of(bits, layers=28, capacity=None):
    shape = kvrs.ModelShape(layers, query_heads=12, kv_heads=2, head_dim=128, rope=kvrs.Rope(1e6))
    plan = kvrs.Plan(shape, kvrs.TurboQuant(bits), kvrs.TurboQuant(bits))
    return kvrs.KVStore(plan, capacity=capacity)

rng = np.random.default_rng(0)
"""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc, which is not here"
)


def run(script: str) -> None:
    """Run a script in a process of its own, whose memory is the store's alone."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def qwen_plan(bits: float) -> kvrs.Plan:
    shape = kvrs.ModelShape(28, query_heads=12, kv_heads=2, head_dim=128, rope=kvrs.Rope(1e6))
    return kvrs.Plan(shape, kvrs.TurboQuant(bits), kvrs.TurboQuant(bits))


def fill(store: kvrs.KVStore, seqs: list[int], tokens: int) -> None:
    fields = store.plan.shape.spec()[0]
    shape = (len(seqs), fields["kv_heads"], tokens, fields["key_dim"])
    k = np.random.default_rng(3).standard_normal(shape, np.float32)
    for layer in range(store.plan.shape.layers):
        store.append(layer, k, k, seqs)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "share"), [(4, 0.30), (2, 0.17)])
def test_sixteen_thousand_tokens_of_qwen_take_their_share_of_the_16_bit_cache(
    bits: float, share: float
) -> None:
    plan = qwen_plan(bits)
    promised = plan.memory(TOKENS)
    store = kvrs.KVStore(plan)
    fill(store, store.new(), TOKENS)
    stats = store.stats()
    cache = 28 * 2 * TOKENS * (128 + 128) * 2
    assert promised.bytes_fp16 == cache
    assert stats.bytes_total <= share * cache
    assert abs(promised.bytes_total - stats.bytes_total) <= 0.03 * stats.bytes_total
    assert stats.bits_per_element == pytest.approx(8 * stats.bytes_total / (cache / 2))


@pytest.mark.parametrize("tokens", [0, 1, 5, 131, 132, 148, 1000, 5000])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sliding", [None, 100, 512])
def test_a_plan_knows_the_bytes_before_anything_is_run(tokens: int, batch: int, sliding: int | None) -> None:
    shape = kvrs.ModelShape(4, query_heads=4, kv_heads=2, head_dim=64, sliding=[sliding, None, sliding, None])
    plan = kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(3))
    store = kvrs.KVStore(plan)
    seqs = store.new(batch)
    if tokens:
        fill(store, seqs, tokens)
    promised, stats = plan.memory(tokens, batch), store.stats()
    assert promised.bytes_constants == stats.bytes_constants
    if sliding is None:
        for field in ("bytes_codes", "bytes_scales", "bytes_window", "bytes_tables"):
            assert getattr(promised, field) == getattr(stats, field), field
    # A call reserves its worst case first, so the last chunk may have been opened for pages that went back.
    assert abs(promised.bytes_total - stats.bytes_total) <= 0.03 * stats.bytes_total + LAST_CHUNK


@pytest.mark.parametrize("codec", [kvrs.Raw16(), kvrs.TurboQuant(2.5), kvrs.TurboQuant(8)], ids=str)
def test_the_parts_add_up_to_the_total_at_every_length(codec: kvrs.Raw16 | kvrs.TurboQuant) -> None:
    shape = kvrs.ModelShape(2, query_heads=4, kv_heads=2, head_dim=96, value_dim=64, sliding=[None, 300])
    store = kvrs.KVStore(kvrs.Plan(shape, codec, codec, sinks=4, recent=32))
    seqs = store.new(2)
    for tokens in (1, 3, 16, 17, 500, 1, 64):
        for layer in range(2):
            k = np.random.default_rng(tokens).standard_normal((2, 2, tokens, 96)).astype(np.float16)
            store.append(layer, k, k[..., :64], seqs)
        stats = store.stats()
        parts = ("codes", "scales", "window", "tables", "statistics", "slack")
        assert stats.bytes_total == sum(getattr(stats, f"bytes_{part}") for part in parts)
        for part in ("codes", "scales", "window"):
            layers = [getattr(layer, f"bytes_{part}") for layer in stats.per_layer]
            assert getattr(stats, f"bytes_{part}") == sum(layers)
        assert stats.bytes_slack <= 2 * MIB, "no more than a chunk and the tails of pages"


def test_capacity_is_a_hard_limit_at_each_step_and_nearly_all_of_it_is_used() -> None:
    shape = kvrs.ModelShape(3, query_heads=2, kv_heads=2, head_dim=64)
    capacity = 4 * MIB
    store = kvrs.KVStore(kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4)), capacity=capacity)
    seqs = store.new()
    k = np.random.default_rng(0).standard_normal((1, 2, 61, 64), np.float32)

    def step() -> None:
        for layer in range(3):
            store.append(layer, k, k, seqs)
            assert store.stats().bytes_total <= capacity == store.stats().bytes_capacity

    with pytest.raises(kvrs.CapacityError, match=str(capacity)):
        list(iter(step, "never"))
    stats = store.stats()
    assert stats.bytes_total > 0.9 * capacity - 256 * 1024
    # The tokens of each whole step are there in all layers: more than 2.5 times the limit in 16 bits.
    assert [store.length(seqs[0], layer) for layer in range(3)] == [store.length(seqs[0])] * 3
    assert 3 * 2 * store.length(seqs[0]) * 128 * 2 > 2.5 * capacity
    store.check()
    store.free(seqs[0])
    assert store.stats().bytes_total == 0
    seqs = store.new()
    for layer in range(3):
        store.append(layer, k, k, seqs)


@needs_proc
@pytest.mark.slow
def test_resident_memory_grows_by_the_counted_bytes_and_goes_back() -> None:
    run("""
MIB = 2**20
store = store_of(4)
seqs = store.new()
k = rng.standard_normal((1, 2, 16384, 128), dtype=np.float32)
q = rng.standard_normal((1, 12, 1, 128), dtype=np.float32)
store.append(0, k[:, :, :200], k[:, :, :200], seqs)     # threads and tables of the plan are there
store.truncate(seqs[0], 0)
before = rss()
for layer in range(28):
    store.append(layer, k, k, seqs)
stats, filled = store.stats(), rss()
print("filled", (filled - before) / MIB, "MiB resident,", stats)
assert filled - before <= stats.bytes_total + 32 * MIB
# What is counted is really there: pages are written, only slack may be untouched.
assert filled - before >= 0.95 * (stats.bytes_total - stats.bytes_slack)
for step in range(200):
    token = k[:, :, step:step + 1]
    for layer in range(28):
        if step % 40 == 0:
            store.extend(layer, q, token, token, seqs)
        else:
            store.append(layer, token, token, seqs)
    if step % 10 == 0:
        assert rss() - before <= store.stats().bytes_total + 32 * MIB, step
assert store.length(seqs[0]) == 16584
print("decoded", (rss() - before) / MIB, "MiB resident,", store.stats())
store.free(seqs[0])
assert store.stats().bytes_total == 0
assert rss() - before <= 32 * MIB, (rss() - before) / MIB
""")


@needs_proc
def test_two_hundred_rounds_of_create_use_drop_leave_memory_flat() -> None:
    run("""
k = rng.standard_normal((2, 2, 300, 128), dtype=np.float32)
q = rng.standard_normal((2, 12, 1, 128), dtype=np.float32)
kept = store_of(4, layers=2)
levels = []
for round in range(240):
    store = store_of(4, layers=2) if round % 2 else kept
    seqs = store.new(2)
    for layer in range(2):
        store.append(layer, k, k, seqs)
        store.extend(layer, q, k[:, :, :1], k[:, :, :1], seqs)
    if store is kept:
        for seq in seqs:
            store.free(seq)
    try:
        store.append(0, k, k, [seqs[0] + 10_000, seqs[1]])
    except kvrs.SequenceError:
        pass
    del store
    levels.append(rss())
flat = levels[40:]
print("resident", min(flat), "to", max(flat))
assert max(flat) - min(flat) <= 2**20, (min(flat), max(flat))
""")


@needs_proc
def test_stats_say_whether_the_system_gave_huge_pages() -> None:
    run("""
def huge():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("AnonHugePages"))

store = store_of(4, layers=4)
assert not store.stats().huge_pages, "nothing is stored"
k = rng.standard_normal((1, 2, 20_000, 128), dtype=np.float32)
(seq,) = store.new()
store.append(0, k[:, :, :1], k[:, :, :1], [seq])
assert not store.stats().huge_pages, "the first pages lie in small chunks"
before = huge()
for layer in range(4):
    new = k[:, :, int(layer == 0):]
    store.append(layer, new, new, [seq])
given, stats = huge() - before, store.stats()
print(given, stats.huge_pages, stats.bytes_total)
assert stats.huge_pages == (given > stats.bytes_total / 2)
store.free(seq)
assert not store.stats().huge_pages
""")
