"""Attention over what policies leave, and rows with padding."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import DIGITS, assert_attention, expected, softmax_attention, tensors
from evicting import BUDGET, PROMPT, SNAP, TQ4, Data, append, every_policy, kept, make, named


@every_policy
def test_case_b23_queries_of_the_prompt_see_all_of_it_and_the_next_step_what_stays(
    policy: Any, rng: np.random.Generator
) -> None:
    data = Data.random(rng, 301)
    store = make(policy, fields={"layers": 1})
    seqs = store.new()
    one = Data(*([side[0]] for side in (data.q, data.k, data.v)))
    out = append(store, seqs, one.part(0, 300), extend=True)[0]
    for head in range(4):
        k, v = one.k[0][head // 2, :300], one.v[0][head // 2, :300]
        assert_attention(out[head], softmax_attention(one.q[0][head, :300], k, v, 0)[0], logit=120.0)
    want, _ = expected(store, 0, seqs[0], one.q[0][:, 300:], own=(one.k[0][:, 300:], one.v[0][:, 300:]))
    got = append(store, seqs, one.part(300, 301), extend=True)[0]
    assert_attention(got, want, logit=120.0)
    full = softmax_attention(one.q[0][3, 300:], one.k[0][1], one.v[0][1], 300)[0]
    assert np.abs(got[3] - full).max() > 1e-3, "something went that mattered"


def test_case_b06_heads_with_masks_of_their_own_give_finite_exact_outputs(rng: np.random.Generator) -> None:
    """Queries in pairs of opposite sign, for which no single key can score low."""
    fields = {"layers": 1, "query_heads": 8, "kv_heads": 8}
    store = make(kvrs.Custom(lambda facts: facts.tokens * 0, budget=512), fields=fields, recent=0)
    seqs = store.new()
    k, v = (tensors(rng, 1, 512, heads=8) for _ in range(2))
    store.append(0, k, v, seqs)
    keep = [np.sort(rng.choice(512, 64 + 16 * h, replace=False)) for h in range(8)]
    store.keep(seqs[0], 0, keep)
    before = [store.decode(0, seqs[0], h) for h in range(8)]
    half = tensors(rng, 1, 8, heads=8) * 30
    out = np.asarray(
        store.attend(0, np.concatenate([half, -half], axis=2).astype(np.float16), seqs, causal=False)
    )
    assert np.isfinite(out).all()
    for h, (keys, values, positions) in enumerate(before):
        assert positions.tolist() == sorted({0, 1, *keep[h].tolist()})
        assert np.array_equal(keys, k[0, h, positions])
        queries = np.concatenate([half, -half], axis=2)[0, h]
        want = softmax_attention(queries.astype(np.float16), keys, values, None)[0]
        assert np.abs(out[0, h] - want).max() <= 2e-3 + DIGITS * np.abs(want).max()
        assert np.array_equal(store.decode(0, seqs[0], h)[0], keys)


@pytest.mark.parametrize("policy", [kvrs.SnapKV(96, window=16), kvrs.H2O(96), kvrs.AdaKV(SNAP)], ids=named)
def test_case_b21_padding_changes_nothing_that_is_kept(policy: Any, rng: np.random.Generator) -> None:
    data = Data.random(rng, PROMPT)
    store = make(policy, TQ4)
    alone, short, long = store.new(3)
    append(store, [alone], data.part(0, 300))
    pads = PROMPT - 300
    for layer in range(2):
        rows = []
        for side in (data.q, data.k, data.v):
            x = side[layer]
            pad = np.full((len(x), pads, 64), np.nan, np.float32)
            rows.append(np.stack([np.concatenate([pad, x[:, :300]], axis=1), x]))
        mask = np.ones((2, PROMPT), bool)
        mask[0, :pads] = False
        store.append(layer, rows[1], rows[2], [short, long], mask=mask, q=rows[0])
    assert kept(store, short) == kept(store, alone)
    for layer in range(2):
        one, other = (store.decode(layer, seq, 1) for seq in (alone, short))
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert sum(map(len, kept(store, long)[0])) == 2 * BUDGET
