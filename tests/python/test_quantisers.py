"""Quantisers that need no calibration: codes as in the reference, errors as in their papers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import kvrs
import numpy as np
import pytest
from kvrs.codecs import Codec, from_spec
from kvrs.eval.spec import parse_codec
from test_fixtures import LAYERS, RECENT, SINKS, START, TOKENS, Layer, attention, error

from tests.reference import eight_bit, kivi, rabitq, rng, sketch, turboquant

SEED = 7

Floats = np.ndarray[Any, Any]
Pair = tuple[Codec, Codec]

PAIRS: dict[str, Pair] = {
    "int8": (kvrs.Int8(), kvrs.Int8()),
    "fp8 e4m3": (kvrs.FP8(), kvrs.FP8()),
    "fp8 e5m2": (kvrs.FP8("e5m2"), kvrs.FP8("e5m2")),
    "kivi 2": (kvrs.KIVI(2), kvrs.KIVI(2)),
    "kivi 4": (kvrs.KIVI(4, group=64), kvrs.KIVI(4, group=16)),
    "rabitq 1": (kvrs.RaBitQ(1), kvrs.RaBitQ(1)),
    "rabitq 2": (kvrs.RaBitQ(2), kvrs.RaBitQ(2)),
    "rabitq 4": (kvrs.RaBitQ(4, error_bound=True), kvrs.RaBitQ(4)),
    "rabitq 6": (kvrs.RaBitQ(6), kvrs.RaBitQ(5)),
    "rabitq 8": (kvrs.RaBitQ(8), kvrs.RaBitQ(7)),
    "prod 1": (kvrs.TurboQuant(1, variant="prod"), kvrs.TurboQuant(1, variant="prod")),
    "prod 3": (kvrs.TurboQuant(3, variant="prod"), kvrs.TurboQuant(2, variant="prod")),
    "prod 4": (
        kvrs.TurboQuant(4, variant="prod", sketch="orthogonal"),
        kvrs.TurboQuant(5, variant="prod", rotation="dense"),
    ),
    "qjl": (kvrs.QJL(), kvrs.KIVI(2)),
}


def sealed(group: int) -> slice:
    """Return the tokens that are encoded."""
    return slice(SINKS, SINKS + (TOKENS - SINKS - RECENT) // group * group)


def group_of(pair: Pair) -> int:
    return pair[0].group if isinstance(pair[0], kvrs.KIVI) else 16


def plan_of(layer: Layer, pair: Pair, **settings: Any) -> kvrs.Plan:
    heads = {"query_heads": len(layer.q), "kv_heads": len(layer.k), "head_dim": layer.dim}
    shape = kvrs.ModelShape(layers=1, rope=kvrs.Rope(layer.theta), **heads)
    offset = None if layer.bias is None else [layer.bias]
    return kvrs.Plan(shape, *pair, sinks=SINKS, recent=RECENT, key_offset=offset, seed=SEED, **settings)


def store_of(layer: Layer, pair: Pair, **settings: Any) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store that holds the layer, from position 256 on."""
    store = kvrs.KVStore(plan_of(layer, pair, **settings))
    seqs = store.new()
    positions = np.arange(START, START + TOKENS)[None]
    store.append(0, layer.k[None], layer.v[None], seqs, positions=positions)
    return store, seqs


def decoded_key(codec: Any, x: Floats, offset: Any, positions: Floats) -> Floats:
    """Return keys as the reference encodes and decodes them."""
    place: dict[str, Any] = {"offset": offset, "positions": positions}
    if isinstance(codec, kvrs.KIVI):
        return kivi.keys(x, codec.bits, codec.group, **place)[1]
    if isinstance(codec, kvrs.QJL):
        return sketch.qjl(x, codec.m, SEED, **place)[2]
    return decoded(codec, x, rng.KEY, place)


def decoded_value(codec: Any, x: Floats, mean: Floats | None) -> Floats:
    """Return values as the reference encodes and decodes them."""
    if isinstance(codec, kvrs.KIVI):
        return kivi.values(x, codec.bits, codec.group, mean)[1]
    return decoded(codec, x, rng.VALUE, {"mean": mean})


