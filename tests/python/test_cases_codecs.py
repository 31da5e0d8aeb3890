"""Faults that users of compressed KV caches reported elsewhere: degenerate vectors under every codec.

The oracles are those of `test_cases`.
"""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from calibrated_plans import PLANS, Tokens
from conftest import DIGITS
from test_cases import NO_WINDOW, degenerate, normal, oracle_q, store_of
from test_quantisers import PAIRS

HALF = 2.0**-10
"""Relative rounding of a float16 twice: of a scale, and of a smallest value."""


def single(pair: tuple[Any, Any], **settings: Any) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store of one head in which everything but an unfinished group is encoded."""
    store = store_of((2, 1), 64, *pair, **NO_WINDOW, **settings)
    return store, store.new()


def constant(value: float, tokens: int = 128, heads: int = 1, dim: int = 64) -> np.ndarray:
    return np.full((1, heads, tokens, dim), value, np.float32)


# --- B03: zero and constant vectors ---------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_case_b03_every_codec_keeps_zero_and_constant_vectors_finite(pair: tuple[Any, Any]) -> None:
    k, v = (np.tile(side, (1, 1, 2, 1)) for side in degenerate())
    k, v = k[:, :, :128], v[:, :, :128]
    store, seqs = single(pair)
    store.append(0, k, v, seqs)
    assert store.stats().tokens_encoded == 128
    keys, values, _ = store.decode(0, seqs[0], 0)
    assert np.isfinite([keys, values]).all()
    # The two halves are the same 70 tokens from another place on: zeros are where they came.
    assert not keys[~k[0, 0].any(axis=1)].any(), "zero keys come back as zeros"
    assert not values[~v[0, 0].any(axis=1)].any(), "zero values come back as zeros"
    q = np.zeros((1, 2, 2, 64), np.float32)
    q[0, 1] = 1.0
    out, lse = (np.asarray(x) for x in store.attend(0, q, seqs, causal=False, return_lse=True))
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out[0, 0, 0], values.mean(0), atol=(DIGITS + 1e-5) * 3)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_case_b03_every_codec_gives_zeros_for_a_sequence_of_zeros(pair: tuple[Any, Any]) -> None:
    store, seqs = single(pair)
    store.append(0, constant(0), constant(0), seqs)
    out, lse = store.attend(0, np.ones((1, 2, 1, 64), np.float32), seqs, return_lse=True)
    assert not np.asarray(out).any()
    np.testing.assert_allclose(np.asarray(lse), np.log(128), rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("value", [7.0, -3.0])
def test_case_b03_codecs_of_smallest_and_largest_give_constants_back(bits: int, value: float) -> None:
    codec = kvrs.KIVI(bits)
    store, seqs = single((codec, codec))
    with pytest.warns(kvrs.KVWarning, match="one constant"):
        store.append(0, constant(value), constant(value), seqs)
    assert store.stats().tokens_encoded == 128
    for side in store.decode(0, seqs[0], 0)[:2]:
        assert np.abs(side / value - 1).max() <= HALF <= 2.0**-bits


@pytest.mark.parametrize("value", [0.0, 1e-30, 7.0, -3.0])
@pytest.mark.parametrize("name", PLANS)
def test_case_b03_codecs_out_of_data_stay_finite_on_constants(name: str, value: float) -> None:
    """Their means are about 4, so that constants lie far outside of what they were made for."""
    store = kvrs.KVStore(PLANS[name](Tokens()))
    seqs = store.new()
    x = constant(value, heads=2, dim=32)
    store.append(0, x, x, seqs)
    assert store.stats().tokens_encoded == 2 * 128
    for head in range(2):
        assert np.isfinite(store.decode(0, seqs[0], head)[:2]).all()
    for query in (0.0, 1.0):
        q = np.full((1, 4, 1, 32), query, np.float32)
        out, lse = (np.asarray(side) for side in store.attend(0, q, seqs, return_lse=True))
        assert np.isfinite(out).all()
        assert np.isfinite(lse).all()


# --- B12: groups of one member --------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[32, *[1] * 168], [200], [100, 100], [31, 1, 33, 135]], ids=len)
def test_case_b12_a_group_is_encoded_when_it_is_full_and_never_token_by_token(
    sizes: list[int], rng: np.random.Generator
) -> None:
    """Two bits, groups and window of 32: 160 of 200 tokens are sealed, and not exact."""
    codec = kvrs.KIVI(2, group=32)
    store = store_of((1, 1), 128, codec, codec, sinks=0, recent=32)
    seqs, length = store.new(), 0
    k, v = normal(rng, 1, 1, 200, 128), normal(rng, 1, 1, 200, 128)
    for size in sizes:
        store.append(0, k[:, :, length : length + size], v[:, :, length : length + size], seqs)
        length += size
        assert store.stats().bytes_window <= (32 + 32 - 1) * 512
    stats, keys = store.stats(), store.decode(0, seqs[0], 0)[0]
    assert stats.tokens_encoded == 160
    assert stats.bytes_window == 40 * 512
    # Two bits a number; scale and smallest value for a channel of 32 keys, and for 32 channels of a value.
    assert stats.bytes_codes == 2 * 160 * 32
    assert stats.bytes_scales == 2 * 160 * 128 // 32 * 4
    key_bytes = (stats.bytes_codes + stats.bytes_scales) // 2 + 40 * 256
    assert abs(key_bytes - 17_920) <= 0.02 * 17_920
    error = oracle_q(keys[:160], k[0, 0, :160])
    assert 0.2 < error < 0.5, "two bits in groups of 32, neither exact nor lost"
    assert np.array_equal(keys[160:], k[0, 0, 160:])


def test_case_b12_groups_of_one_member_are_refused_by_name() -> None:
    with pytest.raises(kvrs.PlanError, match=r"group.* is 1\b"):
        single((kvrs.KIVI(2, group=1), kvrs.Raw16()))
