"""Faults that users of compressed KV caches reported elsewhere: rings, crops, beams, and pages that are lost.

The oracles are those of `test_cases`: S is a fresh store that was fed exactly the tokens that ought to be
there.
"""

from __future__ import annotations

import random
from typing import Any

import kvrs
import numpy as np
import pytest
from test_cases import Floats, codes, normal, oracle_e, signatures, store_of

TQ4 = kvrs.TurboQuant(bits=4)


def marked(rng: np.random.Generator, marks: Floats, heads: int, tokens: int) -> tuple[Floats, Floats]:
    """Return random keys, and values that carry the signature of their row."""
    values = np.broadcast_to(marks[:, None, None, :], (len(marks), heads, tokens, marks.shape[1]))
    return normal(rng, len(marks), heads, tokens, marks.shape[1]), values.astype(np.float32)


def origins(out: Any, marks: Floats) -> Floats:
    """Return whose signature each output carries most."""
    return np.asarray((np.asarray(out) @ marks.T).argmax(-1))


# --- B14: a sliding window that wraps -------------------------------------------------------------


def numbered(first: int, count: int, dim: int = 64) -> Floats:
    """Return values 10.0, 10.1, ... of tokens `first` on, the same in every channel."""
    values = 10.0 + 0.1 * np.arange(first, first + count, dtype=np.float32)
    return (
        np.broadcast_to(values[None, None, :, None], (1, 1, count, dim)).astype(np.float16).astype(np.float32)
    )


def windowed(sliding: int) -> tuple[kvrs.KVStore, list[int]]:
    store = store_of((1, 1), 64, kvrs.Raw16(), fields={"sliding": sliding}, sinks=0, recent=0)
    return store, store.new()


def seen(store: kvrs.KVStore, seqs: list[int]) -> float:
    """Return the mean of the values that the newest query sees, as all keys are equal."""
    return float(np.asarray(store.attend(0, np.zeros((1, 1, 1, 64), np.float32), seqs)).mean())


@pytest.mark.parametrize("sizes", [[6, *([1] * 14)], [7], [6, 5], [2, 5, 13]])
@pytest.mark.parametrize("window", [4, 8])
def test_case_b14_a_sliding_window_holds_the_newest_tokens_in_order(sizes: list[int], window: int) -> None:
    store, seqs = windowed(window)
    length = 0
    for size in sizes:
        keys = np.zeros((1, 1, size, 64), np.float32)
        store.append(0, keys, numbered(length, size), seqs)
        length += size
        values = store.decode(0, seqs[0], 0)[1]
        newest = min(length, window)
        assert np.array_equal(values[-newest:], numbered(length - newest, newest)[0, 0])
        assert seen(store, seqs) == pytest.approx(float(numbered(length - newest, newest).mean()), abs=0.02)
        assert store.length(seqs[0]) == length


def test_case_b14_a_cut_of_a_wrapped_window_is_exact_or_raises() -> None:
    store, seqs = windowed(8)
    for index in range(20):
        store.append(0, np.zeros((1, 1, 1, 64), np.float32), numbered(index, 1), seqs)
    store.truncate(seqs[0], 15)
    assert seen(store, seqs) == pytest.approx(float(numbered(7, 8).mean()), abs=0.02)
    store.append(0, np.zeros((1, 1, 200, 64), np.float32), numbered(15, 200), seqs)
    before = codes(store, seqs[0])
    with pytest.raises(kvrs.SequenceError, match="behind its window"):
        store.truncate(seqs[0], 100)
    assert codes(store, seqs[0]) == before
    store.truncate(seqs[0], 215 - 64)
    assert seen(store, seqs) == pytest.approx(float(numbered(143, 8).mean()), abs=0.1)


# --- B15: the edges of a crop ---------------------------------------------------------------------

CROPS = {
    "truncate 0": (lambda s, q: s.truncate(q, 0), 0),
    "truncate 3": (lambda s, q: s.truncate(q, 3), 3),
    "truncate 5": (lambda s, q: s.truncate(q, 5), None),
    "truncate -1": (lambda s, q: s.truncate(q, -1), None),
    "drop 0": (lambda s, q: s.drop_last(q, 0), 3),
    "drop 3": (lambda s, q: s.drop_last(q, 3), 0),
    "drop 5": (lambda s, q: s.drop_last(q, 5), None),
    "drop -5": (lambda s, q: s.drop_last(q, -5), None),
}


