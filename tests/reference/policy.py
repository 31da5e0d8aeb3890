"""Which tokens each policy keeps, in float64: statistics of attention, scores, selection, by the definitions.

Heads may keep different tokens, so everything per key-value head is a list with one array a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.reference import budget as budgets
from tests.reference.rng import mix1
from tests.reference.window import sealed_end

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

AT_THE_END = {"snapkv", "custom", "pyramidkv", "adakv", "entropy"}
"""Policies that act at the end of the prompt alone, as do wrappers of them and what they wrap."""

SCISSORHANDS_RECENT = 10
"""Newest tokens that Scissorhands does not judge."""

REDUCE: dict[str, Callable[[F64], F64]] = {
    "mean": lambda p: p.mean(axis=0),
    "max": lambda p: p.max(axis=0),
    "sum": lambda p: p.sum(axis=0),
}


@dataclass(frozen=True)
class Policy:
    """A policy by name, with the settings that any of them has."""

    name: str
    budget: int | float | None = None
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    reduce: str = "mean"
    history: int = 400
    seed: int = 0
    fast: bool = False
    beta: float = 20.0
    floor: float = 0.2
    scores: Policy | None = None
    function: Callable[[Head], ArrayLike] | None = None

    def tokens(self) -> int | float:
        """Return the budget, its own or that of the policy it wraps."""
        if self.budget is not None:
            return self.budget
        assert self.scores is not None
        return self.scores.tokens()

    def base(self) -> Policy:
        """Return the policy at the bottom of the wrappers."""
        return self.scores.base() if self.scores else self

    def own_recent(self, budget: int) -> int:
        """Return how many of the newest tokens the policy itself never drops."""
        base = self.base()
        own = {"snapkv": base.window, "h2o": budget // 2, "scissorhands": SCISSORHANDS_RECENT}
        return own.get(base.name, 0)

    def recent(self, budget: int, recent: int) -> int:
        """Return how many of the newest tokens are never dropped, with `recent` of the plan."""
        return max(recent, self.own_recent(budget))

    def least_budget(self, sinks: int, recent: int) -> int:
        """Return the fewest tokens that a budget must have: what is protected, and one more."""
        return next(n for n in itertools.count(1) if n > sinks + self.recent(n, recent))

    def acts_later(self) -> bool:
        """Return whether the policy acts after the prompt too, when a group leaves the window."""
        return not {self.name, self.base().name} & AT_THE_END


def probabilities(
    q: NDArray[Any],
    k: NDArray[Any],
    query_index: ArrayLike,
    key_index: ArrayLike,
    scale: float,
    softcap: float | None = None,
    sink_logits: ArrayLike | None = None,
) -> tuple[F64, NDArray[np.bool_]]:
    """Return causal attention ``[group, queries, keys]`` of one key-value head, and what each query sees.

    Parameters
    ----------
    q, k
        ``[group, queries, dim]`` and ``[keys, dim]``.
    query_index, key_index
        Index of each query and key in its sequence.
    scale, softcap, sink_logits
        As in attention; `sink_logits` ``[group]`` joins the denominators.
    """
    seen: NDArray[np.bool_] = np.asarray(query_index)[:, None] >= np.asarray(key_index)[None, :]
    logits = np.einsum("gqd,kd->gqk", q.astype(np.float64), k.astype(np.float64)) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    logits = np.where(seen, logits, -np.inf)
    sink = np.full(len(q), -np.inf) if sink_logits is None else np.asarray(sink_logits, dtype=np.float64)
    top = np.maximum(logits.max(axis=2), sink[:, None])
    weights = np.exp(logits - top[:, :, None])
    total = weights.sum(axis=2) + np.exp(sink[:, None] - top)
    return weights / total[:, :, None], seen


def folded(rows: F64, seen: NDArray[np.bool_], fold: str) -> F64:
    """Return one number a token ``[keys]`` of the reduced `rows` ``[queries, keys]``.

    ``sum`` adds the queries, ``last`` is the last one, ``above`` counts those above ``1 / visible``.
    """
    above = seen & (rows > 1 / seen.sum(axis=1, keepdims=True))
    number: F64 = {"last": rows[-1], "sum": rows.sum(axis=0), "above": above.sum(axis=0).astype(np.float64)}[
        fold
    ]
    return number


class Counters:
    """How often tokens were above average: the current and the previous half of a history of queries.

    Halves begin at multiples of their length, by the index of the query.
    """

    def __init__(self, history: int) -> None:
        self.half = history // 2
        self.halves: list[list[NDArray[np.bool_]]] = [[], []]

    def add(self, above: NDArray[np.bool_], index: int) -> None:
        """Add the query `index`: which tokens ``[tokens]`` were above average."""
        if index % self.half == 0:
            self.halves = [[], self.halves[0]]
        self.halves[0].append(above)

    def keep(self, places: I64) -> None:
        """Keep the tokens at `places`; queries that came before a token have nothing for it."""
        width = int(places.max(initial=-1)) + 1
        padded = [[np.pad(row, (0, max(0, width - len(row)))) for row in half] for half in self.halves]
        self.halves = [[row[places] for row in half] for half in padded]

    def totals(self, tokens: int) -> F64:
        """Return the counts ``[tokens]``."""
        total = np.zeros(tokens)
        for row in self.halves[0] + self.halves[1]:
            total[: len(row)] += row
        return total


def pool(x: ArrayLike, kernel: int, pooling: str) -> F64:
    """Return each number pooled with ``kernel // 2`` neighbours on either side, as far as they exist."""
    values: F64 = np.asarray(x, dtype=np.float64)
    side = kernel // 2
    near = [values[max(0, i - side) : i + side + 1] for i in range(len(values))]
    return np.array([x.max() if pooling == "max" else x.mean() for x in near])


