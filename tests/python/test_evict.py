"""What stores keep under policies: the sets of the float64 reference, freed bytes, attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import DIGITS, assert_attention, expected, shape, softmax_attention, tensors
from kvrs.policies import base
from test_fixtures import LAYERS

from tests.reference import policy as reference

RAW = kvrs.Raw16()
TQ4 = kvrs.TurboQuant(4)
SINKS, RECENT, BUDGET, PROMPT = 2, 8, 96, 400
SNAP = kvrs.SnapKV(BUDGET, window=16)
POLICIES = [
    kvrs.StreamingLLM(BUDGET),
    kvrs.H2O(BUDGET),
    kvrs.Scissorhands(BUDGET, history=40),
    SNAP,
    kvrs.SnapKV(0.25, window=32, kernel=5, pooling="avg", reduce="max"),
    kvrs.SnapKV(BUDGET, window=16, kernel=1, reduce="sum"),
    kvrs.TOVA(BUDGET),
    kvrs.KNorm(BUDGET),
    kvrs.CAOTE(SNAP),
    kvrs.CAOTE(kvrs.H2O(BUDGET)),
    kvrs.CAOTE(kvrs.TOVA(BUDGET), fast=True),
    kvrs.Random(BUDGET, seed=5),
    kvrs.PyramidKV(BUDGET, beta=5, scores=kvrs.SnapKV(window=16)),
    kvrs.AdaKV(SNAP),
    kvrs.AdaKV(kvrs.CAOTE(SNAP), floor=0.5),
    kvrs.Entropy(SNAP),
]
LATER = [policy for policy in POLICIES if isinstance(policy, kvrs.CAOTE) or base(policy) is policy]


def named(policy: Any) -> str:
    inner = getattr(policy, "scores", None)
    return f"{policy.name}({named(inner)})" if inner else policy.name


every_policy = pytest.mark.parametrize("policy", POLICIES, ids=named)


def of_reference(policy: Any) -> reference.Policy:
    """Return the same settings as the reference takes them."""
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    if "scores" in settings:
        settings["scores"] = of_reference(settings["scores"])
    return reference.Policy(policy.name, **settings)


def make(policy: Any, codec: Any = RAW, fields: Any = None, **settings: Any) -> kvrs.KVStore:
    capacity = settings.pop("capacity", None)
    settings = {"sinks": SINKS, "recent": RECENT, "evict": policy} | settings
    return kvrs.KVStore(kvrs.Plan(shape(**(fields or {})), codec, codec, **settings), capacity=capacity)


@dataclasses.dataclass
class Data:
    """Queries, keys and values ``[layer][heads, tokens, 64]``: heads that look at few and at many tokens."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]

    @classmethod
    def random(cls, rng: np.random.Generator, tokens: int, layers: int = 2) -> Data:
        heads = [tensors(rng, layers, tokens, heads=n) for n in (4, 2, 2)]
        sharp = np.array([0.5, 1, 2, 3], np.float32)[None, :, None, None]
        return cls(*(list(x) for x in (heads[0] * sharp, heads[1], heads[2])))

    def part(self, start: int, end: int) -> Data:
        return Data(*([x[:, start:end] for x in side] for side in (self.q, self.k, self.v)))

    @property
    def tokens(self) -> int:
        return self.k[0].shape[1]


def append(store: kvrs.KVStore, seqs: list[int], data: Data, extend: bool = False) -> list[np.ndarray]:
    """Give all layers of one sequence the same tokens; return the outputs."""
    outs = []
    for layer in range(len(data.k)):
        q, k, v = data.q[layer][None], data.k[layer][None], data.v[layer][None]
        if extend:
            outs.append(np.asarray(store.extend(layer, q, k, v, seqs))[0])
        else:
            store.append(layer, k, v, seqs, q=q)
    return outs


def kept(store: kvrs.KVStore, seq: int, layers: int = 2, heads: int = 2) -> list[list[list[int]]]:
    return [[store.kept_positions(seq, i, h).tolist() for h in range(heads)] for i in range(layers)]


def assert_same(got: list[int], want: np.ndarray, state: reference.Layer, head: int) -> None:
    """Compare sets; tokens whose scores are closer than 1e-5 to the cut may change places."""
    differ = set(got) ^ set(want.tolist())
    assert len(got) == len(want)
    if not differ:
        return
    scores = dict(zip(state.before[head], state.scored[head], strict=True))
    values = [scores[i] for i in differ]
    assert max(values) - min(values) <= 1e-5 * max(map(abs, values)), f"{sorted(differ)}: {values}"


