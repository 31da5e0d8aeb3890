"""Many threads on one store: the bits of serial runs, no lock-ups, and nobody waits who need not.

`KVRS_THREAD_SECONDS` says how long the mixed calls go on (5).
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import make_store, shape, tensors

TQ4 = kvrs.TurboQuant(4)
SECONDS = float(os.environ.get("KVRS_THREAD_SECONDS", "5"))
MOST = 5
"""Sequences of a player at a time."""


def digest(*parts: Any) -> str:
    """Return a hash of numbers and arrays."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(np.asarray(part).tobytes())
    return sha.hexdigest()


class Player:
    """Random calls on a store that others use too, on sequences of its own; each answer is remembered."""

    def __init__(self, store: kvrs.KVStore, shared: int, seed: int, folder: Path) -> None:
        self.store, self.shared, self.folder = store, shared, folder
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.seed, self.step_count = seed, 0
        self.seqs = store.new(2)
        self.answers: list[str] = []
        self.saved = 0

    def calls(self) -> list[Callable[[], str]]:
        """Return what may happen, the frequent more than once."""
        often = [self.extend, self.extend, self.append, self.attend, self.read_shared]
        rare = [self.fork, self.fork_shared, self.truncate, self.remove, self.reorder, self.select]
        files = [self.save, self.load, self.publish, self.free, self.thaw, self.look]
        return often * 4 + rare * 2 + files

    def step(self) -> None:
        self.answers.append(self.random.choice(self.calls())())
        self.step_count += 1

    def one(self) -> int:
        if not self.seqs:
            self.seqs = self.store.new(1)
        return self.random.choice(self.seqs)

    def tokens(self, seqs: list[int]) -> tuple[np.ndarray, ...]:
        count = self.random.choice([1, 1, 2, 17, 90])
        return tuple(tensors(self.rng, len(seqs), count, heads) for heads in (4, 2, 2))

    def extend(self) -> str:
        seqs = self.seqs or [self.one()]
        q, k, v = self.tokens(seqs)
        outs = [self.store.extend(layer, q, k, v, seqs) for layer in range(2)]
        self.shorten()
        return digest(*outs)

    def append(self) -> str:
        seq = self.one()
        q, k, v = self.tokens([seq])
        for layer in range(2):
            self.store.append(layer, k, v, seq, q=q)
        self.shorten()
        return digest(self.store.length(seq))

    def shorten(self) -> None:
        for seq in [seq for seq in self.seqs if self.store.length(seq) > 700]:
            self.store.truncate(seq, 100)

    def attend(self) -> str:
        seq, q = self.one(), tensors(self.rng, 1, 1, 4)
        if self.store.length(seq) == 0:
            return "empty"
        return digest(*(self.store.attend(layer, q, seq) for layer in range(2)))

    def read_shared(self) -> str:
        q = tensors(self.rng, 1, 3, 4)
        return digest(self.store.attend(1, q, self.shared), self.store.decode(0, self.shared, 1)[0])

    def grown(self, seq: int) -> str:
        """Take in a new sequence, and let one go if there are too many."""
        self.seqs.append(seq)
        if len(self.seqs) > MOST:
            self.store.free(self.seqs.pop(0))
        return digest(*self.store.decode(1, seq, 0))

    def fork(self) -> str:
        return self.grown(self.store.fork(self.one()))

    def fork_shared(self) -> str:
        return self.grown(self.store.fork(self.shared))

    def thaw(self) -> str:
        return self.grown(self.store.new(from_=self.store.snapshot(self.one()))[0])

    def truncate(self) -> str:
        seq = self.one()
        self.store.truncate(seq, self.random.randint(0, self.store.length(seq)))
        return digest(*self.store.decode(0, seq, 1))

    def remove(self) -> str:
        seq = self.one()
        length = self.store.length(seq)
        start = self.random.randint(0, length)
        self.store.remove(seq, start, self.random.randint(start, length))
        return digest(self.store.kept_positions(seq, 1, 1))

    def reorder(self) -> str:
        self.one()
        index = [self.random.randrange(len(self.seqs)) for _ in self.seqs]
        self.store.reorder(self.seqs, index)
        return digest(*(self.store.length(seq) for seq in self.seqs))

    def select(self) -> str:
        self.one()
        index = [self.random.randrange(len(self.seqs)) for _ in range(self.random.randint(1, MOST))]
        self.seqs = self.store.select_rows(self.seqs, index)
        return digest(*(self.store.length(seq) for seq in self.seqs))

    def free(self) -> str:
        seq = self.one()
        self.seqs.remove(seq)
        self.store.free(seq)
        return "freed"

    def save(self) -> str:
        self.store.save(self.folder / "one", self.one(), self.random.choice([None, "deflate"]))
        self.saved += 1
        return digest(np.frombuffer((self.folder / "one").read_bytes(), np.uint8))

    def load(self) -> str:
        return self.grown(self.store.load(self.folder / "one")) if self.saved else "nothing"

    def publish(self) -> str:
        seq = self.one()
        ids = [self.seed * 1_000_003 + self.step_count * 1009 + i for i in range(self.store.length(seq))]
        published = self.store.publish(seq, ids)
        found = self.store.match(ids)
        return digest(published, found[1] if found else 0)

    def look(self) -> str:
        self.store.check()
        assert self.store.stats().bytes_total > 0
        return digest(*(self.store.length(seq) for seq in self.seqs))