@pytest.mark.parametrize("case", CROPS.values(), ids=CROPS)
@pytest.mark.parametrize("codec", [kvrs.Raw16(), TQ4], ids=str)
def test_case_b15_the_edges_of_a_crop(case: Any, codec: Any, rng: np.random.Generator) -> None:
    call, left = case
    k, v = normal(rng, 1, 1, 4, 64), normal(rng, 1, 1, 4, 64)
    store = store_of((1, 1), 64, codec, sinks=0, recent=0)
    (seq,) = store.new()
    store.append(0, k[:, :, :3], v[:, :, :3], seq)
    if left is None:
        with pytest.raises(kvrs.KVError):
            call(store, seq)
        left = 3
    else:
        call(store, seq)
    assert store.length(seq) == left
    store.append(0, k[:, :, 3:], v[:, :, 3:], seq)
    keys, _, positions = store.decode(0, seq, 0)
    assert positions.tolist() == [*range(left), left]
    assert np.array_equal(keys, np.concatenate([k[0, 0, :left], k[0, 0, 3:]]))
    store.check()


# --- B17: beams that change places ----------------------------------------------------------------


def beams(heads: tuple[int, int], tokens: int, rng: np.random.Generator) -> tuple[Any, list[int], Floats]:
    """Return a store with three rows, each with the signature of its own."""
    marks = signatures(rng, 3, 64)
    store = store_of(heads, 64, TQ4, sinks=0, recent=16)
    seqs = store.new(3)
    store.append(0, *marked(rng, marks, heads[1], tokens), seqs)
    return store, seqs, marks


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [200, 199, 208, 215])
def test_case_b17_beam_reorder(heads: tuple[int, int], tokens: int, rng: np.random.Generator) -> None:
    store, seqs, marks = beams(heads, tokens, rng)
    before, held = [codes(store, seq) for seq in seqs], store.stats()
    store.reorder(seqs, [2, 0, 0])
    assert [codes(store, seq) for seq in seqs] == [before[2], before[0], before[0]]
    assert store.stats().tokens_encoded == held.tokens_encoded
    k, v = marked(rng, marks[[2, 0, 0]], heads[1], 1)
    store.append(0, k, v, seqs)
    out = store.attend(0, normal(rng, 3, heads[0], 1, 64), seqs)
    assert (origins(out, marks)[..., 0] == np.array([2, 0, 0])[:, None]).all()
    # Three rows in the pages of two, and at most one raw and one packed page more for each row and head.
    stats = store.stats()
    raw, row = 16 * 256, heads[1] * 3
    rows = stats.bytes_codes + stats.bytes_scales + stats.bytes_window
    of_two = (held.bytes_codes + held.bytes_scales + held.bytes_window) * 2 / 3
    assert rows <= of_two + row * (raw + 64 * 68)
    store.check()


def test_case_b17_permutations_that_compose_to_the_identity_change_no_bit(rng: np.random.Generator) -> None:
    store, seqs, _ = beams((4, 2), 207, rng)
    before, place = [codes(store, seq) for seq in seqs], np.arange(3)
    for _ in range(50):
        index = rng.permutation(3)
        store.reorder(seqs, index)
        place = place[index]
    store.reorder(seqs, np.argsort(place))
    assert [codes(store, seq) for seq in seqs] == before


def test_case_b17_beams_go_on_as_rows_that_were_never_shared(rng: np.random.Generator) -> None:
    store, seqs, marks = beams((4, 2), 150, rng)
    fed = [[] for _ in range(3)]
    first = [store.decode(0, seq, 0) for seq in seqs]
    source = [0, 1, 2]
    for _ in range(60):
        index = rng.integers(0, 3, 3).tolist()
        store.reorder(seqs, index)
        fed, source = [list(fed[i]) for i in index], [source[i] for i in index]
        k, v = marked(rng, marks[source], 2, 1)
        store.append(0, k, v, seqs)
        for row in range(3):
            fed[row].append((k[row], v[row]))
    for row, seq in enumerate(seqs):
        k, v, positions = store.decode(0, seq, 0)
        assert positions.tolist() == list(range(210))
        assert np.array_equal(k[:128], first[source[row]][0][:128])
        newest = np.stack([pair[0][0, 0] for pair in fed[row]])[-16:]
        assert np.array_equal(k[-16:], newest)
        assert (origins(v, marks) == source[row]).all()
    store.check()


# --- B29: failed calls, double frees, leaks -------------------------------------------------------


def limited(heads: tuple[int, int], codec: Any, capacity: int, **settings: Any) -> kvrs.KVStore:
    return kvrs.KVStore(store_of(heads, 64, codec, **settings).plan, capacity=capacity)


def pages(store: kvrs.KVStore) -> int:
    stats = store.stats()
    return stats.pages_total - stats.pages_free