class Watched(reference.Layer):
    """The reference, which remembers the tokens and scores of its last choice."""

    before: list[list[int]]
    scored: list[np.ndarray]

    def evict(self, tokens: int) -> None:
        self.before = [head.index.tolist() for head in self.heads]
        self.scored = [self.scores(h) for h in range(len(self.heads))]
        super().evict(tokens)


def references(policy: Any, data: Data, prompt: int) -> list[Watched]:
    """Return the reference of each layer after a prompt and single tokens."""
    states = []
    for layer in range(len(data.k)):
        state = Watched(of_reference(policy), sinks=SINKS, recent=RECENT, layer=layer, layers=len(data.k))
        q, k, v = data.q[layer], data.k[layer], data.v[layer]
        state.prompt(q[:, :prompt], k[:, :prompt], v[:, :prompt])
        for i in range(prompt, data.tokens):
            state.step(q[:, i], k[:, i], v[:, i])
        states.append(state)
    return states


def assert_reference(store: kvrs.KVStore, seq: int, states: list[Watched]) -> None:
    for layer, state in enumerate(states):
        for head, want in enumerate(state.kept()):
            got = store.kept_positions(seq, layer, head).tolist()
            if state.policy.name == "streamingllm":
                # It does not wait for the end of a prompt, and up to a group less one is above its budget.
                n = len(got) - state.sinks
                assert state.budget <= len(got) < state.budget + 16
                assert got == [*range(state.sinks), *range(state.length - n, state.length)]
            else:
                assert_same(got, want, state, head)


# --- the same sets as the reference ----------------------------------------------------------------


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


# --- attention over what stays ----------------------------------------------------------------------


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


# --- bytes -------------------------------------------------------------------------------------------


def bytes_of(policy: Any, codec: Any, heads: tuple[int, int], tokens: int, layers: int = 1) -> kvrs.Stats:
    """Return the statistics of a store after a prompt, on layers of 128 channels."""
    query_heads, kv_heads = heads
    fields = {"layers": layers, "query_heads": query_heads, "kv_heads": kv_heads, "head_dim": 128}
    store = make(policy, codec, fields, sinks=4, recent=128)
    generator = np.random.default_rng(0)
    k = generator.standard_normal((1, kv_heads, tokens, 128)).astype(np.float16)
    q = generator.standard_normal((1, query_heads, tokens, 128)).astype(np.float16)
    seqs = store.new()
    for layer in range(layers):
        store.append(layer, k, k, seqs, q=q)
    store.check()
    return store.stats()


def test_the_bytes_of_a_prompt_that_snapkv_cuts_are_gone() -> None:
    """1024 of 8192 tokens on Qwen's heads."""
    full = bytes_of(None, RAW, (12, 2), 8192, layers=8)
    cut = bytes_of(kvrs.SnapKV(1024), RAW, (12, 2), 8192, layers=8)
    packed = bytes_of(kvrs.SnapKV(1024), TQ4, (12, 2), 8192, layers=8)
    exact = 8 * 8192 * 2 * 2 * 128 * 2
    assert cut.bytes_total <= 0.14 * full.bytes_total, (cut, full)
    assert packed.bytes_total <= 0.055 * exact, packed
    assert cut.tokens_kept == packed.tokens_kept == 8 * 2 * 1024
    assert packed.bytes_codes > 0


@pytest.mark.parametrize("heads", [(32, 8), (24, 4), (21, 3), (14, 2), (8, 1), (8, 8), (7, 1)])
def test_case_b10_bytes_follow_the_key_value_heads_alone(heads: tuple[int, int]) -> None:
    few = bytes_of(kvrs.SnapKV(256), RAW, heads, 1024)
    assert few.tokens_kept == heads[1] * 256
    assert few.bytes_window == heads[1] * 256 * 2 * 128 * 2


def test_case_b10_snapkv_1024_of_8192_takes_what_eight_heads_take() -> None:
    wide, narrow = (bytes_of(kvrs.SnapKV(1024), RAW, heads, 8192) for heads in ((32, 8), (8, 8)))
    assert wide.tokens_kept == narrow.tokens_kept == 8 * 1024
    assert wide.bytes_total == pytest.approx(narrow.bytes_total, rel=0.05)


