"""What stores keep under policies, at the end of a prompt and after it: the sets of the float64 reference."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from evicting import (
    BUDGET,
    LATER,
    PROMPT,
    RAW,
    TQ4,
    Data,
    Watched,
    append,
    assert_reference,
    every_policy,
    kept,
    make,
    named,
    of_reference,
    references,
)
from test_fixtures import LAYERS


@every_policy
def test_a_prompt_keeps_what_the_reference_keeps(policy: Any, rng: np.random.Generator) -> None:
    store, data = make(policy), Data.random(rng, PROMPT)
    seqs = store.new()
    append(store, seqs, data)
    assert_reference(store, seqs[0], references(policy, data, PROMPT))
    sizes = [[len(head) for head in layer] for layer in kept(store, seqs[0])]
    if isinstance(policy, kvrs.StreamingLLM):
        return
    budget = 100 if isinstance(policy.__dict__.get("budget"), float) else BUDGET
    assert sum(map(sum, sizes)) == 4 * budget
    store.check()


@pytest.mark.parametrize("policy", LATER, ids=named)
def test_steps_after_a_prompt_keep_what_the_reference_keeps(policy: Any, rng: np.random.Generator) -> None:
    store, data = make(policy), Data.random(rng, PROMPT + 60)
    seqs = store.new()
    append(store, seqs, data.part(0, PROMPT))
    for i in range(PROMPT, data.tokens):
        append(store, seqs, data.part(i, i + 1), extend=i % 2 == 0)
    states = references(policy, data, PROMPT)
    assert_reference(store, seqs[0], states)
    store.check()


@pytest.mark.parametrize("codec", [RAW, TQ4, kvrs.TurboQuant(2.5)], ids=["raw16", "tq4", "tq2.5"])
@every_policy
def test_what_a_prompt_keeps_does_not_depend_on_the_codec(
    policy: Any, codec: Any, rng: np.random.Generator
) -> None:
    data = Data.random(rng, PROMPT)
    stores = [make(policy), make(policy, codec)]
    sets = []
    for store in stores:
        seqs = store.new()
        append(store, seqs, data)
        sets.append(kept(store, seqs[0]))
        store.check()
    assert sets[0] == sets[1]


@pytest.mark.parametrize("chunk", [1, 7, 64, 399])
@every_policy
def test_a_prompt_in_parts_keeps_what_it_keeps_in_one_call(
    policy: Any, chunk: int, rng: np.random.Generator
) -> None:
    data = Data.random(rng, PROMPT)
    store = make(policy, TQ4)
    whole, parts = store.new(2)
    append(store, [whole], data)
    store.begin_prompt([parts])
    for start in range(0, PROMPT, chunk):
        append(store, [parts], data.part(start, min(start + chunk, PROMPT)), extend=start % 2 == 0)
    if not isinstance(policy, kvrs.StreamingLLM):
        assert len(store.kept_positions(parts, 0, 0)) == PROMPT
        assert any(policy.name in line for line in store.stats().waiting)
    store.end_prompt([parts])
    assert store.stats().waiting == []
    states = references(policy, data, PROMPT)
    assert_reference(store, parts, states)
    assert_reference(store, whole, states)
    same = kept(store, whole) == kept(store, parts)
    for layer in range(2):
        for head in range(2):
            if same:
                one, other = (store.decode(layer, seq, head) for seq in (whole, parts))
                assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    store.check()


@pytest.mark.parametrize(
    "policy",
    [
        kvrs.SnapKV(256),
        kvrs.SnapKV(0.4, pooling="avg", reduce="sum"),
        kvrs.TOVA(256),
        kvrs.KNorm(256),
        kvrs.StreamingLLM(256),
        kvrs.Random(256),
        kvrs.CAOTE(kvrs.SnapKV(256)),
        kvrs.AdaKV(kvrs.SnapKV(256)),
        kvrs.Entropy(kvrs.SnapKV(256)),
        kvrs.PyramidKV(256),
    ],
    ids=named,
)
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_real_layers_keep_what_the_reference_keeps(policy: Any, name: str) -> None:
    layer = LAYERS[name]
    heads = {"query_heads": len(layer.q), "kv_heads": len(layer.k), "head_dim": layer.dim}
    fields = {"layers": 1, "rope": kvrs.Rope(layer.theta), **heads}
    store = make(policy, fields=fields, sinks=4, recent=16)
    seqs = store.new()
    store.begin_prompt(seqs)
    tokens, last = layer.k.shape[1], layer.q.shape[1]
    # The queries before the last 64 are not on file; these policies look at no others.
    q = np.concatenate([np.zeros((len(layer.q), tokens - last, layer.dim), np.float32), layer.q], axis=1)
    store.append(0, layer.k[None], layer.v[None], seqs, q=q[None], scale=layer.scale)
    store.end_prompt(seqs)
    state = Watched(of_reference(policy), sinks=4, recent=16, scale=layer.scale)
    state.prompt(layer.q, layer.k, layer.v)
    assert_reference(store, seqs[0], [state])
