"""Shared by the tests of what a user does: small stores, and attention written out in float64."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest

CODECS = [kvrs.Raw16(), kvrs.TurboQuant(bits=4), kvrs.TurboQuant(bits=2.5)]


def shape(**fields: Any) -> kvrs.ModelShape:
    """Return two layers of four query heads over two key-value heads, unless told otherwise."""
    settings = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "rope": kvrs.Rope(1e4)}
    return kvrs.ModelShape(**(settings | fields))


def make_store(codec: Any = None, capacity: Any = None, fields: Any = None, **settings: Any) -> kvrs.KVStore:
    """Return a store with small windows, so that short sequences are encoded."""
    codec = codec or kvrs.Raw16()
    plan = kvrs.Plan(shape(**(fields or {})), codec, codec, **({"sinks": 2, "recent": 8} | settings))
    return kvrs.KVStore(plan, capacity=capacity)


def tensors(rng: np.random.Generator, rows: int, tokens: int, heads: int = 2, dim: int = 64) -> np.ndarray:
    """Return float32 numbers that float16 holds exactly."""
    return rng.standard_normal((rows, heads, tokens, dim)).astype(np.float16).astype(np.float32)


def softmax_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    first: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: float | None = None,
    sliding: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention and log-sum-exp of one head; `first` is the index of query 0, None: not causal."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if first is not None:
        i, j = first + np.arange(len(q))[:, None], np.arange(len(k))[None, :]
        hidden = (j > i) if sliding is None else (j > i) | (i - j >= sliding)
        scores = np.where(hidden, -np.inf, scores)
    column = np.full((len(q), 1), -np.inf if sink is None else sink)
    everything = np.concatenate([scores, column], axis=1)
    top = everything.max(axis=1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(everything - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, weights[:, :-1] @ v / total, 0.0)
        lse = (top + np.log(total))[:, 0]
    return out, lse


def expected(
    store: kvrs.KVStore,
    layer: int,
    seq: int,
    q: np.ndarray,
    own: tuple[np.ndarray, np.ndarray] | None = None,
    causal: bool = True,
    sink_logits: Any = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what one row `q` [Hq, Tq, D] must get from the decoded store (and `own` tokens)."""
    outs, lses = [], []
    layers = store.plan.shape.spec()
    group = layers[layer]["query_heads"] // layers[layer]["kv_heads"]
    for head, queries in enumerate(q):
        k, v, _ = store.decode(layer, seq, head // group)
        first = len(k) - len(queries) if own is None else len(k)
        if own is not None:
            k, v = np.concatenate([k, own[0][head // group]]), np.concatenate([v, own[1][head // group]])
        sink = None if sink_logits is None else float(sink_logits[head])
        window = layers[layer]["sliding"]
        start = first if causal else None
        pair = softmax_attention(queries, k, v, start, sink=sink, sliding=window, **options)
        outs.append(pair[0])
        lses.append(pair[1])
    return np.stack(outs), np.stack(lses)


DIGITS = 0.0 if kvrs.isa() == "scalar" else 0.05
"""What integer digits may add to errors: relative to the largest output, absolute in log-sum-exp."""


def assert_attention(got: Any, want: np.ndarray, logit: float = 40.0) -> None:
    """Compare within the rounding of float32 sums and scores, and of the digits of integer kernels."""
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0.0)
    allowed = (DIGITS + 1e-5 + 4 * 2.0**-23 * logit) * max(np.abs(want).max(initial=0.0), 1e-30)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def contents(store: kvrs.KVStore, seqs: list[int]) -> dict[str, Any]:
    """Return all that a store tells about itself."""
    layers = store.plan.shape.spec()
    held: dict[str, Any] = {"stats": store.stats().to_dict()}
    for seq in seqs:
        held[f"length {seq}"] = [store.length(seq, layer) for layer in range(len(layers))]
        for layer, fields in enumerate(layers):
            for head in range(fields["kv_heads"]):
                k, v, positions = store.decode(layer, seq, head)
                held[f"{seq}.{layer}.{head}"] = (k.tobytes(), v.tobytes(), positions.tolist())
    return held


@pytest.fixture
def rng() -> np.random.Generator:
    """Return the same random numbers in every run."""
    return np.random.default_rng(7)


@pytest.fixture(params=CODECS, ids=lambda codec: f"{codec.name}{getattr(codec, 'bits', '')}")
def codec(request: pytest.FixtureRequest) -> Any:
    """Return each codec in turn."""
    return request.param