def stage(seed: int = 0) -> tuple[kvrs.KVStore, int]:
    """Return a store with a sequence that all players read."""
    store, rng = make_store(TQ4), np.random.default_rng(seed)
    (shared,) = store.new()
    for layer in range(2):
        k = tensors(rng, 1, 300)
        store.append(layer, k, k, shared)
    return store, shared


def together(work: list[Callable[[], None]], patience: float) -> None:
    """Run calls in threads of their own; fail with the first error, or if one does not end."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in work]
    for thread in threads:
        thread.start()
    until = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the threads have locked each other up"


def test_two_threads_of_mixed_calls_answer_as_serial_runs_do(tmp_path: Path) -> None:
    store, shared = stage()
    players = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        players.append(Player(store, shared, seed, tmp_path / str(seed)))
    until = time.monotonic() + SECONDS

    def play(player: Player) -> None:
        while time.monotonic() < until:
            player.step()

    together([lambda p=p: play(p) for p in players], SECONDS + 120)
    print("calls of the two threads:", [player.step_count for player in players])
    store.check()
    for player in players:
        assert player.step_count > 20 * SECONDS
        alone, again = stage()
        folder = tmp_path / f"{player.seed}-alone"
        folder.mkdir()
        serial = Player(alone, again, player.seed, folder)
        for _ in range(player.step_count):
            serial.step()
        assert serial.answers == player.answers
    for player in players:
        for seq in player.seqs:
            store.free(seq)
    store.reset()
    assert store.stats().bytes_total == 0


def test_calls_on_one_sequence_come_one_after_the_other_and_never_mix() -> None:
    store = make_store(kvrs.Raw16(), fields={"layers": 1})
    (seq,) = store.new()
    rounds, tokens = 60, 7

    def feed(mark: int) -> None:
        x = np.full((1, 2, tokens, 64), mark, np.float32)
        for _ in range(rounds):
            store.append(0, x, x, seq)

    together([lambda m=m: feed(m) for m in (1, 2, 3)], 120)
    assert store.length(seq) == 3 * rounds * tokens
    marks = store.decode(0, seq, 0)[0].mean(1).reshape(-1, tokens)
    assert (marks == marks[:, :1]).all(), "the tokens of a call stand together"
    assert [int((marks[:, 0] == mark).sum()) for mark in (1, 2, 3)] == [rounds] * 3
    store.check()


def test_a_step_over_layers_from_two_threads_at_once_is_serialised_or_a_typed_error() -> None:
    store = make_store(TQ4)
    (seq,) = store.new()
    x = tensors(np.random.default_rng(4), 1, 5)
    refused = []

    def feed() -> None:
        for step in range(200):
            try:
                store.append(step % 2, x, x, seq)
            except kvrs.SequenceError as error:
                refused.append(error)
            except kvrs.CapacityError as error:
                refused.append(error)

    together([feed, feed], 120)
    store.check()
    store.truncate(seq, store.length(seq))
    lengths = [store.length(seq, layer) for layer in range(2)]
    assert lengths[0] == lengths[1]
    assert lengths[0] % 5 == 0
    print("refused", len(refused), "of 400 calls, length", lengths[0])


# --- nobody waits who need not ----------------------------------------------------------------------


class Ticker:
    """A Python thread that runs whenever it may, and knows the longest time that it could not."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        while not self.stop.is_set():
            self.ticks.append(time.perf_counter())
            time.sleep(0.0005)

    def gap(self, began: float, ended: float) -> float:
        """Return the longest time without a tick between two moments."""
        times = np.array([began, *(t for t in self.ticks if began < t < ended), ended])
        return float(np.diff(times).max())


@contextmanager
def ticking() -> Iterator[Ticker]:
    ticker = Ticker()
    ticker.thread.start()
    time.sleep(0.02)
    try:
        yield ticker
    finally:
        ticker.stop.set()
        ticker.thread.join()


