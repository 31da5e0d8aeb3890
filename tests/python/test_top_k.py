"""Top-k attention: every query sees its largest scores and nothing else."""

from __future__ import annotations

from pathlib import Path

import kvrs
import numpy as np
import pytest
from kvrs.eval.spec import parse_settings

TOKENS, DIM = 300, 64
SHAPE = kvrs.ModelShape(layers=1, query_heads=4, kv_heads=2, head_dim=DIM)


def plan(k: int | None, codec: kvrs.codecs.Codec | None = None) -> kvrs.Plan:
    codec = codec or kvrs.Raw16()
    return kvrs.Plan(SHAPE, codec, codec, attend=None if k is None else kvrs.TopK(k))


def filled(settings: kvrs.Plan) -> tuple[kvrs.KVStore, list[int]]:
    rng = np.random.default_rng(3)
    store = kvrs.KVStore(settings)
    seqs = store.new()
    k, v = (rng.standard_normal((1, 2, TOKENS, DIM), np.float32) for _ in range(2))
    store.append(0, k, v, seqs)
    return store, seqs


def query() -> np.ndarray:
    return np.random.default_rng(4).standard_normal((1, 4, 1, DIM), np.float32)


@pytest.mark.parametrize("k", [1, 5, 100, TOKENS, 2 * TOKENS])
def test_output_is_the_softmax_over_the_largest_scores(k: int) -> None:
    store, seqs = filled(plan(k))
    got = np.asarray(store.attend(0, query(), seqs))
    for head in range(4):
        keys, values, _ = store.decode(0, seqs[0], head // 2)
        scores = np.asarray(keys, np.float64) @ query()[0, head, 0] / DIM**0.5
        weights = np.where(scores >= np.sort(scores)[-min(k, TOKENS)], np.exp(scores - scores.max()), 0)
        expected = weights @ np.asarray(values, np.float64) / weights.sum()
        np.testing.assert_allclose(got[0, head, 0], expected, atol=1e-4)


def test_values_that_no_query_kept_are_not_read() -> None:
    store, seqs = filled(plan(2, kvrs.TurboQuant(4)))
    store.attend(0, query(), seqs)
    stats = store.stats()
    assert 0 < stats.value_tiles_read <= 2 * 4 < stats.value_tiles_seen


def test_without_it_nothing_is_counted() -> None:
    store, seqs = filled(plan(None))
    store.attend(0, query(), seqs)
    assert store.stats().value_tiles_seen == 0


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "top.kvplan"
    plan(7).save(path)
    loaded = kvrs.Plan.load(path)
    assert loaded == plan(7)
    assert "attend=TopK(k=7)" in repr(loaded)
    assert plan(None).hash != plan(7).hash


def test_a_specification_may_ask_for_it() -> None:
    assert parse_settings("turboquant:4,attend=topk:256")["attend"] == kvrs.TopK(256)
    with pytest.raises(kvrs.PlanError, match="attend is 'top'; allowed: topk"):
        parse_settings("raw16,attend=top:3")
    with pytest.raises(kvrs.PlanError, match="allowed: topk:K"):
        parse_settings("raw16,attend=topk")


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "8"])
def test_a_bad_k_is_named(bad: object) -> None:
    with pytest.raises(kvrs.PlanError, match=r"TopK\.k is .*; allowed: an int, 1 or more"):
        kvrs.TopK(bad)  # type: ignore[arg-type]


def test_another_object_is_refused() -> None:
    with pytest.raises(kvrs.PlanError, match="attend is 'topk'; allowed: None, or top-k attention"):
        kvrs.Plan(SHAPE, kvrs.Raw16(), kvrs.Raw16(), attend="topk")  # type: ignore[arg-type]
