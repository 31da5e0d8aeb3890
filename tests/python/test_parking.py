"""Sequences parked in host memory: the store has their pages meanwhile, and they come back as they were."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import make_store, tensors
from test_save import feed, held


def filled(tokens: int, **settings: Any) -> tuple[kvrs.KVStore, int]:
    store = make_store(kvrs.TurboQuant(4), **settings)
    (seq,) = store.new()
    feed(store, seq, tokens, 1)
    return store, seq


@pytest.mark.parametrize("evict", [None, kvrs.SnapKV(160), kvrs.H2O(160)], ids=["all", "snapkv", "h2o"])
def test_a_parked_sequence_comes_back_and_goes_on_as_one_that_never_left(evict: Any) -> None:
    (store, seq), (other, same) = (filled(284, evict=evict) for _ in range(2))
    before = held(store, seq)
    total = store.stats().bytes_total
    store.to_host(seq)
    stats = store.stats()
    assert (stats.bytes_total, stats.sequences, store.length(seq)) == (0, 1, 284)
    assert 0 < stats.bytes_parked <= total
    assert "parked on the host" in repr(stats)
    assert store.stats().to_dict()["bytes_parked"] == stats.bytes_parked
    store.to_device([seq])
    assert store.stats().bytes_parked == 0
    assert "parked" not in repr(store.stats())
    np.testing.assert_equal(held(store, seq), before)
    np.testing.assert_array_equal(feed(store, seq, 40, 2), feed(other, same, 40, 2))
    np.testing.assert_equal(held(store, seq), held(other, same))


def test_what_needs_the_pages_names_the_sequence_and_what_brings_it_back(tmp_path: Path) -> None:
    store, seq = filled(100)
    store.to_host([seq])
    store.to_host([seq])
    rng = np.random.default_rng(1)
    q, k = tensors(rng, 1, 1, 4), tensors(rng, 1, 1, 2)
    for call in (
        lambda: store.attend(0, q, seq),
        lambda: store.append(0, k, k, seq),
        lambda: store.truncate(seq, 10),
        lambda: store.fork(seq),
        lambda: store.select_rows([seq], [0]),
        lambda: store.save(tmp_path / "cold", seq, "deflate"),
    ):
        with pytest.raises(kvrs.SequenceError, match=rf"^seq is {seq}, whose pages are parked .* to_device"):
            call()
    store.save(tmp_path / "warm", seq)
    again = store.load(tmp_path / "warm")
    store.to_device(seq)
    np.testing.assert_equal(held(store, seq), held(store, again))
    for wrong in (99, [seq, seq], "a"):
        with pytest.raises((kvrs.KVError, TypeError)):
            store.to_host(wrong)
    store.to_host([seq, again])
    store.free(again)
    store.reset()
    assert (store.stats().bytes_parked, store.stats().sequences) == (0, 0)


def test_tokens_that_another_thread_appends_meanwhile_are_stored_or_refused_and_never_lost() -> None:
    store, seq = filled(64)
    stop, counts = threading.Event(), {"stored": 0, "parked": 0}
    k = tensors(np.random.default_rng(2), 1, 1, 2)

    def append() -> None:
        while not stop.is_set():
            try:
                for layer in range(2):
                    store.append(layer, k, k, [seq])
            except kvrs.SequenceError:
                if store.length(seq, 0) > store.length(seq, 1):
                    raise AssertionError("a step was parked in its middle") from None
            else:
                counts["stored"] += 1

    thread = threading.Thread(target=append)
    thread.start()
    for _ in range(200):
        with contextlib.suppress(kvrs.SequenceError):  # In the middle of a step.
            store.to_host(seq)
            counts["parked"] += 1
        store.to_device(seq)
    stop.set()
    thread.join()
    store.check()
    assert counts["stored"] > 0
    assert counts["parked"] > 0
    assert store.length(seq) == 64 + counts["stored"]