class Long:
    """A store with long sequences, on which every call takes a while."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(5)
        fields = shape(layers=1, query_heads=8, kv_heads=4, head_dim=128)
        self.store = kvrs.KVStore(kvrs.Plan(fields, TQ4, TQ4))
        self.policy = kvrs.KVStore(kvrs.Plan(fields, TQ4, TQ4, evict=kvrs.SnapKV(1000)))
        self.k = rng.standard_normal((1, 4, 12_000, 128), np.float32).astype(np.float16)
        self.q = np.repeat(self.k, 2, axis=1)
        (self.seq,) = self.store.new()
        self.store.append(0, self.k, self.k, self.seq)
        self.path = folder / "long"
        self.store.save(self.path, self.seq)
        self.out = np.zeros((1, 4, 12_000, 128), np.float16)

    def evict(self) -> None:
        (seq,) = self.policy.new()
        self.policy.append(0, self.k, self.k, seq, q=self.q)
        self.policy.free(seq)

    def append(self) -> None:
        (seq,) = self.store.new()
        self.store.append(0, self.k, self.k, seq)
        self.store.free(seq)

    def extend(self) -> None:
        (seq,) = self.store.new()
        self.store.extend(0, self.q[:, :, :3000], self.k[:, :, :3000], self.k[:, :, :3000], seq)
        self.store.free(seq)

    def load(self) -> None:
        self.store.free(self.store.load(self.path))

    def repeated(self, name: str, *arguments: Any) -> None:
        for _ in range(20):
            getattr(self.store, name)(*arguments)

    def keep(self) -> None:
        (seq,) = self.store.new(from_=self.store.snapshot(self.seq))
        self.store.keep(seq, 0, [np.arange(0, 12_000, 2)] * 4)
        self.store.free(seq)


CALLS: dict[str, Callable[[Long], Any]] = {
    "append": Long.append,
    "append with a policy": Long.evict,
    "extend": Long.extend,
    "attend": lambda s: s.store.attend(0, s.q[:, :, :200], s.seq),
    "decode_into": lambda s: s.store.decode_into(0, s.seq, s.out, s.out.copy()),
    "decode": lambda s: [s.store.decode(0, s.seq, head) for head in range(4)],
    "save": lambda s: s.store.save(s.path, s.seq),
    "save deflated": lambda s: s.store.save(s.path.with_name("cold"), s.seq, "deflate"),
    "load": Long.load,
    "keep": Long.keep,
    "stats": lambda s: s.repeated("stats"),
    "check": lambda s: s.repeated("check"),
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Long:
    return Long(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("name", CALLS)
def test_other_python_threads_run_during_a_long_call(name: str, long: Long) -> None:
    """A call that held the interpreter's lock would leave no tick between its beginning and its end."""
    CALLS[name](long)
    threads = kvrs.get_num_threads()
    kvrs.set_num_threads(1)
    shares = []
    try:
        with ticking() as ticker:
            for _ in range(5):
                began = time.perf_counter()
                CALLS[name](long)
                ended = time.perf_counter()
                shares.append(ticker.gap(began, ended) / (ended - began))
    finally:
        kvrs.set_num_threads(threads)
    print(f"{name}: {1e3 * (ended - began):.1f} ms, longest wait {1e3 * shares[-1] * (ended - began):.1f} ms")
    assert min(shares) < 0.5 or ended - began < 0.004, f"others waited for {shares} of the call"


def test_a_call_that_waits_for_a_sequence_lets_other_python_threads_run(long: Long) -> None:
    """Both calls write the same sequence; a third thread ticks meanwhile."""
    store = long.store
    (seq,) = store.new()
    with ticking() as ticker:
        began = time.perf_counter()
        together([lambda: store.append(0, long.k, long.k, seq)] * 2, 120)
        ended = time.perf_counter()
    assert store.length(seq) == 24_000
    store.free(seq)
    assert ticker.gap(began, ended) < 0.5 * (ended - began)


@pytest.mark.parametrize("waiting", ["select_rows", "reorder", "fork", "truncate"])
def test_a_call_that_waits_for_a_sequence_keeps_no_other_sequence_waiting(waiting: str, long: Long) -> None:
    """One thread feeds a sequence for long, another waits for that sequence, a third works on others.

    An append checks its tensors before it takes the sequence, which it has in the second half of its time.
    """
    store = long.store
    busy, other = store.new(2)
    store.append(0, long.k[:, :, :50], long.k[:, :, :50], other)
    lots, feeding = np.concatenate([long.k] * 8, axis=2), threading.Event()
    calls = {
        "select_rows": lambda: store.select_rows([busy], [0, 0]),
        "reorder": lambda: store.reorder([busy], [0]),
        "fork": lambda: store.fork(busy),
        "truncate": lambda: store.truncate(busy, 0),
    }
    waits: list[float] = []
    began = time.perf_counter()
    store.append(0, lots, lots, busy)
    usual = time.perf_counter() - began
    store.truncate(busy, 0)

    def feed() -> None:
        feeding.set()
        with suppress(kvrs.SequenceError):  # The other thread may have been quicker.
            store.append(0, lots, lots, busy)

    def wait() -> None:
        feeding.wait()
        time.sleep(0.6 * usual)
        began = time.perf_counter()
        calls[waiting]()
        waits.append(time.perf_counter() - began)

    worst = [0.0]

    def work() -> None:
        feeding.wait()
        while not waits:
            began = time.perf_counter()
            store.free(store.fork(other))
            store.length(other)
            worst[0] = max(worst[0], time.perf_counter() - began)

    together([feed, wait, work], 120)
    print(f"{waiting} waited {1e3 * waits[0]:.1f} ms, others at most {1e3 * worst[0]:.1f} ms")
    if waits[0] > 0.1:
        assert worst[0] < 0.9 * waits[0]
