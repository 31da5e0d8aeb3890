"""Codes and output errors on keys, values and queries of real models, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import pytest
import safetensors
from conftest import DIGITS, softmax_attention

from tests.reference import phasor, rng, turboquant
from tests.reference.offset import KeyOffset

DATA = Path(__file__).resolve().parents[1] / "data"
START = 256
TOKENS = 512
SINKS, RECENT = 4, 128
SEALED = slice(SINKS, SINKS + (TOKENS - SINKS - RECENT) // 16 * 16)

Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layer:
    """One real layer: keys and values ``[Hkv, T, D]``, the last 64 queries ``[Hq, 64, D]``."""

    name: str
    k: Floats
    v: Floats
    q: Floats
    theta: float
    scale: float
    bias: Floats | None

    @property
    def dim(self) -> int:
        return self.k.shape[2]

    def offset(self, head: int) -> KeyOffset | None:
        """Return the bias of a head as the reference takes it."""
        if self.bias is None:
            return None
        frequencies = (self.theta ** (-np.arange(self.dim // 2) / (self.dim // 2))).astype(np.float32)
        return KeyOffset(phasor.Rope(self.dim, frequencies), self.bias[head])


def load(name: str, bias: bool = True) -> Layer:
    with safetensors.safe_open(DATA / f"{name}.safetensors", "np") as file:
        meta = file.metadata()
        k, v, q = (file.get_tensor(field).astype(np.float32) for field in ("k_post", "v", "q_post_last64"))
        constant = file.get_tensor("k_bias") if bias and "k_bias" in file.keys() else None  # noqa: SIM118
    return Layer(name, k, v, q, float(meta["rope_theta"]), float(meta["attn_scale"]), constant)


LAYERS = {
    "qwen": load("qwen_layer00"),
    "qwen without offset": load("qwen_layer00", bias=False),
    "gemma": load("gemma_layer05"),
}


def store_of(layer: Layer, bits: float) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store that holds the layer, from position 256 on."""
    heads = {"query_heads": len(layer.q), "kv_heads": len(layer.k), "head_dim": layer.dim}
    shape = kvrs.ModelShape(layers=1, rope=kvrs.Rope(layer.theta), **heads)
    offset = None if layer.bias is None else [layer.bias]
    codec = kvrs.TurboQuant(bits)
    store = kvrs.KVStore(kvrs.Plan(shape, codec, codec, sinks=SINKS, recent=RECENT, key_offset=offset))
    seqs = store.new()
    positions = np.arange(START, START + TOKENS)[None]
    store.append(0, layer.k[None], layer.v[None], seqs, positions=positions)
    return store, seqs


def reference(layer: Layer, bits: float) -> tuple[Floats, Floats]:
    """Return keys and values as the reference encodes and decodes them, sinks and recent tokens exact."""
    k, v = layer.k.astype(np.float64), layer.v.astype(np.float64)
    positions = np.arange(START, START + TOKENS)[SEALED]
    for head in range(len(k)):
        offset = layer.offset(head)
        x = (layer.k[head, SEALED], bits, rng.KEY, 0, "unbiased")
        code, scale = turboquant.encode(*x, offset=offset, positions=positions)
        k[head, SEALED] = turboquant.decode(
            code, scale, bits, layer.dim, rng.KEY, 0, offset=offset, positions=positions
        )
        code, scale = turboquant.encode(layer.v[head, SEALED], bits, rng.VALUE, 0, "norm")
        v[head, SEALED] = turboquant.decode(code, scale, bits, layer.dim, rng.VALUE, 0)
    return k, v


def attention(layer: Layer, k: Floats, v: Floats) -> Floats:
    group = len(layer.q) // len(k)
    heads = range(len(layer.q))
    rows = [
        softmax_attention(layer.q[h], k[h // group], v[h // group], TOKENS - 64, layer.scale)[0]
        for h in heads
    ]
    return np.stack(rows)


def error(got: Any, layer: Layer) -> float:
    """Return the relative output error of the last 64 queries against uncompressed keys and values."""
    want = attention(layer, layer.k, layer.v)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def warned(layer: Layer, bits: float) -> tuple[kvrs.KVStore, list[int]]:
    """Return the store; where a bias is in the keys and no offset in the plan, it must have said so."""
    if layer.name.startswith("qwen") and layer.bias is None:
        with pytest.warns(kvrs.KVWarning, match="layer 0, head"):
            return store_of(layer, bits)
    return store_of(layer, bits)


@pytest.mark.parametrize("bits", [4, 3, 2, 2.5])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_store_decodes_the_codes_of_the_reference(layer: Layer, bits: float) -> None:
    store, seqs = warned(layer, bits)
    k, v = reference(layer, bits)
    for head in range(len(k)):
        keys, values, positions = store.decode(0, seqs[0], head)
        assert positions.tolist() == list(range(START, START + TOKENS))
        # One code off by one would differ by a hundredth of a vector's length or more.
        for got, want in ((keys, k[head]), (values, v[head])):
            size = np.linalg.norm(want, axis=1, keepdims=True)
            assert (np.abs(got - want) / size).max() <= 2e-6


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_output_error_is_that_of_the_reference(layer: Layer, bits: float) -> None:
    store, seqs = warned(layer, bits)
    got = error(np.asarray(store.attend(0, layer.q[None], seqs, scale=layer.scale))[0], layer)
    want = error(attention(layer, *reference(layer, bits)), layer)
    assert got == pytest.approx(want, rel=0.01 + DIGITS)


# Relative output errors of the float64 reference, with some room for the rounding of float32.
BOUNDS = {
    "qwen": {4: 0.0088, 3: 0.0245, 2: 0.060},
    "gemma": {4: 0.205, 3: 0.41, 2: 0.98},
}


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("name", BOUNDS)
def test_the_output_error_on_a_real_layer_is_bounded(name: str, bits: float) -> None:
    layer = LAYERS[name]
    store, seqs = store_of(layer, bits)
    out = store.attend(0, layer.q[None], seqs, scale=layer.scale)
    assert error(np.asarray(out)[0], layer) <= BOUNDS[name][bits]


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_key_bias_without_an_offset_ruins_the_output_and_the_store_says_so(bits: float) -> None:
    layer = LAYERS["qwen without offset"]
    store, seqs = warned(layer, bits)
    out = store.attend(0, layer.q[None], seqs, scale=layer.scale)
    assert error(np.asarray(out)[0], layer) > 0.8
