"""Forks, cuts, removals and moves of rows, as a user of the store sees them."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import contents, make_store, tensors


def filled(codec: Any, tokens: int, rows: int = 1, **settings: Any) -> tuple[kvrs.KVStore, list[int]]:
    store = make_store(codec, **settings)
    seqs = store.new(rows)
    feed(store, seqs, tokens, 1)
    return store, seqs


def feed(store: kvrs.KVStore, seqs: list[int], tokens: int, seed: int) -> list[np.ndarray]:
    """Feed random tokens to both layers and return what `extend` gave."""
    rng, outs = np.random.default_rng(seed), []
    for layer in range(2):
        q, k, v = (tensors(rng, len(seqs), tokens, heads) for heads in (4, 2, 2))
        outs.append(np.asarray(store.extend(layer, q, k, v, seqs)))
    return outs


def held(store: kvrs.KVStore, seq: int) -> list[Any]:
    """Return all that one sequence holds."""
    found = contents(store, [seq])
    return [value for name, value in found.items() if name != "stats"]


def test_a_fork_and_its_parent_go_on_as_two_sequences_that_never_met(codec: Any) -> None:
    store, (parent,) = filled(codec, 203)
    child = store.fork(parent)
    assert held(store, child) == held(store, parent)
    outs = [feed(store, [seq], 50, seed) for seq, seed in ((parent, 2), (child, 3))]
    for seq, seed, out in ((parent, 2, outs[0]), (child, 3, outs[1])):
        alone, (one,) = filled(codec, 203)
        assert np.array_equal(feed(alone, [one], 50, seed), out)
        assert held(alone, one) == held(store, seq)
    store.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parents_and_forks_are_freed_in_any_order(order: tuple[int, ...]) -> None:
    store, (parent,) = filled(kvrs.TurboQuant(4), 203)
    seqs = [parent, store.fork(parent)]
    seqs.append(store.fork(seqs[1]))
    before = held(store, parent)
    for i, which in enumerate(order):
        store.free(seqs[which])
        assert all(held(store, seqs[left]) == before for left in order[i + 1 :])
        store.check()
    assert store.stats().bytes_total == 0
    with pytest.raises(kvrs.SequenceError):
        store.fork(parent)


def test_a_fork_costs_tables_only_and_shared_pages_count_once() -> None:
    store, (parent,) = filled(kvrs.TurboQuant(4), 1000)
    before = store.stats()
    for _ in range(5):
        store.fork(parent)
    after = store.stats()
    assert (after.bytes_codes, after.bytes_scales, after.bytes_window) == (
        before.bytes_codes,
        before.bytes_scales,
        before.bytes_window,
    )
    assert (after.pages_total, after.tokens_encoded) == (before.pages_total, before.tokens_encoded)
    assert after.bytes_total - before.bytes_total == after.bytes_tables - before.bytes_tables
    assert after.bytes_tables == 6 * before.bytes_tables
    assert after.tokens_kept == 6 * before.tokens_kept


def test_a_forked_prompt_is_open_in_both_and_each_ends_its_own() -> None:
    policy = kvrs.SnapKV(budget=64, window=8)
    store = make_store(kvrs.TurboQuant(4), evict=policy)
    (parent,) = store.new()
    store.begin_prompt(parent)
    feed(store, [parent], 150, 1)
    child = store.fork(parent)
    feed(store, [parent], 30, 2)
    feed(store, [child], 40, 3)
    store.end_prompt([parent, child])
    for seq, tokens, seed in ((parent, 30, 2), (child, 40, 3)):
        alone = make_store(kvrs.TurboQuant(4), evict=policy)
        (one,) = alone.new()
        alone.begin_prompt(one)
        feed(alone, [one], 150, 1)
        feed(alone, [one], tokens, seed)
        alone.end_prompt(one)
        assert held(alone, one) == held(store, seq)
    store.check()


def test_statistics_of_a_policy_go_with_the_fork() -> None:
    store = make_store(kvrs.TurboQuant(4), evict=kvrs.H2O(budget=64))
    (parent,) = store.new()
    feed(store, [parent], 150, 1)
    child = store.fork(parent)
    for i in range(40):
        feed(store, [parent], 1, 10 + i)
    for i in range(40):
        feed(store, [child], 1, 10 + i)
    assert held(store, parent) == held(store, child)


def test_reordered_rows_hold_what_their_sources_held(codec: Any) -> None:
    store, seqs = filled(codec, 120, rows=3)
    before = [held(store, seq) for seq in seqs]
    store.reorder(seqs, np.array([2, 0, 0]))
    assert [held(store, seq) for seq in seqs] == [before[2], before[0], before[0]]
    store.reorder(seqs, [0, 1, 2])
    assert [held(store, seq) for seq in seqs] == [before[2], before[0], before[0]]
    store.check()


def test_selected_rows_are_new_sequences_and_the_old_ones_are_gone() -> None:
    store, seqs = filled(kvrs.TurboQuant(4), 120, rows=3)
    before = [held(store, seq) for seq in seqs]
    new = store.select_rows(seqs, [1, 2, 1, 1])
    assert [held(store, seq) for seq in new] == [before[1], before[2], before[1], before[1]]
    assert not set(new) & set(seqs)
    with pytest.raises(kvrs.SequenceError):
        store.length(seqs[0])
    feed(store, new, 20, 5)
    store.check()


def test_a_cut_keeps_codes_bit_for_bit_and_the_next_group_starts_there(codec: Any) -> None:
    store, (seq,) = filled(codec, 300)
    k, v, _ = store.decode(0, seq, 0)
    for n in (298, 283, 150, 40, 1):
        store.truncate(seq, n)
        now = store.decode(0, seq, 0)
        assert store.length(seq) == n
        assert np.array_equal(now[0], k[:n])
        assert np.array_equal(now[1], v[:n])
        assert now[2].tolist() == list(range(n))
    feed(store, [seq], 60, 2)
    assert store.kept_positions(seq, 1, 1).tolist() == list(range(61))
    assert np.array_equal(store.decode(0, seq, 0)[0][:1], k[:1])
    store.check()


def test_removed_tokens_are_not_seen_and_positions_stay(codec: Any) -> None:
    store, (seq,) = filled(codec, 200)
    store.remove(seq, 0, 50)
    store.remove(seq, 120, 199)
    left = [*range(50, 120), 199]
    assert store.kept_positions(seq, 0, 0).tolist() == left
    assert store.length(seq) == 200
    feed(store, [seq], 40, 3)
    assert store.kept_positions(seq, 1, 1).tolist() == [*left, *range(200, 240)]
    store.truncate(seq, 130)
    assert store.kept_positions(seq, 0, 1).tolist() == list(range(50, 120))
    store.remove(seq, 130, 130)
    store.check()


BAD = {
    "fork": (lambda s, _: s.fork(99), kvrs.SequenceError, ["99"]),
    "fork_float": (lambda s, _: s.fork(1.0), TypeError, ["seq"]),
    "drop_negative": (lambda s, seqs: s.drop_last(seqs[0], -5), kvrs.ArgumentError, ["n ", "-5"]),
    "drop_more": (lambda s, seqs: s.drop_last(seqs[0], 61), kvrs.SequenceError, ["n ", "61", "60"]),
    "remove_negative": (lambda s, seqs: s.remove(seqs[0], -1, 3), kvrs.ArgumentError, ["start", "-1"]),
    "remove_beyond": (lambda s, seqs: s.remove(seqs[0], 0, 61), kvrs.SequenceError, ["stop", "61", "60"]),
    "remove_turned": (lambda s, seqs: s.remove(seqs[0], 4, 3), kvrs.SequenceError, ["start", "4", "3"]),
    "reorder_range": (lambda s, seqs: s.reorder(seqs, [0, 2]), kvrs.ArgumentError, ["index[1]", "2"]),
    "reorder_negative": (lambda s, seqs: s.reorder(seqs, [-1, 0]), kvrs.ArgumentError, ["index[0]", "-1"]),
    "reorder_short": (lambda s, seqs: s.reorder(seqs, [0]), kvrs.ShapeError, ["index", "2"]),
    "reorder_double": (lambda s, seqs: s.reorder([seqs[0]] * 2, [0, 1]), kvrs.SequenceError, ["twice"]),
    "reorder_float": (lambda s, seqs: s.reorder(seqs, [0.0, 1]), TypeError, ["index[0]"]),
    "reorder_text": (lambda s, seqs: s.reorder(seqs, "01"), TypeError, ["index"]),
    "select_range": (lambda s, seqs: s.select_rows(seqs, [5]), kvrs.ArgumentError, ["index[0]", "5"]),
    "select_dead": (lambda s, seqs: s.select_rows([*seqs, 99], [0]), kvrs.SequenceError, ["99"]),
    "snapshot": (lambda s, _: s.snapshot(99), kvrs.SequenceError, ["99"]),
    "new_from": (lambda s, seqs: s.new(from_=seqs), TypeError, ["from_"]),
    "publish_more": (lambda s, seqs: s.publish(seqs[0], [1] * 61), kvrs.SequenceError, ["token_ids", "61"]),
    "publish_text": (lambda s, seqs: s.publish(seqs[0], "abc"), TypeError, ["token_ids"]),
    "match_float": (lambda s, _: s.match([0.5]), TypeError, ["token_ids[0]"]),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_calls_name_the_argument_and_change_nothing(case: Any) -> None:
    call, error, parts = case
    store, seqs = filled(kvrs.TurboQuant(4), 60, rows=2)
    before = contents(store, seqs)
    with pytest.raises(error) as caught:
        call(store, seqs)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert contents(store, seqs) == before


def test_a_fork_that_does_not_fit_raises_and_changes_nothing() -> None:
    store = make_store(kvrs.TurboQuant(4), capacity="1MiB")
    seqs = store.new()
    feed(store, seqs, 500, 1)
    with pytest.raises(kvrs.CapacityError):
        seqs.extend(store.fork(seqs[0]) for _ in range(10_000))
    before = contents(store, seqs[:1])
    for call in (store.fork, store.snapshot, lambda seq: store.publish(seq, [1] * 500)):
        with pytest.raises(kvrs.CapacityError):
            call(seqs[0])
    assert contents(store, seqs[:1]) == before
