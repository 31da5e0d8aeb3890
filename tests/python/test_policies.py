"""Policies as settings: their fields, messages, files, and what a plan and a specification make of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import kvrs
import numpy as np
import pytest
from conftest import make_store, shape, tensors
from kvrs import _kvrs
from kvrs.eval import spec
from kvrs.policies import from_spec

RAW = kvrs.Raw16()
SNAP = kvrs.SnapKV(64, window=16)
EVERY = [
    kvrs.StreamingLLM(64),
    kvrs.H2O(0.25),
    kvrs.Scissorhands(64, history=20),
    SNAP,
    kvrs.TOVA("64MiB"),
    kvrs.KNorm(64),
    kvrs.CAOTE(kvrs.H2O(64), fast=True),
    kvrs.Random(64, seed=3),
    kvrs.PyramidKV(64, beta=10, scores=kvrs.SnapKV(window=16)),
    kvrs.AdaKV(kvrs.CAOTE(SNAP), floor=0.5),
    kvrs.Entropy(SNAP),
]


def plan(**settings: object) -> kvrs.Plan:
    return kvrs.Plan(shape(), RAW, RAW, **({"sinks": 2, "recent": 8} | settings))


def says(words: list[str], error: pytest.ExceptionInfo[BaseException]) -> bool:
    return all(word in str(error.value) for word in (*words, "allowed")) or pytest.fail(str(error.value))


def test_every_policy_of_the_compiled_module_has_a_class_with_a_name_and_numpydoc() -> None:
    listed = kvrs.policies()
    assert [policy.name for policy in listed] == _kvrs.policies()
    assert {type(policy) for policy in EVERY} | {kvrs.Custom} == set(listed)
    for policy in listed:
        assert policy.__doc__ is not None
        assert all(word in policy.__doc__ for word in ("Parameters", "Examples"))
        assert getattr(kvrs, policy.__name__) is policy


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: policy.name)
def test_a_policy_is_the_same_after_a_plan_file(policy: kvrs.policies, tmp_path: Path) -> None:
    made = plan(evict=[policy, None], prompt_budget=4096)
    made.save(tmp_path / "a.kvplan")
    read = kvrs.Plan.load(tmp_path / "a.kvplan")
    assert read == made
    assert (read.evict, read.prompt_budget, read.hash) == ((policy, None), 4096, made.hash)
    assert from_spec(json.loads(json.dumps(policy.spec()))) == policy
    assert hash(policy) == hash(dataclasses.replace(policy))


def test_policies_decide_the_hash_and_no_policy_leaves_it_as_it_was() -> None:
    assert plan().hash == plan(evict=None).hash == plan(evict=[None, None]).hash
    hashes = {plan(evict=policy).hash for policy in EVERY}
    assert len(hashes | {plan().hash, plan(evict=[SNAP, None]).hash}) == len(EVERY) + 2
    assert "SnapKV" in repr(plan(evict=SNAP))
    assert "evict" not in repr(plan())


def test_bytes_are_spelled_in_the_largest_unit_that_divides_them() -> None:
    spelled = {text: kvrs.H2O(text).budget for text in ("512MiB", "0.5GiB", "1024MiB", "1.5 KB", "1MB")}
    assert list(spelled.values()) == ["512MiB", "512MiB", "1GiB", "1500B", "1000000B"]
    assert kvrs.H2O("0.5GiB") == kvrs.H2O("512MiB")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kvrs.SnapKV(64, kernel=4), ["snapkv.kernel", "4", "odd", "window of 32"]),
        (lambda: kvrs.SnapKV(64, window=3, kernel=5), ["snapkv.kernel", "5", "window of 3"]),
        (lambda: kvrs.SnapKV(64, window=0), ["snapkv.window", "0", "1..=4096"]),
        (lambda: kvrs.SnapKV(64, window=-1), ["snapkv.window", "-1", "1..=4096"]),
        (lambda: kvrs.SnapKV(64, window=1.5), ["snapkv.window", "1.5", "1..=4096"]),
        (lambda: kvrs.SnapKV(64, pooling="min"), ["snapkv.pooling", "min", "max, avg"]),
        (lambda: kvrs.SnapKV(64, reduce="median"), ["snapkv.reduce", "median", "mean, max, sum"]),
        (lambda: kvrs.SnapKV(64, reduce=None, pooling=3), ["snapkv.pooling", "3", "max, avg"]),
        (lambda: kvrs.SnapKV(True), ["SnapKV.budget", "True"]),
        (lambda: kvrs.SnapKV([64]), ["SnapKV.budget", "[64]"]),
        (lambda: kvrs.SnapKV(32), ["snapkv.budget", "32 tokens", "at least 33"]),
        (lambda: kvrs.H2O(1.5), ["h2o.budget", "1.5", "(0, 1]"]),
        (lambda: kvrs.H2O(0.0), ["h2o.budget", "0", "(0, 1]"]),
        (lambda: kvrs.H2O(-0.25), ["h2o.budget", "-0.25", "(0, 1]"]),
        (lambda: kvrs.H2O(float("nan")), ["H2O.budget", "nan", "finite"]),
        (lambda: kvrs.StreamingLLM(0), ["streamingllm.budget", "0 tokens", "at least 1"]),
        (lambda: kvrs.StreamingLLM(-1), ["streamingllm.budget", "-1", "tokens per head"]),
        (lambda: kvrs.TOVA("64"), ["tova.budget", "64", "512MiB"]),
        (lambda: kvrs.TOVA("many"), ["tova.budget", "many", "512MiB"]),
        (lambda: kvrs.TOVA("0B"), ["tova.budget", "0B"]),
        (lambda: kvrs.Scissorhands(64, history=401), ["scissorhands.history", "401", "even"]),
        (lambda: kvrs.Random(64, seed=-1), ["random.seed", "-1"]),
        (lambda: kvrs.PyramidKV(64, beta=0.5), ["pyramidkv.beta", "0.5", "[1, 1e6]"]),
        (lambda: kvrs.AdaKV(SNAP, floor=1.5), ["adakv.floor", "1.5", "[0, 1]"]),
        (lambda: kvrs.Entropy(SNAP, floor=-0.1), ["entropy.floor", "-0.1", "[0, 1]"]),
        (lambda: kvrs.CAOTE("snapkv"), ["CAOTE.scores", "'snapkv'", "a policy"]),
        (lambda: kvrs.CAOTE(SNAP, fast=1), ["CAOTE.fast", "1", "True, False"]),
        (lambda: kvrs.CAOTE(kvrs.KNorm(64)), ["caote.scores", "knorm", "snapkv, h2o, tova"]),
        (lambda: kvrs.AdaKV(kvrs.Random(64)), ["adakv.scores", "random", "caote"]),
        (lambda: kvrs.AdaKV(kvrs.PyramidKV(64)), ["adakv.scores", "pyramidkv", "snapkv"]),
        (lambda: kvrs.PyramidKV(64, scores=kvrs.StreamingLLM()), ["pyramidkv.scores", "streamingllm"]),
        (lambda: kvrs.PyramidKV(64, scores=kvrs.H2O(48)), ["scores.budget", "48", "64"]),
        (lambda: kvrs.Custom(3, budget=64), ["Custom.score", "3", "function"]),
        (lambda: kvrs.Custom(len, budget=64, needs="keys"), ["Custom.needs", "keys", "Needs"]),
        (lambda: kvrs.Needs(distances="max"), ["Needs.distances", "max", "output, mean"]),
        (lambda: kvrs.Needs(attention="sum"), ["Needs.attention", "sum", "Attention"]),
        (lambda: kvrs.Needs(key_norms=1), ["Needs.key_norms", "1", "True"]),
        (lambda: kvrs.Attention(fold="mean"), ["Attention.fold", "mean", "above"]),
        (lambda: kvrs.Attention(reduce="min"), ["Attention.reduce", "min", "sum"]),
        (lambda: kvrs.Attention(queries=0), ["Attention.queries", "0", "None"]),
        (lambda: kvrs.Custom(len, 64, kvrs.Needs(distances="output")), ["custom.needs.distances", "output"]),
        (
            lambda: kvrs.Custom(len, 64, kvrs.Needs(kvrs.Attention(queries=9999))),
            ["custom.needs.attention.queries", "9999", "4096"],
        ),
        (lambda: kvrs.policies()[0].__mro__[1](), ["policy is Policy"]),
        (lambda: from_spec({"name": "quest"}), ["policy is 'quest'", "snapkv"]),
        (lambda: from_spec({"name": "h2o", "params": {"size": 4}}), ["h2o.size", "budget"]),
        (lambda: from_spec({"name": "custom"}), ["custom"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(make: object, words: list[str]) -> None:
    with pytest.raises(kvrs.PlanError) as error:
        make()
    assert says(words, error)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evict": kvrs.SnapKV(40), "recent": 64}, ["evict[0].budget", "40 tokens", "at least 67"]),
        ({"evict": kvrs.StreamingLLM(12), "recent": 10}, ["evict[0].budget", "12 tokens", "at least 13"]),
        ({"evict": kvrs.KNorm(4), "sinks": 8, "recent": 0}, ["evict[0].budget", "4 tokens", "at least 9"]),
        ({"evict": kvrs.H2O(12), "recent": 2}, None),
        ({"evict": kvrs.H2O(4), "recent": 2}, ["evict[0].budget", "4 tokens", "at least"]),
        (
            {"evict": [None, kvrs.AdaKV(kvrs.SnapKV(34))]},
            ["evict[1].scores.budget", "34 tokens", "at least 35"],
        ),
        ({"evict": kvrs.SnapKV()}, ["evict[0].budget", "missing", "512MiB"]),
        ({"evict": kvrs.AdaKV()}, ["evict[0].scores.budget", "missing"]),
        ({"evict": kvrs.TOVA("4KiB")}, ["evict[0].budget", "4096 bytes", "at least"]),
        ({"evict": [SNAP]}, ["evict", "1", "2"]),
        ({"evict": "snapkv:64"}, ["evict[0]", "snapkv:64", "None or a policy"]),
        ({"evict": [SNAP, RAW]}, ["evict[1]", "Raw16", "None or a policy"]),
        ({"evict": SNAP, "prompt_budget": 0}, ["prompt_budget", "0", "None"]),
        ({"evict": SNAP, "prompt_budget": 1.5}, ["prompt_budget", "1.5"]),
    ],
)
def test_case_b45_a_plan_that_a_policy_does_not_fit_is_refused_by_name(
    settings: dict, words: list[str] | None
) -> None:
    if words is None:
        plan(**settings)
        return
    with pytest.raises(kvrs.PlanError) as error:
        plan(**settings)
    assert says(words, error)


def test_one_policy_is_for_the_layers_with_full_attention() -> None:
    mixed = shape(sliding=[None, 512])
    made = kvrs.Plan(mixed, RAW, RAW, evict=SNAP, sinks=2, recent=8)
    assert made.evict == (SNAP, None)
    assert [report.evict for report in made.describe()] == ["snapkv", None]
    assert [report.evicts is None for report in made.describe()] == [False, True]
    with pytest.raises(kvrs.PlanError) as error:
        kvrs.Plan(mixed, RAW, RAW, evict=[SNAP, SNAP], sinks=2, recent=8)
    assert says(["evict[1]", "sliding window of 512", "None"], error)
    with pytest.raises(kvrs.PlanError) as error:
        kvrs.Plan(shape(sliding=512), RAW, RAW, evict=SNAP)
    assert says(["evict", "sliding"], error)


def test_a_plan_with_a_function_cannot_be_saved(tmp_path: Path) -> None:
    made = plan(evict=[None, kvrs.Custom(len, budget=64)])
    with pytest.raises(kvrs.FormatError) as error:
        made.save(tmp_path / "a.kvplan")
    assert says(["evict[1]", "Custom"], error)
    assert not (tmp_path / "a.kvplan").exists()


# --- one line for a plan --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("snapkv:1024", kvrs.SnapKV(1024)),
        ("SnapKV:0.25", kvrs.SnapKV(0.25)),
        ("snapkv:64MiB:window=16:reduce=max", kvrs.SnapKV("64MiB", window=16, reduce="max")),
        ("snapkv:1024:64:5:avg", kvrs.SnapKV(1024, 64, 5, "avg")),
        ("streamingllm:512", kvrs.StreamingLLM(512)),
        ("random:512:seed=7", kvrs.Random(512, 7)),
        ("caote(snapkv):512", kvrs.CAOTE(kvrs.SnapKV(512))),
        ("caote:512", kvrs.CAOTE(kvrs.SnapKV(512))),
        ("caote(h2o):512:fast=true", kvrs.CAOTE(kvrs.H2O(512), fast=True)),
        ("caote(h2o:512)", kvrs.CAOTE(kvrs.H2O(512))),
        ("adakv(caote(snapkv:window=16)):512:0.5", kvrs.AdaKV(kvrs.CAOTE(kvrs.SnapKV(512, 16)), 0.5)),
        ("pyramidkv:512", kvrs.PyramidKV(512)),
        ("pyramidkv(tova):512:beta=10", kvrs.PyramidKV(512, 10, kvrs.TOVA())),
        ("entropy(snapkv):0.5", kvrs.Entropy(kvrs.SnapKV(0.5))),
    ],
)
def test_a_policy_is_read_from_one_line(text: str, policy: object) -> None:
    assert spec.parse_policy(text) == policy
    settings = spec.parse_settings(f"keys=turboquant:4,values=raw16,evict={text},recent=16,prompt_budget=99")
    assert (settings["evict"], settings["recent"], settings["prompt_budget"]) == (policy, 16, 99)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quest:4", ["policy is 'quest'", "snapkv"]),
        ("custom:4", ["policy is 'custom'", "snapkv"]),
        ("snapkv:64:size=3", ["'size'", "budget, window, kernel, pooling, reduce"]),
        ("snapkv:64:budget=65", ["'budget'", "twice"]),
        ("h2o:64:3", ["2 fields", "budget"]),
        ("h2o(snapkv):64", ["h2o", "without parentheses"]),
        ("caote(snapkv:64", ["caote(snapkv:64", "NAME(POLICY)"]),
        ("caote(h2o:64):65", ["64", "65", "one"]),
        ("snapkv:3.5", ["snapkv.budget", "3.5", "(0, 1]"]),
    ],
)
def test_a_wrong_line_says_what_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(kvrs.PlanError) as error:
        spec.parse_policy(text)
    assert says(words, error)


# --- custom scores --------------------------------------------------------------------------------


def feed(store: kvrs.KVStore, rng: np.random.Generator, tokens: int = 100) -> list[int]:
    seqs = store.new()
    k, q = tensors(rng, 1, tokens), tensors(rng, 1, tokens, heads=4)
    for layer in range(2):
        store.append(layer, k, k, seqs, q=q)
    return seqs


def test_a_function_is_told_what_it_asks_for_and_its_best_tokens_stay(rng: np.random.Generator) -> None:
    seen: list[kvrs.Facts] = []

    def score(facts: kvrs.Facts) -> np.ndarray:
        seen.append(facts)
        return -np.abs(facts.tokens - 40)

    needs = kvrs.Needs(kvrs.Attention(queries=8), key_norms=True, distances="output")
    store = kvrs.KVStore(plan(evict=kvrs.Custom(score, 20, needs), recent=8))
    seqs = feed(store, rng)
    assert [(facts.layer, facts.head) for facts in seen] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for facts in seen:
        assert facts.tokens.tolist() == list(range(100))
        assert facts.prefix == 92
        assert facts.attention.sum() == pytest.approx(8, rel=1e-4)
        assert facts.key_norms.dtype == facts.distances.dtype == np.float32
        assert len(facts.key_norms) == len(facts.distances) == 100
    kept = store.kept_positions(seqs[0], 1, 1).tolist()
    assert kept == [0, 1, *range(36, 46), *range(92, 100)] or kept == [0, 1, *range(35, 45), *range(92, 100)]
    assert len(kept) == 20


def test_a_function_is_told_nothing_that_it_does_not_ask_for(rng: np.random.Generator) -> None:
    seen: list[kvrs.Facts] = []
    policy = kvrs.Custom(lambda facts: seen.append(facts) or facts.tokens, budget=20)
    feed(kvrs.KVStore(plan(evict=policy)), rng)
    assert {(facts.attention, facts.key_norms, facts.distances) for facts in seen} == {(None, None, None)}


@pytest.mark.parametrize(
    ("score", "kind", "words"),
    [
        (lambda facts: facts.layer / 0, ZeroDivisionError, ["division"]),
        (lambda facts: facts.tokens[:5], kvrs.ArgumentError, ["(5,)", "layer 0, head 0", "(100,)"]),
        (lambda _: "many", kvrs.ArgumentError, ["many", "one float per token"]),
        (lambda _: None, kvrs.ArgumentError, ["allowed"]),
    ],
)
def test_what_a_function_raises_reaches_the_caller_and_the_prompt_stays_open(
    score: object, kind: type[Exception], words: list[str], rng: np.random.Generator
) -> None:
    store = kvrs.KVStore(plan(evict=kvrs.Custom(score, budget=20)))
    seqs = store.new()
    store.begin_prompt(seqs)
    k = tensors(rng, 1, 100)
    for layer in range(2):
        store.append(layer, k, k, seqs)
    with pytest.raises(kind) as error:
        store.end_prompt(seqs)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(store.kept_positions(seqs[0], 0, 0)) == 100
    assert store.stats().waiting


def test_a_function_that_uses_the_store_is_refused_instead_of_locking_up(rng: np.random.Generator) -> None:
    held: list[kvrs.KVStore] = []
    policy = kvrs.Custom(lambda facts: held[0].length(0) and facts.tokens, budget=20)
    held.append(kvrs.KVStore(plan(evict=policy)))
    with pytest.raises(kvrs.KVError, match="inside of a score function"):
        feed(held[0], rng)
    assert held[0].stats().sequences == 1
    held.clear()


def test_each_layer_has_its_own_function(rng: np.random.Generator) -> None:
    first = kvrs.Custom(lambda facts: -facts.tokens, budget=20)
    last = kvrs.Custom(lambda facts: facts.tokens, budget=20)
    store = kvrs.KVStore(plan(evict=[first, last]))
    seqs = feed(store, rng)
    assert store.kept_positions(seqs[0], 0, 0).tolist() == [*range(12), *range(92, 100)]
    assert store.kept_positions(seqs[0], 1, 0).tolist() == [0, 1, *range(82, 100)]


def test_a_store_without_policies_counts_none(rng: np.random.Generator) -> None:
    store = make_store()
    feed(store, rng)
    stats = store.stats()
    assert (stats.policies, stats.waiting, stats.bytes_statistics) == ([], [], 0)