def decoded(codec: Any, x: Floats, side: int, place: dict[str, Any]) -> Floats:
    if isinstance(codec, kvrs.TurboQuant):
        return sketch.prod(x, codec.bits, side, SEED, codec.sketch or "gaussian", codec.rotation, **place)[1]
    if isinstance(codec, kvrs.RaBitQ):
        codes, scale, _ = rabitq.encode(x, codec.bits, side, SEED, **place)
        return rabitq.decode(codes, scale, codec.bits, x.shape[1], side, SEED, **place)
    return eight_bit.round_trip(x, getattr(codec, "format", "int8"), **place)[1]


def reference(layer: Layer, pair: Pair, mean: Floats | None = None) -> tuple[Floats, Floats]:
    """Return keys and values with the sealed tokens as the reference encodes and decodes them."""
    k, v, tokens = layer.k.astype(np.float64), layer.v.astype(np.float64), sealed(group_of(pair))
    positions = np.arange(START, START + TOKENS)[tokens]
    for head in range(len(k)):
        own = None if mean is None else mean[head]
        k[head, tokens] = decoded_key(pair[0], layer.k[head, tokens], layer.offset(head), positions)
        v[head, tokens] = decoded_value(pair[1], layer.v[head, tokens], own)
    return k, v


def check(store: kvrs.KVStore, seq: int, expected: tuple[Floats, Floats]) -> None:
    """Assert that every vector is the reference's: one code off by one would be seen."""
    for head in range(len(expected[0])):
        keys, values, _ = store.decode(0, seq, head)
        for got, want in ((keys, expected[0][head]), (values, expected[1][head])):
            size = np.linalg.norm(want, axis=1, keepdims=True)
            assert (np.abs(got - want) / size).max() <= 4e-6


# --- the codes of the reference --------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_the_store_decodes_the_codes_of_the_reference(name: str, pair: Pair) -> None:
    layer = LAYERS[name]
    store, seqs = store_of(layer, pair)
    check(store, seqs[0], reference(layer, pair))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_value_mean_is_taken_out_and_added_by_every_codec(pair: Pair) -> None:
    layer = LAYERS["gemma"]
    mean = layer.v.mean(axis=1).astype(np.float32) + 1
    store, seqs = store_of(layer, pair, value_offset=[mean])
    check(store, seqs[0], reference(layer, pair, mean))


@pytest.mark.parametrize("dim", [72, 80, 112])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_dimensions_that_are_no_power_of_two_are_those_of_the_reference(pair: Pair, dim: int) -> None:
    draws = np.random.default_rng(dim)
    k, v = (draws.standard_normal((1, TOKENS, dim)).astype(np.float16).astype(np.float32) for _ in "kv")
    layer = Layer("random", k, v, draws.standard_normal((2, 64, dim)).astype(np.float32), 1e4, 0.1, None)
    store, seqs = store_of(layer, pair)
    expected = reference(layer, pair)
    check(store, seqs[0], expected)
    got = np.asarray(store.attend(0, layer.q[None], seqs, scale=layer.scale))[0]
    want = attention(layer, *expected)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.03


# --- unbiased inner products -----------------------------------------------------------------------


