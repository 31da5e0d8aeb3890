"""Faults that users of compressed KV caches reported elsewhere: options without effect, empty values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import contents, shape, tensors
from evicting import POLICIES, named
from kvrs.eval.spec import parse_codec, parse_settings

TQ4 = kvrs.TurboQuant(4)
FOUR_BITS = [TQ4, kvrs.TurboQuant(4, variant="prod"), kvrs.RaBitQ(4), kvrs.KIVI(4, group=64)]
DIMS = [64, 100, 64, 64]
NEEDS_DATA = [kvrs.AATC(3), kvrs.KVTC(3), kvrs.KVQuant(3), kvrs.PALU(0.5, 4)]


# --- B43: options without effect ------------------------------------------------------------------


@pytest.mark.parametrize("codec", FOUR_BITS, ids=str)
def test_case_b43_a_head_size_of_100_in_one_layer_is_compressed_as_the_others(
    codec: Any, rng: np.random.Generator
) -> None:
    plan = kvrs.Plan(shape(layers=4, head_dim=DIMS), codec, codec, sinks=2, recent=16)
    store = kvrs.KVStore(plan)
    seqs = store.new()
    for layer, dim in enumerate(DIMS):
        k = tensors(rng, 1, 2048, dim=dim)
        store.append(layer, k, k, seqs)
    for layer, dim in zip(store.stats().per_layer, DIMS, strict=True):
        assert not layer.raw
        fp16 = 2 * 2 * 2048 * 2 * dim
        assert layer.bytes_codes + layer.bytes_scales + layer.bytes_window <= 0.35 * fp16


def test_case_b43_a_layer_that_stays_uncompressed_says_so_and_why(rng: np.random.Generator) -> None:
    """A sliding window of 20 tokens is hidden before anything of it would be encoded."""
    fields = shape(layers=3, sliding=[None, 20, None])
    store = kvrs.KVStore(kvrs.Plan(fields, [TQ4, TQ4, kvrs.Raw16()], TQ4, sinks=0, recent=16))
    seqs = store.new()
    for layer in range(3):
        k = tensors(rng, 1, 500)
        store.append(layer, k, k, seqs)
    encoded, short, keys_raw = store.stats().per_layer
    assert not encoded.raw
    assert encoded.note is None
    assert short.raw
    assert "stays 16-bit" in str(short.note)
    assert (short.bytes_codes, short.bytes_scales) == (0, 0)
    assert not keys_raw.raw, "its values are encoded"
    assert keys_raw.bytes_codes < encoded.bytes_codes + 500 * 2 * 64 * 2


@pytest.mark.parametrize("codec", NEEDS_DATA, ids=lambda codec: codec.name)
def test_case_b43_a_codec_that_needs_data_is_refused_without_it(codec: Any) -> None:
    for settings in ({"keys": codec, "values": TQ4}, {"keys": TQ4, "values": [TQ4, codec]}):
        if codec.name == "kvquant" and settings["keys"] is TQ4:
            settings = settings | {"values": codec}
        with pytest.raises(kvrs.PlanError, match="calibrat"):
            kvrs.KVStore(kvrs.Plan(shape(), **settings))


UNKNOWN: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "codec": (lambda: parse_codec("turboqant:4"), kvrs.PlanError, ["turboqant", "turboquant", "raw16"]),
    "codec field": (lambda: parse_codec("kivi:2:groups=32"), kvrs.PlanError, ["groups", "group"]),
    "plan field": (
        lambda: parse_settings("keys=raw16,values=raw16,sink=3"),
        kvrs.PlanError,
        ["sink", "sinks"],
    ),
    "policy": (
        lambda: parse_settings("keys=raw16,values=raw16,evict=snap:64"),
        kvrs.PlanError,
        ["snap", "snapkv"],
    ),
    "keyword of a codec": (lambda: kvrs.KIVI(2, groups=32), TypeError, ["groups"]),
    "keyword of a plan": (lambda: kvrs.Plan(shape(), TQ4, TQ4, page=16), TypeError, ["page"]),
    "keyword of a shape": (lambda: shape(head_size=64), TypeError, ["head_size"]),
    "three layers of two": (lambda: kvrs.Plan(shape(), [TQ4] * 3, TQ4), kvrs.PlanError, ["keys", "3", "2"]),
    "a layer twice": (
        lambda: kvrs.Plan(shape(), TQ4, [TQ4, kvrs.Raw16(), TQ4]),
        kvrs.PlanError,
        ["values", "3", "2"],
    ),
    "a text for a codec": (lambda: kvrs.Plan(shape(), TQ4, "fp16"), kvrs.PlanError, ["values[0]", "'fp16'"]),
    "no codec": (lambda: kvrs.Plan(shape(), None, TQ4), kvrs.PlanError, ["keys[0]", "None"]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_case_b43_what_a_plan_does_not_know_raises_by_name(case: str) -> None:
    make, error, words = UNKNOWN[case]
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("layer", [2, -1, 2**40])
def test_case_b43_a_layer_out_of_range_is_an_error_and_nothing_is_stored(
    layer: int, rng: np.random.Generator
) -> None:
    store = kvrs.KVStore(kvrs.Plan(shape(), TQ4, TQ4))
    seqs, k = store.new(), tensors(rng, 1, 40)
    before = contents(store, seqs)
    with pytest.raises(kvrs.ArgumentError, match=rf"layer is {layer}; allowed: 0\.\.=1"):
        store.append(layer, k, k, seqs)
    assert contents(store, seqs) == before


# --- B45: degenerate values -----------------------------------------------------------------------

DEGENERATE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    **{
        f"{codec.__name__} of {bits} bits": (lambda codec=codec, bits=bits: codec(bits), ["bits", str(bits)])
        for codec in (kvrs.KIVI, kvrs.RaBitQ, kvrs.KVQuant, kvrs.KVTC, kvrs.AATC)
        for bits in (0, 9, -1, float("nan"))
    },
    **{
        f"{codec.__name__} of 2.5 bits": (lambda codec=codec: codec(2.5), ["bits", "2.5"])
        for codec in (kvrs.KIVI, kvrs.RaBitQ, kvrs.KVQuant)
    },
    **{
        f"groups of {group}": (lambda group=group: kvrs.KIVI(2, group), ["group", str(group), "16, 32, 64"])
        for group in (0, 1, 33, -1, 128)
    },
    "no signs": (lambda: kvrs.QJL(0), ["m ", "0"]),
    "an odd number of signs": (lambda: kvrs.QJL(17), ["m ", "17", "16"]),
    "no rank": (lambda: kvrs.PALU(0, 4), ["rank", "0"]),
    "more rank than channels": (lambda: kvrs.PALU(1.5, 4), ["rank", "1.5"]),
    "no outliers": (lambda: kvrs.KVQuant(3, outliers=-0.1), ["outliers", "-0.1"]),
    "only outliers": (lambda: kvrs.KVQuant(3, outliers=1.0), ["outliers", "1"]),
    "another format": (lambda: kvrs.FP8("e3m4"), ["format", "e3m4", "e4m3"]),
    "no top": (lambda: kvrs.TopK(0), ["k ", "0"]),
    "sinks below zero": (lambda: kvrs.Plan(shape(), TQ4, TQ4, sinks=-1), ["sinks", "-1"]),
    "a window below zero": (lambda: kvrs.Plan(shape(), TQ4, TQ4, recent=-1), ["recent", "-1"]),
    "half a token": (lambda: kvrs.Plan(shape(), TQ4, TQ4, recent=2.5), ["recent", "2.5"]),
    "a sliding window of none": (lambda: shape(sliding=0), ["sliding", "0"]),
    "no layers": (lambda: shape(layers=0), ["layers", "0"]),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_case_b45_values_that_mean_nothing_raise_at_construction_and_name_the_field(case: str) -> None:
    make, words = DEGENERATE[case]
    with pytest.raises(kvrs.PlanError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("prompt", [1, 2, 10])
@pytest.mark.parametrize("codec", [kvrs.Raw16(), *FOUR_BITS, kvrs.KIVI(2)], ids=str)
def test_case_b45_groups_and_windows_longer_than_the_prompt_leave_it_exact(
    codec: Any, prompt: int, rng: np.random.Generator
) -> None:
    for recent in (0, 64):
        store = kvrs.KVStore(kvrs.Plan(shape(), codec, codec, sinks=0, recent=recent))
        seqs, k = store.new(), tensors(rng, 1, prompt)
        for layer in range(2):
            store.append(layer, k, k, seqs)
        keys, values, positions = store.decode(1, seqs[0], 1)
        assert positions.tolist() == list(range(prompt))
        assert np.array_equal(keys, k[0, 1])
        assert np.array_equal(values, k[0, 1])


@pytest.mark.parametrize("prompt", [1, 2, 10])
@pytest.mark.parametrize("policy", POLICIES, ids=named)
def test_case_b45_a_window_longer_than_the_prompt_evicts_nothing_under_any_policy(
    policy: Any, prompt: int, rng: np.random.Generator
) -> None:
    """A budget of 96 tokens, 64 recent ones, half of a short prompt as a share: the window is kept anyway."""
    store = kvrs.KVStore(kvrs.Plan(shape(), TQ4, TQ4, evict=policy, sinks=2, recent=64))
    seqs, k, q = store.new(), tensors(rng, 1, prompt), tensors(rng, 1, prompt, heads=4)
    for layer in range(2):
        store.extend(layer, q, k, k, seqs)
    for layer in range(2):
        for head in range(2):
            assert store.kept_positions(seqs[0], layer, head).tolist() == list(range(prompt))
            assert np.array_equal(store.decode(layer, seqs[0], head)[0], k[0, head])