def test_case_b29_an_append_that_does_not_fit_loses_no_page(rng: np.random.Generator) -> None:
    k, v = normal(rng, 1, 1, 202, 64), normal(rng, 1, 1, 202, 64)
    # Ten raw pages of 16 tokens and their table entries.
    store = limited((1, 1), kvrs.Raw16(), 65536 + 10 * 160, sinks=0, recent=0)
    (seq,) = store.new()
    store.append(0, k[:, :, :90], v[:, :, :90], seq)
    held = pages(store)
    assert held == 6
    with pytest.raises(kvrs.CapacityError):
        store.append(0, k[:, :, 90:], v[:, :, 90:], seq)
    assert (store.length(seq), pages(store)) == (90, held)
    store.append(0, k[:, :, 90:154], v[:, :, 90:154], seq)
    assert (store.length(seq), pages(store)) == (154, 10)
    store.free(seq)
    assert store.stats().bytes_total == 0
    with pytest.raises(kvrs.SequenceError):
        store.free(seq)


class Played:
    """Eight sequences under random calls, and the values that each ought to hold."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.store = limited((2, 1), TQ4, capacity, sinks=2, recent=16)
        self.live: dict[int, list[int]] = {}
        self.refused = 0
        self.next = 0

    def step(self) -> None:
        """Make one random call."""
        if not self.live:
            self.live[self.store.new()[0]] = []
        seq = self.random.choice(list(self.live))
        calls = [self.append] * 5 + [self.fork] * 2 + [self.truncate, self.reorder, self.free]
        try:
            self.random.choice(calls)(seq)
        except kvrs.CapacityError:
            self.refused += 1

    def append(self, seq: int) -> None:
        count = self.random.choice([1, 2, 17, 64, 150])
        marks = list(range(self.next, self.next + count))
        values = np.asarray(marks, np.float32)[None, None, :, None] % 97 + 1
        k = self.rng.standard_normal((1, 1, count, 64)).astype(np.float32)
        self.store.append(0, k, np.broadcast_to(values, (1, 1, count, 64)), seq)
        self.live[seq] += marks
        self.next += count

    def fork(self, seq: int) -> None:
        if len(self.live) < 8:
            self.live[self.store.fork(seq)] = list(self.live[seq])

    def truncate(self, seq: int) -> None:
        n = self.random.randint(0, len(self.live[seq]))
        self.store.truncate(seq, n)
        del self.live[seq][n:]

    def reorder(self, _: int) -> None:
        seqs = list(self.live)
        index = [self.random.randrange(len(seqs)) for _ in seqs]
        self.store.reorder(seqs, index)
        marks = [list(self.live[seqs[i]]) for i in index]
        self.live = dict(zip(seqs, marks, strict=True))

    def free(self, seq: int) -> None:
        self.store.free(seq)
        del self.live[seq]

    def verify(self) -> None:
        """Compare what every sequence holds with what it ought to."""
        for seq, marks in self.live.items():
            values = self.store.decode(0, seq, 0)[1]
            want = np.asarray(marks, np.float32) % 97 + 1
            assert len(values) == len(marks) == self.store.length(seq)
            if marks:
                assert np.abs(values.mean(1) / want - 1).max() < 0.15


@pytest.mark.parametrize("seed", range(4))
def test_case_b29_random_calls_of_which_some_fail_leave_every_page_accounted_for(seed: int) -> None:
    played = Played(seed, capacity=192 << 10)
    for step in range(2500):
        played.step()
        if step % 100 == 0:
            played.store.check()
            played.verify()
    played.verify()
    assert played.refused > 20
    for seq in list(played.live):
        played.free(seq)
    played.store.check()
    assert played.store.stats().bytes_total == 0


# --- B31: a pool full of holes --------------------------------------------------------------------


def test_case_b31_every_second_sequence_freed_leaves_the_others_bit_identical(
    rng: np.random.Generator,
) -> None:
    store = store_of((2, 2), 112, TQ4, sinks=0, recent=0)
    seqs = store.new(16)
    store.append(0, normal(rng, 16, 2, 256, 112), normal(rng, 16, 2, 256, 112), seqs)
    k, v, q = normal(rng, 1, 2, 1280, 112), normal(rng, 1, 2, 1280, 112), normal(rng, 1, 2, 3, 112)
    (long,) = store.new()
    store.append(0, k, v, long)
    snapshot, alone = store.snapshot(long), codes(store, long)
    before = [codes(store, seq) for seq in seqs]
    for seq in [*seqs[::2], long]:
        store.free(seq)
    (again,) = store.new(from_=snapshot)
    assert codes(store, again) == alone
    (fresh,) = store.new()
    store.append(0, k, v, fresh)
    assert codes(store, fresh) == alone
    assert [codes(store, seq) for seq in seqs[1::2]] == before[1::2]
    got = np.asarray(store.attend(0, q, [again]))[0]
    assert np.linalg.norm(got - oracle_e(q[0], k[0], v[0])) <= 0.2 * np.linalg.norm(
        oracle_e(q[0], k[0], v[0])
    )
    store.check()