def unit_vectors(count: int, d: int, seed: int) -> Floats:
    x = np.random.default_rng(seed).standard_normal((count, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)


def pairs_of_cosine_half(count: int, d: int) -> tuple[Floats, Floats]:
    """Return keys of about unit length and queries at 60 degrees to them."""
    k = unit_vectors(count, d, 11).astype(np.float64)
    q = unit_vectors(count, d, 12).astype(np.float64)
    q -= (q * k).sum(1, keepdims=True) / (k * k).sum(1, keepdims=True) * k
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    return k.astype(np.float32), 0.5 * k + np.sqrt(0.75) * q


def stored(codec: Any, k: Floats, seed: int) -> Floats:
    """Return keys ``[n, d]`` as a store of that seed decodes them."""
    shape = kvrs.ModelShape(layers=1, query_heads=1, kv_heads=1, head_dim=k.shape[1], rope=None)
    store = kvrs.KVStore(kvrs.Plan(shape, codec, kvrs.Int8(), sinks=0, recent=0, seed=seed))
    seqs = store.new()
    store.append(0, k[None, None], k[None, None], seqs)
    return store.decode(0, seqs[0], 0)[0].astype(np.float64)


SKETCHES = {
    "prod 1": kvrs.TurboQuant(1, variant="prod"),
    "prod 2": kvrs.TurboQuant(2, variant="prod"),
    "prod 3": kvrs.TurboQuant(3, variant="prod"),
    "prod 4": kvrs.TurboQuant(4, variant="prod"),
    "prod 1 orthogonal": kvrs.TurboQuant(1, variant="prod", sketch="orthogonal"),
    "prod 3 orthogonal": kvrs.TurboQuant(3, variant="prod", sketch="orthogonal"),
    "qjl": kvrs.QJL(64),
}


@pytest.mark.parametrize("codec", SKETCHES.values(), ids=SKETCHES)
def test_sketches_are_unbiased_over_their_draw(codec: Any) -> None:
    d, seeds = 64, 60
    k, q = pairs_of_cosine_half(256, d)
    # One sketch serves all vectors of a store, so the mean of a seed is one sample.
    slopes = [((stored(codec, k, seed) - k) * q).sum(1).mean() / 0.5 for seed in range(seeds)]
    mean, deviation = np.mean(slopes), np.std(slopes, ddof=1) / np.sqrt(seeds)
    assert abs(mean) < 3 * deviation
    assert deviation < 0.02


@pytest.mark.parametrize("codec", SKETCHES.values(), ids=SKETCHES)
def test_sketches_err_below_the_bounds_of_their_papers(codec: Any) -> None:
    d = 128
    k, q = pairs_of_cosine_half(512, d)
    error = np.mean([np.mean(((stored(codec, k, seed) - k) * q).sum(1) ** 2) for seed in range(4)])
    if isinstance(codec, kvrs.QJL):
        assert error == pytest.approx((np.pi / 2 - 0.25) / codec.m, rel=0.1)
    else:
        assert 4.0**-codec.bits / d < error < np.sqrt(3) * np.pi**2 / d * 4.0**-codec.bits


# RMSE * sqrt(d) of <q, k>, d = 128, unit vectors of cosine 1/2. `raw` is that of the gaussian book (.737,
# .284, .125 with the exact book of the sphere).
RMSE = {
    2: {"raw": 0.7325, "norm": 0.450, "unbiased": 0.313, "prod": 0.728},
    3: {"raw": 0.2788, "norm": 0.186, "unbiased": 0.161, "prod": 0.420},
    4: {"raw": 0.1244, "norm": 0.087, "unbiased": 0.083, "prod": 0.228},
}


@pytest.mark.parametrize("bits", RMSE)
def test_inner_products_err_as_the_scale_rule_says(bits: int) -> None:
    d = 128
    k, q = pairs_of_cosine_half(4096, d)
    for rule, expected in RMSE[bits].items():
        options: Any = {"variant": "prod"} if rule == "prod" else {"scale": rule}
        gaps = ((stored(kvrs.TurboQuant(bits, **options), k, 3) - k) * q).sum(1)
        assert np.sqrt(np.mean(gaps**2) * d) == pytest.approx(expected, rel=0.05), rule


# --- RaBitQ ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_error_bound_of_rabitq_covers_what_it_says(bits: int) -> None:
    d, count = 128, 20_000
    k, q = unit_vectors(count, d, 21) * np.float32(3), unit_vectors(count, d, 22).astype(np.float64) * 2
    codes, scale, bound = rabitq.encode(k, bits, rng.KEY, SEED)
    gap = np.abs(((rabitq.decode(codes, scale, bits, d, rng.KEY, SEED) - k) * q).sum(1))
    inside = gap <= bound.astype(np.float64) * np.linalg.norm(q, axis=1) * rabitq.DEVIATIONS
    # A normal variable stays within 1.9 deviations with probability .9426; the sample's deviation is .0016.
    assert inside.mean() >= 0.94 - 0.002
    assert inside.mean() < 0.955


def test_the_even_grid_is_near_the_best_rescaled_one() -> None:
    k = unit_vectors(64, 128, 31)
    for bits, slack in ((2, 1.15), (4, 1.25), (6, 1.6)):
        codes, scale, _ = rabitq.encode(k, bits, rng.KEY, SEED)
        out = rabitq.decode(codes, scale, bits, 128, rng.KEY, SEED)
        even = 1 - np.mean((out * k).sum(1) / np.linalg.norm(out, axis=1))
        best = [rabitq.best_grid(x.astype(np.float64), bits) for x in k]
        best_miss = 1 - np.mean([g @ x / np.linalg.norm(g) for g, x in zip(best, k, strict=True)])
        assert best_miss <= even <= slack * best_miss, (bits, even, best_miss)


def test_rabitq_and_turboquant_of_one_bit_are_the_same() -> None:
    k = unit_vectors(64, 64, 41)
    assert np.array_equal(stored(kvrs.RaBitQ(1), k, 5), stored(kvrs.TurboQuant(1), k, 5))


# --- real layers -----------------------------------------------------------------------------------

# Output errors of the float64 reference on the last 64 queries, with a little room.
LEVELS = {
    "int8": {"qwen": 0.0014, "gemma": 0.031},
    "fp8 e4m3": {"qwen": 0.0029, "gemma": 0.031},
    "fp8 e5m2": {"qwen": 0.0053, "gemma": 0.057},
    "kivi 2": {"qwen": 0.057, "gemma": 0.34},
    "kivi 4": {"qwen": 0.0056, "gemma": 0.051},
    "rabitq 1": {"qwen": 0.122, "gemma": 1.63},
    "rabitq 2": {"qwen": 0.064, "gemma": 1.02},
    "rabitq 4": {"qwen": 0.0125, "gemma": 0.2},
    "rabitq 6": {"qwen": 0.0049, "gemma": 0.057},
    "rabitq 8": {"qwen": 0.0014, "gemma": 0.018},
    "prod 1": {"qwen": 0.61, "gemma": 2.75},
    "prod 3": {"qwen": 0.144, "gemma": 1.31},
    "prod 4": {"qwen": 0.0142, "gemma": 0.34},
    "qjl": {"qwen": 0.124, "gemma": 1.81},
}


@lru_cache
def uncompressed(name: str) -> Floats:
    """Return the output of exact keys and values."""
    return attention(LAYERS[name], LAYERS[name].k, LAYERS[name].v)


@pytest.mark.parametrize("name", ["qwen", "gemma"])
@pytest.mark.parametrize("codec", LEVELS)
def test_the_output_error_is_that_of_the_reference(name: str, codec: str) -> None:
    layer, pair = LAYERS[name], PAIRS[codec]
    store, seqs = store_of(layer, pair)
    exact, size = uncompressed(name), np.linalg.norm(uncompressed(name))
    out = np.asarray(store.attend(0, layer.q[None], seqs, scale=layer.scale), np.float64)[0]
    got = np.linalg.norm(out - exact) / size
    want = np.linalg.norm(attention(layer, *reference(layer, pair)) - exact) / size
    assert got == pytest.approx(want, rel=0.04)
    assert got <= LEVELS[codec][name]


@pytest.mark.parametrize("codec", [kvrs.FP8(), kvrs.Int8()], ids=str)
def test_a_key_offset_helps_codecs_that_do_not_rotate_too(codec: Any) -> None:
    errors = {}
    for name in ("qwen", "qwen without offset"):
        layer = LAYERS[name]
        if layer.bias is None:
            with pytest.warns(kvrs.KVWarning, match="layer 0, head"):
                store, seqs = store_of(layer, (codec, codec))
        else:
            store, seqs = store_of(layer, (codec, codec))
        errors[name] = error(np.asarray(store.attend(0, layer.q[None], seqs, scale=layer.scale))[0], layer)
    assert errors["qwen"] < 0.5 * errors["qwen without offset"]


def test_kivi_takes_dead_channels_as_they_are() -> None:
    layer = LAYERS["gemma"]
    tokens = sealed(32)
    spread = layer.k[0, tokens].reshape(-1, 32, layer.dim)
    ranges = (spread.max(axis=1) - spread.min(axis=1)) / 3
    dead = ranges < 2.0**-25
    _, out = kivi.keys(layer.k[0, tokens], 2, 32)
    store, seqs = store_of(layer, PAIRS["kivi 2"])
    got = store.decode(0, seqs[0], 0)[0][tokens].reshape(spread.shape)
    assert np.array_equal(got, out.reshape(spread.shape).astype(np.float32))
    assert np.abs(got - spread).max(axis=1)[dead].max(initial=0.0) < 1e-6


# --- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("kivi:2", kvrs.KIVI(2)),
        ("kivi:4:64", kvrs.KIVI(4, group=64)),
        ("rabitq:4", kvrs.RaBitQ(4)),
        ("rabitq:4:error_bound=true", kvrs.RaBitQ(4, error_bound=True)),
        ("qjl", kvrs.QJL()),
        ("qjl:128", kvrs.QJL(128)),
        ("int8", kvrs.Int8()),
        ("fp8", kvrs.FP8()),
        ("fp8:e5m2", kvrs.FP8("e5m2")),
        ("turboquant:3:prod", kvrs.TurboQuant(3, variant="prod")),
        ("turboquant:3:prod:sketch=orthogonal", kvrs.TurboQuant(3, variant="prod", sketch="orthogonal")),
    ],
)
def test_specifications_name_every_codec(text: str, codec: Any) -> None:
    assert parse_codec(text) == codec
    assert from_spec(codec.spec()) == codec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kvrs.KIVI(9), r"bits is 9.*allowed: an integer in 1\.\.=8"),
        (lambda: kvrs.KIVI(2, group=128), "group is 128.*allowed: 16, 32, 64"),
        (lambda: kvrs.RaBitQ(2.5), r"bits is 2\.5.*allowed: an integer in 1\.\.=8"),
        (lambda: kvrs.RaBitQ(2, error_bound="yes"), "error_bound is 'yes'; allowed: True or False"),
        (lambda: kvrs.QJL(100), "m is 100.*allowed: a multiple of 16"),
        (lambda: kvrs.FP8("e3m4"), "format is e3m4.*allowed: e4m3, e5m2"),
        (lambda: kvrs.TurboQuant(2.5, variant="prod"), r"bits is 2\.5.*variant prod"),
        (lambda: kvrs.TurboQuant(3, variant="prod", scale="lsq"), "scale is lsq.*None or raw"),
        (lambda: kvrs.TurboQuant(3, sketch="orthogonal"), "sketch is orthogonal.*no sketch"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(kvrs.PlanError, match=message):
        make()


def test_what_values_cannot_use_is_refused_with_the_codecs_that_they_can() -> None:
    shape = kvrs.ModelShape(layers=2, query_heads=2, kv_heads=1, head_dim=64)
    with pytest.raises(kvrs.PlanError, match=r"values\[0\]\.name is qjl.*keys only.*kivi"):
        kvrs.Plan(shape, kvrs.QJL(), kvrs.QJL())
    with pytest.raises(kvrs.PlanError, match=r"values\[0\]\.error_bound is true.*false for values"):
        kvrs.Plan(shape, kvrs.QJL(), kvrs.RaBitQ(4, error_bound=True))


def test_a_plan_with_every_codec_comes_back_from_its_file(tmp_path: Any) -> None:
    layer = LAYERS["gemma"]
    for name, pair in PAIRS.items():
        made = plan_of(layer, pair)
        made.save(tmp_path / "plan.kvplan")
        read = kvrs.Plan.load(tmp_path / "plan.kvplan")
        assert (read.hash, read.keys, read.values) == (made.hash, made.keys, made.values), name


def test_turboquant_stays_what_it_was() -> None:
    k = unit_vectors(64, 64, 51)
    codes, scale = turboquant.encode(k, 3, rng.KEY, SEED, "unbiased")
    want = turboquant.decode(codes, scale, 3, 64, rng.KEY, SEED)
    assert np.abs(stored(kvrs.TurboQuant(3), k, SEED) - want).max() < 2e-6