def random_scores(seed: int, layer: int, head: int, index: ArrayLike) -> F64:
    """Return a number in [0, 1) for each index, the same wherever the token stands among the kept ones."""
    key = mix1(seed)
    for part in (layer, head):
        key = mix1(key ^ part)
    return np.array([(mix1(key ^ int(i)) >> 40) / 2**24 for i in np.asarray(index)])


def shares(attention: ArrayLike) -> F64:
    """Return `attention` as a distribution, an equal one if all of it is zero."""
    a: F64 = np.asarray(attention, dtype=np.float64)
    return a / a.sum() if a.sum() > 0 else np.full(len(a), 1 / max(1, len(a)))


def caote(attention: ArrayLike, v: NDArray[Any], fast: bool = False) -> F64:
    """Return ``a / (1 - a) * ||o - v||`` of each token (Goel et al., 2025, arXiv:2504.14051).

    ``o`` is the mean of the values weighted by the shares ``a``, or their plain mean if `fast`.
    """
    a, values = shares(attention), v.astype(np.float64)
    centre = values.mean(axis=0) if fast else a @ values
    change: F64 = a / np.maximum(1 - a, 1e-6) * np.linalg.norm(values - centre, axis=1)
    return change


def droppable(index: ArrayLike, length: int, sinks: int, recent: int) -> slice:
    """Return which places of the kept tokens may go: neither sinks nor the newest `recent`."""
    inside = np.asarray(index)
    start = int((inside < sinks).sum())
    return slice(start, max(start, int((inside < length - recent).sum())))


def select(scores: ArrayLike, inside: slice, picks: int) -> I64:
    """Return the places that stay: all outside `inside` and its best `picks`; ties to the lower place."""
    values: F64 = np.asarray(scores, dtype=np.float64)
    places = np.arange(len(values))
    candidates = places[inside]
    if len(candidates) == len(values):
        picks = max(picks, 1)
    order = sorted(candidates, key=lambda i: (-values[i], i))
    return np.sort(np.concatenate([places[: inside.start], order[:picks], places[inside.stop :]])).astype(
        np.int64
    )


def hit_rate(attention: F64, kept: Sequence[I64], threshold: float) -> float:
    """Return the share of places ``[heads, tokens]`` with attention above `threshold` that were kept."""
    voted = np.zeros(attention.shape, dtype=bool)
    for h, places in enumerate(kept):
        voted[h, places] = True
    important = attention > threshold
    return float((important & voted).sum() / important.sum())


@dataclass
class Head:
    """The kept tokens of one key-value head."""

    index: I64
    k: NDArray[Any]
    v: NDArray[Any]
    attention: F64
    counters: Counters | None = None

    def keep(self, places: I64) -> None:
        """Keep the tokens at `places`."""
        self.index, self.k, self.v = self.index[places], self.k[places], self.v[places]
        self.attention = self.attention[places]
        if self.counters:
            self.counters.keep(places)


