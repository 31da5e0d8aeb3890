"""The reference of policies and budgets does what the definitions say, by hand, at random, on real data."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import attention, budget, policy
from tests.reference.policy import Layer, Policy

DATA = Path(__file__).parents[1] / "data"
# The first 24 bits of the hash of seed 7, layer 1, head 2 and tokens 0, 1, 399.
RANDOM_WORDS = [4643520, 7371396, 10238285]


def random_layer(heads=2, group=3, tokens=60, dim=8, seed=0):
    """Return q ``[heads * group, tokens, dim]``, k and v ``[heads, tokens, dim]``."""
    rng = np.random.default_rng(seed)
    shape = (heads, tokens, dim)
    return (
        rng.standard_normal((heads * group, tokens, dim)),
        rng.standard_normal(shape),
        rng.standard_normal(shape),
    )


def real_layer(name):
    data = safetensors.numpy.load_file(DATA / f"{name}.safetensors")
    return data["q_post_last64"], data["k_post"], data["v"]


def every_policy(tokens):
    """Return one policy of each kind with a budget of `tokens`."""
    inner = Policy("snapkv", tokens, window=4, kernel=3)
    names = ("streamingllm", "h2o", "scissorhands", "tova", "knorm", "random")
    simple = [Policy(name, tokens, history=20) for name in names]
    wrapped = [Policy(name, scores=inner) for name in ("caote", "adakv", "entropy")]
    custom = Policy("custom", tokens, function=lambda head: head.v[:, 0])
    deep = Policy("adakv", scores=Policy("caote", scores=Policy("h2o", tokens)))
    return [*simple, inner, *wrapped, custom, deep, Policy("pyramidkv", tokens, scores=inner)]


# --- budgets --------------------------------------------------------------------------------------


def test_pyramids_worked_by_hand():
    assert budget.pyramid(10, 4, 100, 5) == [18, 13, 7, 2]  # 18, 12 2/3, 7 1/3, 2
    assert budget.pyramid(10, 4, 100, 20) == [19, 13, 7, 1]  # the last layer has one token at least
    assert budget.pyramid(10, 4, 15, 20) == [15, 12, 8, 5]  # the first cannot have more than the prompt
    assert budget.pyramid(10, 5, 100, 20) == [19, 15, 10, 5, 1]  # 14.5 and 5.5: the lower layer wins
    assert budget.pyramid(10, 3, 10, 20) == [10, 10, 10]
    assert budget.pyramid(10, 3, 7, 20) == [7, 7, 7]
    assert budget.pyramid(10, 1, 100, 20) == [10]
    with pytest.raises(ValueError, match="at least 1"):
        budget.pyramid(0, 4, 100, 20)


@given(st.integers(1, 3000), st.integers(1, 80), st.integers(1, 8000), st.floats(1, 100))
def test_a_pyramid_has_its_sum_and_falls_and_stays_within_the_prompt(mean, layers, prompt, beta):
    counts = budget.pyramid(mean, layers, prompt, beta)
    assert sum(counts) == layers * min(mean, prompt)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1
    assert counts[0] <= prompt


@pytest.mark.parametrize("beta", [1, 1.5, 2, 3, 4, 8])
def test_a_steep_pyramid_never_passes_the_total(beta):
    assert sum(budget.pyramid(128, 32, 10_000, beta)) == 4096


def test_heads_share_by_score_worked_by_hand():
    heads = [[9, 8, 7, 1], [6, 1, 1, 1], [0.5, 0.4, 0.3, 0.2]]
    assert budget.ada(heads, 6, 1) == [3, 2, 1]
    assert budget.ada(heads, 6, 2) == [2, 2, 2]
    assert budget.ada(heads, 4, 0) == [3, 1, 0]
    assert budget.ada(heads, 99, 1) == [4, 4, 4]
    assert budget.ada([[1, 1], [1, 1]], 3, 0) == [2, 1]
    assert budget.ada([[], [1, 2]], 2, 1) == [0, 2]


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=40), min_size=1, max_size=8), st.integers(1, 60)
)
def test_heads_share_a_budget_exactly_and_keep_their_floor(heads, picks):
    floor = budget.floor_tokens(0.2, picks)
    counts = budget.ada(heads, picks * len(heads), floor)
    assert sum(counts) == min(picks * len(heads), sum(map(len, heads)))
    for head, count in zip(heads, counts, strict=True):
        assert min(floor, len(head)) <= count <= len(head)


def test_numbers_in_proportion_worked_by_hand():
    assert budget.apportion([1, 2, 3, 4], 20, 1, [100] * 4) == [2, 4, 6, 8]
    assert budget.apportion([1, 2, 3, 4], 20, 4, [100] * 4) == [4, 4, 5, 7]
    assert budget.apportion([1, 2, 3, 4], 20, 1, [100, 100, 3, 5]) == [4, 8, 3, 5]
    assert budget.apportion([1] * 4, 6, 0, [100] * 4) == [2, 2, 1, 1]
    assert budget.apportion([0] * 4, 8, 0, [100] * 4) == [2] * 4
    assert budget.apportion([0, 1], 8, 1, [100, 5]) == [3, 5]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 300)), min_size=1, max_size=40), st.integers(0, 200)
)
def test_proportions_have_their_sum_within_floor_and_caps(items, mean):
    weights, caps = (list(x) for x in zip(*items, strict=True))
    counts = budget.apportion(weights, mean * len(items), 5, caps)
    assert sum(counts) == min(mean * len(items), sum(caps))
    floor = min(5, sum(counts) // len(items))
    assert all(min(floor, cap) <= n <= cap for n, cap in zip(counts, caps, strict=True))


def test_the_entropy_of_equal_attention_is_the_logarithm_of_the_tokens():
    assert budget.entropy_of([0.5] * 8) == pytest.approx(math.log(8))
    assert budget.entropy_of([0, 2, 0]) == 0
    assert budget.entropy_of([3, 1]) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def test_budgets_become_tokens():
    assert budget.tokens_of(64, 1000, 37) == 64
    assert budget.tokens_of(0.29, 1000, 37) == 290
    assert budget.tokens_of(0.001, 1000, 37) == 37
    assert budget.tokens_of({"bytes": 4096 + 2 * 8192}, 50, 20, lambda n: 4096 + 8192 * -(-n // 16)) == 32
    with pytest.raises(ValueError, match="20 tokens take"):
        budget.tokens_of({"bytes": 9}, 50, 20, lambda n: 8 * n)


# --- statistics -----------------------------------------------------------------------------------


def test_attention_of_the_reference_makes_the_output_of_the_other_reference():
    q, k, v = random_layer()
    expected, _ = attention.attention(q, k, v)
    at = np.arange(60)
    for h in range(2):
        p, seen = policy.probabilities(q[3 * h : 3 * h + 3], k[h], at, at, 8**-0.5)
        np.testing.assert_allclose(p @ v[h], expected[3 * h : 3 * h + 3], atol=1e-12)
        assert (seen.sum(axis=1) == at + 1).all()


def test_attention_with_a_cap_and_a_sink_makes_the_output_of_the_other_reference():
    q, k, v = random_layer(heads=1)
    expected, _ = attention.attention(q, k, v, softcap=2.0, sink_logits=[0.5, -1, 3])
    p, _ = policy.probabilities(q, k[0], np.arange(60), np.arange(60), 8**-0.5, 2.0, [0.5, -1, 3])
    np.testing.assert_allclose(p @ v[0], expected, atol=1e-12)


def test_each_query_is_reduced_over_its_group_before_queries_are_added():
    p = np.array([[[0.8, 0.2], [0.1, 0.9]], [[0.3, 0.7], [0.5, 0.5]]])  # [group, queries, tokens]
    seen = np.ones((2, 2), dtype=bool)
    of = lambda reduce, fold: policy.folded(policy.REDUCE[reduce](p), seen, fold)  # noqa: E731
    np.testing.assert_allclose(of("max", "sum"), [0.8 + 0.5, 0.7 + 0.9])
    np.testing.assert_allclose(of("mean", "sum"), [0.85, 1.15])
    np.testing.assert_allclose(of("sum", "last"), [0.6, 1.4])
    np.testing.assert_allclose(of("mean", "above"), [1, 1])  # 0.55 > 1/2, then 0.7 > 1/2


def test_above_average_is_measured_by_what_a_query_sees():
    rows = np.array([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.34, 0.33, 0.33]])
    seen = np.tril(np.ones((3, 3), dtype=bool))
    np.testing.assert_array_equal(policy.folded(rows, seen, "above"), [1, 1, 0])  # 1 is not above 1 / 1


def test_counters_forget_what_is_older_than_both_halves():
    counters = policy.Counters(6)
    bits = [[True, False]] * 4 + [[False, True]] * 3
    expected = {2: [2, 0], 5: [4, 1], 6: [4, 2], 7: [1, 3]}
    for i, row in enumerate(bits):
        counters.add(np.array(row), i)
        if i + 1 in expected:
            np.testing.assert_array_equal(counters.totals(2), expected[i + 1])
    counters.keep(np.array([1]))
    np.testing.assert_array_equal(counters.totals(2), [3, 0])


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 5))
def test_pooling_leaves_out_what_does_not_exist(values, half):
    pooled = policy.pool(values, 2 * half + 1, "avg")
    assert len(pooled) == len(values)
    if len(set(values)) == 1:
        np.testing.assert_allclose(pooled, values)


# --- policies -------------------------------------------------------------------------------------


def head_of(sums, length=None):
    """Return a layer with one head whose tokens have the attention `sums`."""
    n = len(sums)
    layer = Layer(Policy("h2o", n), sinks=0, recent=0)
    zeros = np.zeros((n, 1))
    layer.heads = [policy.Head(np.arange(n), zeros, zeros, np.asarray(sums, dtype=np.float64))]
    layer.length = length or n
    return layer


def kept_by_hand(spec, sums, sinks, recent):
    layer = head_of(sums)
    layer.policy, layer.sinks, layer.plan_recent, layer.budget = spec, sinks, recent, spec.tokens()
    layer.evict(layer.budget)
    return layer.kept()[0].tolist()


def test_snapkv_worked_by_hand():
    sums = [9, 0, 0, 1, 0, 0, 4, 0, 0, 2, 5, 5]
    keep = lambda n, sinks, recent, how: kept_by_hand(  # noqa: E731
        Policy("snapkv", n, window=2, kernel=3, pooling=how), sums, sinks, recent
    )
    assert keep(6, 1, 0, "max") == [0, 1, 5, 6, 10, 11]  # 9 9 1 1 1 4 4 4 2 2: the lower of the three 4s
    assert keep(8, 1, 0, "max") == [0, 1, 5, 6, 7, 8, 10, 11]
    assert keep(8, 1, 0, "avg") == [0, 1, 5, 6, 7, 9, 10, 11]  # (0 + 2) / 2 at the edge is above 2 / 3
    assert keep(6, 0, 4, "max") == [0, 1, 8, 9, 10, 11]
    assert keep(99, 1, 0, "max") == list(range(12))


def test_other_policies_worked_by_hand():
    sums = [0, 5, 1, 4, 4, 0.5, 0.2, 0.1]
    assert kept_by_hand(Policy("streamingllm", 4), sums, 1, 2) == [0, 5, 6, 7]
    assert kept_by_hand(Policy("h2o", 6), sums, 1, 0) == [0, 1, 3, 5, 6, 7]
    assert kept_by_hand(Policy("tova", 4), sums, 0, 1) == [1, 3, 4, 7]


def test_the_score_of_caote_is_the_exact_change_of_the_output():
    q, k, v = random_layer(heads=1, group=1, tokens=40)
    layer = Layer(Policy("caote", scores=Policy("tova", 30)), sinks=0, recent=0)
    layer.length, layer.budget = 40, 30
    layer.heads = [policy.Head(np.arange(40), k[0], v[0], np.zeros(40))]
    layer.observe(q[:, -1:])
    scores = layer.scores(0)
    whole, _ = attention.attention(q[:, -1:], k, v)
    for j in range(40):
        rest = np.arange(40) != j
        without, _ = attention.attention(q[:, -1:], k[:, rest], v[:, rest], causal=False)
        change = np.linalg.norm(whole - without)
        assert abs(scores[j] - change) < 1e-12
        assert abs(np.float32(scores[j]) - change) < 1e-6


def test_fast_caote_measures_from_the_plain_mean():
    v = np.array([[0.0], [3.0], [6.0]])
    np.testing.assert_allclose(policy.caote([2, 1, 1], v, fast=True), [3, 0, 1])
    np.testing.assert_allclose(policy.caote([1, 0], v[:2]), [0, 0], atol=1e-12)


def test_random_numbers_are_those_of_the_hash():
    scores = policy.random_scores(7, 1, 2, [0, 1, 399])
    np.testing.assert_array_equal(scores * 2**24, RANDOM_WORDS)


def test_the_hit_rate_is_the_kept_share_of_what_later_mattered():
    a = np.array([[0.5, 0.01, 0.2, 0.2, 0.09], [0.5, 0.01, 0.2, 0.2, 0.05]])
    assert policy.hit_rate(a, [np.array([0, 1, 3]), np.array([], dtype=int)], 0.1) == 2 / 6


def test_selection_keeps_what_is_protected_and_the_lower_of_equals():
    assert policy.select([0, 5, 7, 5, 5, 1, 0], slice(1, 6), 2).tolist() == [0, 1, 2, 6]
    assert policy.select([0, 5, 7, 5, 5, 1, 0], slice(1, 6), 0).tolist() == [0, 6]
    assert policy.select([1, 3, 3], slice(0, 3), 0).tolist() == [1]
    assert policy.droppable([0, 1, 5, 9, 10, 11], 12, 2, 3) == slice(2, 3)
    assert policy.droppable([0, 1, 5], 6, 4, 64) == slice(2, 2)


def test_every_policy_meets_its_budget_and_keeps_sinks_and_newest_tokens():
    q, k, v = random_layer(heads=3, tokens=90)
    for spec in every_policy(40):
        kept = policy.kept_of_prompt(spec, q, k, v, sinks=2, recent=6)
        assert sum(map(len, kept)) == 3 * 40, spec.name
        for index in kept:
            assert {0, 1, 84, 85, 86, 87, 88, 89} <= set(index.tolist()), spec.name
            assert (np.diff(index) > 0).all()


def test_a_pyramid_keeps_its_budget_over_all_layers():
    q, k, v = random_layer(tokens=200)
    spec = Policy("pyramidkv", 40, scores=Policy("snapkv", window=4, kernel=3))
    kept = [policy.kept_of_prompt(spec, q, k, v, sinks=2, recent=6, layer=i, layers=5) for i in range(5)]
    counts = [len(index) for layer in kept for index in layer]
    assert sum(counts) == 5 * 2 * 40
    assert counts[0] > 40 > counts[-1] > 8


@pytest.mark.parametrize("tokens", [0, 1, 2, 12])
def test_a_short_prompt_is_kept_whole(tokens):
    q, k, v = random_layer(tokens=tokens)
    for spec in every_policy(40):
        for index in policy.kept_of_prompt(spec, q, k, v, sinks=4, recent=8):
            assert index.tolist() == list(range(tokens)), spec.name


def test_later_tokens_push_others_out_and_the_budget_holds():
    q, k, v = random_layer(tokens=200)
    for spec in every_policy(40):
        layer = Layer(spec, sinks=2, recent=6, group=16)
        layer.prompt(q[:, :70], k[:, :70], v[:, :70])
        for t in range(70, 200):
            layer.step(q[:, t], k[:, t], v[:, t])
            counts = [len(index) for index in layer.kept()]
            if spec.acts_later():
                assert max(counts) <= 40 + 15, spec.name
                assert min(counts) >= 20
            else:
                assert sum(counts) == 2 * (40 + t - 69), spec.name
        assert all({0, 1, 198, 199} <= set(index.tolist()) for index in layer.kept())


def test_scissorhands_drops_half_of_its_budget_at_once():
    q, k, v = random_layer(tokens=200)
    layer = Layer(Policy("scissorhands", 60, history=20), sinks=2, recent=6, group=16)
    layer.prompt(q[:, :70], k[:, :70], v[:, :70])
    counts = [len(layer.kept()[0])]
    for t in range(70, 200):
        layer.step(q[:, t], k[:, t], v[:, t])
        counts.append(len(layer.kept()[0]))
    falls = [(before, after) for before, after in itertools.pairwise(counts) if after < before]
    assert counts[0] == 60
    assert len(falls) >= 2
    assert all(before >= 60 and after == before + 1 - 30 for before, after in falls)


def test_what_random_keeps_does_not_depend_on_when_tokens_came():
    q, k, v = random_layer(tokens=200)
    spec = Policy("random", 40, seed=3)
    steps = Layer(spec, sinks=2, recent=6, group=16)
    steps.prompt(q[:, :60], k[:, :60], v[:, :60])
    for t in range(60, 200):
        steps.step(q[:, t], k[:, t], v[:, t])
    steps.evict(40)
    at_once = policy.kept_of_prompt(spec, q, k, v, sinks=2, recent=6)
    for a, b in zip(steps.kept(), at_once, strict=True):
        np.testing.assert_array_equal(a, b)


def test_streamingllm_keeps_the_sinks_and_the_newest_tokens():
    q, k, v = random_layer(tokens=100)
    kept = policy.kept_of_prompt(Policy("streamingllm", 30), q, k, v, sinks=4, recent=8)
    assert kept[0].tolist() == [0, 1, 2, 3, *range(74, 100)]


@pytest.mark.parametrize(("name", "scale"), [("gemma_layer05", 0.0625), ("qwen_layer00", None)])
def test_attention_policies_keep_more_attention_of_real_layers_than_chance(name, scale):
    q, k, v = real_layer(name)
    prompt = k[:, :480], v[:, :480]
    later = q[:, 32:], np.arange(480, 512)

    def mass(spec):
        kept = policy.kept_of_prompt(spec, q[:, :32], *prompt, sinks=4, recent=32, scale=scale)
        group = len(q) // len(k)
        total = 0.0
        for h, index in enumerate(kept):
            heads = later[0][h * group : (h + 1) * group]
            p, _ = policy.probabilities(heads, k[h], later[1], np.arange(512), scale or 128**-0.5)
            total += p[:, :, index].sum() / p.shape[0] / p.shape[1] / len(kept)
        return total

    chance = np.mean([mass(Policy("random", 120, seed=seed)) for seed in range(5)])
    for spec_name in ("snapkv", "tova", "h2o"):
        assert mass(Policy(spec_name, 120)) > chance
    assert mass(Policy("adakv", scores=Policy("snapkv", 120))) > chance