def test_ragged_heads_take_the_pages_that_each_of_them_fills(rng: np.random.Generator) -> None:
    store, data = make(kvrs.AdaKV(kvrs.SnapKV(160, window=16)), TQ4), Data.random(rng, 1000)
    seqs = store.new()
    append(store, seqs, data)
    counts = np.array([[len(head) for head in layer] for layer in kept(store, seqs[0])])
    assert counts.sum() == 4 * 160
    assert (counts[:, 0] != counts[:, 1]).all(), "heads differ"
    packed = -(-(counts - SINKS - 16) // 64)
    codes = sum(layer.bytes_codes for layer in store.stats().per_layer)
    assert codes <= (packed + 1).sum() * 64 * 64
    store.check()


def test_case_b32_a_store_with_a_limit_stays_within_it_and_agrees_with_what_it_keeps(
    rng: np.random.Generator,
) -> None:
    limit = 8 << 20
    fields = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 128}
    store = make(kvrs.StreamingLLM(1024), fields=fields, sinks=4, recent=64, capacity=limit)
    seqs = store.new()
    k = tensors(rng, 1, 512, dim=128)
    for _ in range(4 * limit // (2 * 2 * 512 * 2 * 128 * 2) + 1):
        for layer in range(2):
            store.append(layer, k, k, seqs)
        stats = store.stats()
        assert stats.bytes_total <= limit
        positions = store.kept_positions(seqs[0], 1, 1)
        assert len(positions) <= 1024 + 15
        assert stats.tokens_kept == sum(len(head) for layer in kept(store, seqs[0]) for head in layer)
    assert store.length(seqs[0]) > 15_000
    assert positions[:4].tolist() == [0, 1, 2, 3]
    assert positions[4] > store.length(seqs[0]) - 1100


def test_case_b32_a_prompt_beyond_the_limit_is_an_error_and_changes_nothing(rng: np.random.Generator) -> None:
    store = make(kvrs.SnapKV(256), capacity=1 << 20, recent=64)
    seqs = store.new()
    data = Data.random(rng, 4096)
    with pytest.raises(kvrs.CapacityError):
        append(store, seqs, data)
    assert store.length(seqs[0]) == 0
    append(store, seqs, data.part(0, 512))
    assert len(store.kept_positions(seqs[0], 0, 0)) == 256
    assert store.stats().bytes_total <= 1 << 20


@pytest.mark.slow
def test_case_b32_snapkv_holds_its_budget_and_says_what_decoding_adds(rng: np.random.Generator) -> None:
    """SnapKV acts on the prompt alone; every later token stays."""
    store = make(kvrs.SnapKV(1024), TQ4, {"layers": 1}, sinks=4, recent=64)
    seqs = store.new()
    data = Data.random(rng, 2048, layers=1)
    append(store, seqs, data)
    prompt = len(store.kept_positions(seqs[0], 0, 0))
    for start in range(0, 4000, 500):
        append(store, seqs, data.part(start % 1500, start % 1500 + 500))
    positions = store.kept_positions(seqs[0], 0, 0)
    assert (prompt, len(positions)) == (1024, 1024 + 4000)
    assert positions[-4000:].tolist() == list(range(2048, 6048))


def test_case_b49_a_window_of_queries_scores_a_long_prompt_without_a_matrix(rng: np.random.Generator) -> None:
    """What is kept of queries and sums for a prompt is linear in it, far below the prompt's own rows."""
    store = make(kvrs.SnapKV(256), fields={"layers": 1, "query_heads": 8}, recent=64)
    seqs = store.new()
    k = rng.standard_normal((1, 2, 8192, 64)).astype(np.float16)
    q = rng.standard_normal((1, 8, 8192, 64)).astype(np.float16)
    store.begin_prompt(seqs)
    store.append(0, k, k, seqs, q=q)
    stats = store.stats()
    assert 0 < stats.bytes_statistics <= 32 * 8 * 64 * 4 + 4 * 2 * 8192
    store.end_prompt(seqs)
    stats = store.stats()
    assert stats.bytes_statistics <= 4096
    assert stats.bytes_window == 2 * 256 * 2 * 64 * 2


# --- life of a store ---------------------------------------------------------------------------------


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