class Layer:
    """One layer of one sequence under a policy: a prompt, then single tokens."""

    def __init__(
        self,
        policy: Policy,
        *,
        sinks: int,
        recent: int,
        group: int = 16,
        layer: int = 0,
        layers: int = 1,
        scale: float | None = None,
    ) -> None:
        self.policy, self.sinks, self.plan_recent, self.group = policy, sinks, recent, group
        self.layer, self.layers, self.scale = layer, layers, scale
        self.length = 0
        self.origin = sinks
        self.budget = 0
        self.heads: list[Head] = []

    def prompt(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Take a prompt, q ``[Hq, P, D]``, k ``[Hkv, P, D]``, v ``[Hkv, P, Dv]``, and let the policy act.

        `q` may have only the last queries, if the policy looks at no others.
        """
        self.length = k.shape[1]
        self.heads = [Head(np.arange(self.length), k[h], v[h], np.zeros(self.length)) for h in range(len(k))]
        base = self.policy.base()
        for head in self.heads:
            head.counters = Counters(base.history) if base.name == "scissorhands" else None
        least = self.policy.least_budget(self.sinks, self.plan_recent)
        self.budget = budgets.tokens_of(self.policy.tokens(), self.length, least)
        if self.length:
            wanted = {"snapkv": base.window, "scissorhands": base.history, "tova": 1}
            last = min(wanted.get(base.name, self.length), q.shape[1])
            self.observe(q[:, q.shape[1] - last :])
            self.evict(self.budget)
            if any(len(head.index) < self.length for head in self.heads):
                # What stays of a cut prompt is packed anew, and groups are counted from its window on.
                self.origin = max(self.sinks, self.length - self.plan_recent)

    def step(self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> None:
        """Take one more token, q ``[Hq, D]``, k ``[Hkv, D]``, v ``[Hkv, Dv]``; the policy acts if due."""
        before = sealed_end(self.length, self.origin, self.plan_recent, self.group)
        self.length += 1
        for h, head in enumerate(self.heads):
            head.index = np.append(head.index, self.length - 1)
            head.k = np.concatenate([head.k, k[h][None]])
            head.v = np.concatenate([head.v, v[h][None]])
            head.attention = np.append(head.attention, 0.0)
        self.observe(q[:, None])
        left = sealed_end(self.length, self.origin, self.plan_recent, self.group) > before
        kept = len(self.heads[0].index)
        batch = self.budget // 2 if self.policy.name == "scissorhands" else 0
        if left and self.policy.acts_later() and kept > self.budget:
            self.evict(min(self.budget, kept - batch))

    def observe(self, q: NDArray[Any]) -> None:
        """Take the attention of the newest queries ``[Hq, n, D]``, each reduced over its group first."""
        base = self.policy.base()
        group = len(q) // len(self.heads)
        at = np.arange(self.length - q.shape[1], self.length)
        scale = q.shape[2] ** -0.5 if self.scale is None else self.scale
        for h, head in enumerate(self.heads):
            p, seen = probabilities(q[h * group : (h + 1) * group], head.k, at, head.index, scale)
            rows = REDUCE[base.reduce](p)
            if head.counters:
                for i, row, sees in zip(at, rows, seen, strict=True):
                    head.counters.add(sees & (row > 1 / sees.sum()), int(i))
                head.attention = head.counters.totals(len(head.index))
            elif base.name == "tova":
                head.attention = folded(rows, seen, "last")
            else:
                head.attention = head.attention + folded(rows, seen, "sum")

    def scores(self, h: int, policy: Policy | None = None) -> F64:
        """Return the scores ``[kept]`` of head `h`."""
        policy, head = policy or self.policy, self.heads[h]
        inside = droppable(
            head.index, self.length, self.sinks, self.policy.recent(self.budget, self.plan_recent)
        )
        if policy.name in {"h2o", "tova", "scissorhands"}:
            return head.attention
        if policy.name == "snapkv":
            prefix = pool(head.attention[: inside.stop], policy.kernel, policy.pooling)
            return np.concatenate([prefix, head.attention[inside.stop :]])
        if policy.name == "streamingllm":
            return np.arange(len(head.index), dtype=np.float64)
        if policy.name == "knorm":
            norms: F64 = np.asarray(np.linalg.norm(head.k.astype(np.float64), axis=1))
            return -norms
        if policy.name == "random":
            return random_scores(policy.seed, self.layer, h, head.index)
        if policy.name == "custom":
            assert policy.function is not None
            return np.asarray(policy.function(head), dtype=np.float64)
        assert policy.scores is not None
        if policy.name == "caote":
            return caote(self.scores(h, policy.scores), head.v, policy.fast)
        return self.scores(h, policy.scores)

    def evict(self, tokens: int) -> None:
        """Keep `tokens` per head on average."""
        recent = self.policy.recent(self.budget, self.plan_recent)
        insides = [droppable(head.index, self.length, self.sinks, recent) for head in self.heads]
        picks = max(0, tokens - self.sinks - recent)
        counts = self.counts(insides, picks)
        scores = [self.scores(h) for h in range(len(self.heads))]
        for h, head in enumerate(self.heads):
            head.keep(select(scores[h], insides[h], counts[h]))

    def counts(self, insides: list[slice], picks: int) -> list[int]:
        """Return how many tokens each head chooses by score, `picks` on average."""
        policy, n = self.policy, len(self.heads)
        lens = [inside.stop - inside.start for inside in insides]
        if policy.name == "pyramidkv":
            picks = budgets.pyramid(picks, self.layers, lens[0], policy.beta)[self.layer]
        floor = budgets.floor_tokens(policy.floor, picks)
        if policy.name == "adakv":
            return budgets.ada([self.scores(h)[insides[h]] for h in range(n)], picks * n, floor)
        if policy.name == "entropy":
            entropies = [budgets.entropy_of(head.attention) for head in self.heads]
            return budgets.entropy(entropies, picks * n, floor, lens)
        return [min(picks, length) for length in lens]

    def kept(self) -> list[I64]:
        """Return the indices of the kept tokens of each head."""
        return [head.index for head in self.heads]


def kept_of_prompt(
    policy: Policy,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    sinks: int,
    recent: int,
    layer: int = 0,
    layers: int = 1,
    scale: float | None = None,
) -> list[I64]:
    """Return the indices that each head keeps at the end of a prompt; parameters as in `Layer.prompt`."""
    state = Layer(policy, sinks=sinks, recent=recent, layer=layer, layers=layers, scale=scale)
    state.prompt(q, k, v)
    return state.kept()
