"""Every codec with every policy: near the exact attention over what is kept, with the bytes foretold."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from calibrated_plans import HEADS, PLANS, D, Tokens, shape
from evicting import POLICIES, named

PROMPT, STEPS, SINKS, RECENT = 400, 40, 2, 8
TOKENS = Tokens(PROMPT + STEPS)
PLAIN = {
    "raw16": kvrs.Raw16(),
    "turboquant": kvrs.TurboQuant(4),
    "turboquant prod": kvrs.TurboQuant(5, variant="prod"),
    "rabitq": kvrs.RaBitQ(4),
    "qjl": kvrs.QJL(m=1024),
    "kivi": kvrs.KIVI(4, group=16),
    "int8": kvrs.Int8(),
    "fp8 e4m3": kvrs.FP8(),
    "fp8 e5m2": kvrs.FP8("e5m2"),
}
KEEPS = {"qjl": kvrs.KIVI(4, group=16)}
"""Codecs of the values where that of the keys takes none."""
MOST_ERROR = {"raw16": 0.002, "qjl": 0.6}
"""Relative error of the output; one-bit sketches of keys are that rough."""


def plan(codec: str, policy: Any) -> kvrs.Plan:
    settings: dict[str, Any] = {"evict": policy, "sinks": SINKS, "recent": RECENT}
    if codec in PLANS:
        return PLANS[codec](TOKENS, bits=4, **settings)
    offsets = {"key_offset": [TOKENS.km], "value_offset": [TOKENS.vm]}
    return kvrs.Plan(shape(), PLAIN[codec], KEEPS.get(codec, PLAIN[codec]), **settings, **offsets)


def kept_attention(store: kvrs.KVStore, seq: int, q: np.ndarray) -> np.ndarray:
    """Return the exact attention ``[4, D]`` over the tokens that each head has."""
    out = []
    for head in range(HEADS):
        kept = np.asarray(store.kept_positions(seq, 0, head))
        logits = q[2 * head : 2 * head + 2] @ TOKENS.k[head, kept].T * D**-0.5
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out.append(weights / weights.sum(1, keepdims=True) @ TOKENS.v[head, kept])
    return np.concatenate(out)


def run(store: kvrs.KVStore, seqs: list[int]) -> None:
    """Feed a prompt in one call, then tokens one by one."""
    rng = np.random.default_rng(7)
    q = np.float32(rng.standard_normal((1, 4, PROMPT + STEPS, D)) * 0.3)
    k, v = (np.float32(x[None]) for x in (TOKENS.k, TOKENS.v))
    for first, last in ((0, PROMPT), *((t, t + 1) for t in range(PROMPT, PROMPT + STEPS))):
        store.extend(0, *(x[:, :, first:last] for x in (q, k, v)), seqs)


@pytest.mark.parametrize("policy", POLICIES, ids=named)
@pytest.mark.parametrize("codec", [*PLAIN, *PLANS])
def test_every_codec_works_with_every_policy(codec: str, policy: Any) -> None:
    store = kvrs.KVStore(plan(codec, policy))
    seqs = store.new()
    run(store, seqs)
    store.check()
    stats = store.stats()
    assert sum(stats.policies[0].tokens_evicted for _ in (0,)) > 0
    assert stats.bytes_total == pytest.approx(
        stats.bytes_codes
        + stats.bytes_scales
        + stats.bytes_window
        + stats.bytes_tables
        + stats.bytes_statistics
        + stats.bytes_slack
    )
    assert stats.tokens_kept < HEADS * (PROMPT + STEPS)
    q = np.float32(np.random.default_rng(8).standard_normal((1, 4, 1, D)) * 0.3)
    got = np.asarray(store.attend(0, q, seqs))[0, :, 0]
    want = kept_attention(store, seqs[0], np.float64(q[0, :, 0]))
    assert np.isfinite(got).all()
    centred = want - np.repeat(TOKENS.vm, 2, axis=0)
    assert np.linalg.norm(got - want) <= MOST_ERROR.get(codec, 0.2) * np.linalg.norm(centred)
    store.free(seqs[0])
    assert store.stats().tokens_kept == 0


@pytest.mark.parametrize("codec", [*PLAIN, *PLANS])
def test_bytes_are_those_that_the_plan_foretold(codec: str) -> None:
    which = plan(codec, None)
    store = kvrs.KVStore(which)
    run(store, store.new())
    stats, memory = store.stats(), which.memory(PROMPT + STEPS)
    for field in ("bytes_codes", "bytes_scales", "bytes_window", "bytes_constants"):
        assert getattr(stats, field) == getattr(memory, field), field
    assert (stats.bytes_codes > 0) == (codec != "raw16")
