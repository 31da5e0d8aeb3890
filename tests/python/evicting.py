"""Shared by the tests of eviction: policies, stores that evict, random layers, and the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import shape, tensors
from kvrs.policies import base

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
