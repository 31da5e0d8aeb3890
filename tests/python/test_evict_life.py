"""The life of a store that evicts: resets, short prompts, reports, threads; and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import tensors
from evicting import BUDGET, POLICIES, PROMPT, RAW, SNAP, TQ4, Data, append, every_policy, kept, make, named
from kvrs.policies import base


def test_case_b19_a_second_prompt_after_a_reset_is_the_first_of_a_fresh_store(
    rng: np.random.Generator,
) -> None:
    first, second = Data.random(rng, 795), Data.random(rng, 797)
    policy = kvrs.SnapKV(204, window=16)

    def run(store: kvrs.KVStore, data: Data) -> tuple[list[Any], list[np.ndarray]]:
        seqs = store.new()
        append(store, seqs, data.part(0, data.tokens - 20), extend=True)
        counts = [len(head) for layer in kept(store, seqs[0]) for head in layer]
        assert counts == [204] * 4
        outs = []
        for i in range(data.tokens - 20, data.tokens):
            outs += append(store, seqs, data.part(i, i + 1), extend=True)
        return kept(store, seqs[0]), outs

    used = make(policy, TQ4)
    run(used, first)
    used.reset()
    assert used.stats().tokens_kept == 0
    again, fresh = run(used, second), run(make(policy, TQ4), second)
    assert again[0] == fresh[0]
    assert all(np.array_equal(a, b) for a, b in zip(again[1], fresh[1], strict=True))


@pytest.mark.parametrize("prompt", [0, 1, 2, 96])
@every_policy
def test_case_b45_a_prompt_within_the_budget_is_kept_in_order_and_the_store_says_so(
    policy: Any, prompt: int, rng: np.random.Generator
) -> None:
    policy = dataclasses.replace(policy, budget=BUDGET) if isinstance(policy, kvrs.SnapKV) else policy
    store, data = make(policy, TQ4), Data.random(rng, prompt)
    seqs = store.new()
    store.begin_prompt(seqs)
    if prompt:
        append(store, seqs, data)
    store.end_prompt(seqs)
    assert kept(store, seqs[0]) == [[list(range(prompt))] * 2] * 2
    if prompt and not isinstance(policy, kvrs.StreamingLLM):
        told = {stats.policy: stats for stats in store.stats().policies}[policy.name]
        assert (told.kept_all, told.evicted, told.tokens_evicted, told.waiting) == (2, 0, 0, 0)
    store.check()


def test_a_recent_window_longer_than_the_prompt_evicts_nothing(rng: np.random.Generator) -> None:
    store, data = make(kvrs.SnapKV(0.1), recent=64, sinks=4), Data.random(rng, 10)
    seqs = store.new()
    append(store, seqs, data)
    assert kept(store, seqs[0]) == [[list(range(10))] * 2] * 2


def test_a_report_says_what_each_head_keeps_and_by_whom(rng: np.random.Generator) -> None:
    store, data = make([SNAP, None]), Data.random(rng, PROMPT)
    seqs = store.new()
    assert [
        (head.layer, head.head, head.policy, head.budget) for head in store.selection_report(seqs[0])
    ] == [
        (0, 0, "snapkv", store.selection_report(seqs[0])[0].budget),
        (0, 1, "snapkv", store.selection_report(seqs[0])[1].budget),
        (1, 0, None, None),
        (1, 1, None, None),
    ]
    append(store, seqs, data)
    report = store.selection_report(seqs[0])
    assert [(head.kept, head.logical, head.budget) for head in report[:2]] == [(BUDGET, PROMPT, BUDGET)] * 2
    assert [(head.kept, head.logical) for head in report[2:]] == [(PROMPT, PROMPT)] * 2
    (stats,) = store.stats().policies
    assert (stats.policy, stats.evicted, stats.tokens_evicted) == ("snapkv", 1, 2 * (PROMPT - BUDGET))
    with pytest.raises(kvrs.SequenceError):
        store.selection_report(99)


def test_the_kept_sets_do_not_depend_on_the_number_of_threads(rng: np.random.Generator) -> None:
    data, threads, sets = Data.random(rng, PROMPT), kvrs.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            kvrs.set_num_threads(count)
            store = make(kvrs.CAOTE(kvrs.H2O(BUDGET)), TQ4)
            seqs = store.new()
            append(store, seqs, data)
            for i in range(20):
                append(store, seqs, data.part(i, i + 1))
            sets.append(kept(store, seqs[0]))
    finally:
        kvrs.set_num_threads(threads)
    assert sets[0] == sets[1] == sets[2]


# --- bad input ---------------------------------------------------------------------------------------


LOOKING = [policy for policy in POLICIES if base(policy).name in ("snapkv", "h2o", "tova", "scissorhands")]


@pytest.mark.parametrize("policy", LOOKING, ids=named)
def test_a_policy_that_needs_queries_names_them_when_there_are_none(
    policy: Any, rng: np.random.Generator
) -> None:
    store = make(policy)
    seqs, k = store.new(), tensors(rng, 1, 100)
    with pytest.raises(kvrs.ArgumentError, match=rf"q is None.*{policy.name}"):
        store.append(0, k, k, seqs)
    assert store.length(seqs[0], 0) == 0


def test_prompts_are_framed_once_and_closed_once(rng: np.random.Generator) -> None:
    store, data = make(SNAP, prompt_budget=200), Data.random(rng, PROMPT)
    seqs = store.new()
    with pytest.raises(kvrs.SequenceError, match="not open"):
        store.end_prompt(seqs)
    store.begin_prompt(seqs)
    with pytest.raises(kvrs.SequenceError, match="open"):
        store.begin_prompt(seqs)
    append(store, seqs, data.part(0, 150))
    with pytest.raises(kvrs.SequenceError, match=r"201.*prompt_budget = 200"):
        append(store, seqs, data.part(150, 201))
    assert store.length(seqs[0]) == 150
    append(store, seqs, data.part(150, 200))
    store.end_prompt(seqs)
    assert [len(head) for head in kept(store, seqs[0])[0]] == [BUDGET] * 2
    with pytest.raises(kvrs.SequenceError):
        store.begin_prompt([99])


@pytest.mark.parametrize("q", [(1, 4, 99, 64), (1, 2, 100, 64), (1, 4, 100, 32), (2, 4, 100, 64)])
def test_queries_of_another_shape_are_refused(q: tuple[int, ...], rng: np.random.Generator) -> None:
    store, k = make(SNAP), tensors(rng, 1, 100)
    seqs = store.new()
    with pytest.raises(kvrs.ShapeError, match="q has shape"):
        store.append(0, k, k, seqs, q=np.zeros(q, np.float32))
    assert store.length(seqs[0], 0) == 0


@pytest.mark.parametrize("policy", [kvrs.H2O(60), kvrs.SnapKV(60, window=16), kvrs.KNorm(60)], ids=named)
@pytest.mark.parametrize("codec", [RAW, TQ4], ids=["raw16", "4 bits"])
@pytest.mark.parametrize("gone", [(190, 193), (0, 1), (150, 199), (60, 120)])
def test_removed_tokens_keep_their_place_when_a_later_prompt_ends(
    rng: np.random.Generator, policy: Any, codec: Any, gone: tuple[int, int]
) -> None:
    store = make(policy, codec, recent=32)
    seqs = store.new()
    data = Data.random(rng, 320)

    def feed(first: int, last: int) -> None:
        part = data.part(first, last)
        for layer in range(2):
            q, k, v = (np.asarray(side[layer])[None] for side in (part.q, part.k, part.v))
            store.extend(layer, q, k, v, seqs)

    feed(0, 200)
    store.remove(seqs[0], *gone)
    store.begin_prompt(seqs)
    feed(200, 203)
    store.end_prompt(seqs)
    store.check()
    for t in range(203, 300):
        feed(t, t + 1)
    store.check()
    for head in range(2):
        positions = np.asarray(store.kept_positions(seqs[0], 0, head))
        assert not np.isin(np.arange(*gone), positions).any()
        assert np.isin(np.arange(300 - 32, 300), positions).all()
    store.free(seqs[0])
    assert store.stats().tokens_kept == 0
