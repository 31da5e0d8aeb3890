"""Snapshots, and published prefixes that are found by their token ids."""

from __future__ import annotations

import gc
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import make_store
from test_fork import feed, filled, held


def ids(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).tolist()


def test_a_snapshot_stays_as_it_was_and_sequences_start_from_it(codec: Any) -> None:
    store, (seq,) = filled(codec, 150)
    snapshot, before = store.snapshot(seq), held(store, seq)
    assert snapshot.length == 150
    assert repr(snapshot) == "Snapshot(length=150)"
    feed(store, [seq], 40, 2)
    after = held(store, seq)
    store.free(seq)
    new = store.new(3, from_=snapshot)
    assert all(held(store, one) == before for one in new)
    feed(store, new[:1], 40, 2)
    assert held(store, new[0]) == after
    assert held(store, new[2]) == before
    store.reset()
    assert store.stats().bytes_total > 0
    del snapshot
    gc.collect()
    assert store.stats().bytes_total == 0


def test_a_snapshot_of_another_store_is_refused() -> None:
    store, (seq,) = filled(kvrs.Raw16(), 20)
    with pytest.raises(kvrs.ArgumentError, match="from_ is a snapshot of another store"):
        make_store(kvrs.Raw16()).new(from_=store.snapshot(seq))


def test_whole_blocks_of_a_published_sequence_are_found_again() -> None:
    store, (seq,) = filled(kvrs.TurboQuant(4), 200)
    tokens = ids(0, 200)
    assert store.match(tokens) == (None, 0)
    assert store.publish(seq, tokens) == 192
    for asked, n in ((tokens, 192), (np.array(tokens[:150]), 128), ([*tokens[:70], 1], 64), (tokens[:63], 0)):
        snapshot, found = store.match(asked)
        assert found == n
        assert (snapshot is None) == (n == 0)
        assert snapshot is None or snapshot.length == n
    snapshot, _ = store.match(tokens[:130])
    (new,) = store.new(from_=snapshot)
    k, _, positions = store.decode(0, new, 1)
    assert positions.tolist() == list(range(128))
    assert np.array_equal(k, store.decode(0, seq, 1)[0][:128])
    assert store.match([tokens[0] + 1, *tokens[1:]]) == (None, 0)
    feed(store, [new], 50, 3)
    store.check()


def test_the_longest_of_several_prefixes_is_found() -> None:
    store, (seq,) = filled(kvrs.TurboQuant(4), 128)
    common, ends = ids(0, 64), [ids(1, 64), ids(2, 64)]
    for end in ends:
        (fork,) = store.new(from_=store.snapshot(seq))
        store.publish(fork, common + end)
    assert [store.match(common + end)[1] for end in [*ends, ids(3, 64)]] == [128, 128, 64]


def test_published_prefixes_make_way_for_new_pages_the_least_recently_used_first() -> None:
    store = make_store(kvrs.TurboQuant(4), capacity=2 << 20)
    for seed in range(40):
        (seq,) = store.new()
        feed(store, [seq], 192, seed)
        assert store.publish(seq, ids(seed, 192)) == 192
        store.free(seq)
        assert store.match(ids(0, 192))[1] == 192
        assert store.stats().bytes_total <= 2 << 20
    found = [store.match(ids(seed, 192))[1] > 0 for seed in range(40)]
    assert found[0]
    assert found[39]
    assert not found[1]
    store.check()
    store.reset()
    assert store.stats().bytes_total == 0


def test_a_sequence_made_from_a_prefix_keeps_it_when_the_prefix_is_given_up() -> None:
    store = make_store(kvrs.TurboQuant(4), capacity=2 << 20)
    (seq,) = store.new()
    feed(store, [seq], 192, 1)
    store.publish(seq, ids(0, 192))
    before = held(store, seq)
    store.free(seq)
    snapshot, _ = store.match(ids(0, 192))
    (kept,) = store.new(from_=snapshot)
    del snapshot
    with pytest.raises(kvrs.CapacityError):
        store.reserve(kept, 7_200)
    assert store.match(ids(0, 192)) == (None, 0)
    assert held(store, kept) == before


def test_what_a_policy_has_dropped_from_is_found_at_its_own_length_only() -> None:
    store = make_store(kvrs.TurboQuant(4), evict=kvrs.SnapKV(budget=64, window=8))
    (seq,) = store.new()
    feed(store, [seq], 192, 1)
    assert store.publish(seq, ids(0, 192)) == 192
    assert store.match(ids(0, 192))[1] == 192
    assert store.match(ids(0, 191)) == (None, 0)
