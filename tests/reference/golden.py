"""Golden files: ``python -m tests.reference.golden [--check]`` writes or compares ``tests/golden``."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import LAYOUT_VERSION, codebook, layout, rng, scale, turboquant
from .offset import KeyOffset
from .phasor import Rope, phasor

FOLDER = Path(__file__).resolve().parent.parent / "golden"
SEED = 20250
TEST_DATA = 0x7E57
"""Purpose word of the test data, so that it shares no stream with a rotation."""
SIDES = {"key": rng.KEY, "value": rng.VALUE}
RULES = {"key": "unbiased", "value": "norm"}
PLAIN_BITS = (1, 2, 2.5, 3, 4, 5, 6, 7, 8)
OFFSET_BITS = (2.5, 4, 7)
PART_FILLED_BITS = (2.5, 3, 5)
FIRST_POSITION = 100_003

Tensors = dict[str, NDArray[Any]]
Maker = Callable[[], tuple[Tensors, dict[str, str]]]
_DTYPES = {"u1": "U8", "i1": "I8", "u2": "U16", "u8": "U64", "i8": "I64", "f4": "F32", "f8": "F64"}


def serialise(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file whose bytes depend on the content alone (names and metadata sorted)."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    chunks, at = [], 0
    # Largest element first, so that every tensor is aligned to its element.
    for name in sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n)):
        array = np.ascontiguousarray(tensors[name])
        chunk = array.astype(array.dtype.newbyteorder("<")).tobytes()
        kind = _DTYPES[array.dtype.str[1:]]
        end = at + len(chunk)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, end]}
        chunks.append(chunk)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def _gaussian(name: int, *shape: int) -> NDArray[np.float64]:
    key = rng.stream_key(SEED, TEST_DATA, name, shape[-1])
    return rng.gaussians(key, int(np.prod(shape))).reshape(shape)


def ropes() -> dict[int, Rope]:
    """Return the rotary embedding of each head dimension of the golden files."""

    def inv_freq(theta: float, rotary_dim: int) -> NDArray[np.float32]:
        return (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)

    return {
        64: Rope(64, inv_freq(1e4, 64)),
        80: Rope(80, inv_freq(1e4, 32)),
        128: Rope(128, inv_freq(1e6, 128)),
        256: Rope(256, inv_freq(1e6, 256), "interleaved", 1.25),
    }


def inputs(d: int, side: int) -> NDArray[np.float32]:
    """Return 64 vectors ``[64, d]`` f32, each value an f16: plain, scaled, and the awkward ones."""
    x = _gaussian(2 + side, 64, d) * np.exp2(np.arange(64) % 7 - 3.0)[:, None]
    x[5] = 0
    x[9] = 0
    x[9, d // 3] = -1
    x[17] = 0
    x[17, d - 1] = 65504
    x[21] = 65504
    x[26] = _gaussian(4, 1, d)[0] * 2.0**-23
    x[38] = 0.125
    x[43] = -0.0
    x[51, : d // 2] = 0
    rounded: NDArray[np.float32] = x.astype(np.float16).astype(np.float32)
    return rounded


def bits_name(bits: float) -> str:
    """Return the tensor-name part of a rate: b3, b2.5."""
    return f"b{bits:g}"


def turboquant_file(d: int) -> tuple[Tensors, dict[str, str]]:
    """Return tensors and metadata of the golden file of head dimension `d`."""
    rope = ropes()[d]
    positions = FIRST_POSITION + np.arange(64, dtype=np.int64)
    keep = np.ones(d // 2, dtype=bool)
    keep[3::5] = False
    offset = KeyOffset(rope, (4 * _gaussian(5, d)).astype(np.float16).astype(np.float32), keep)
    mean = (2 * _gaussian(6, d)).astype(np.float16).astype(np.float32)
    x = {name: inputs(d, side) for name, side in SIDES.items()}
    out: Tensors = {"input.key": x["key"], "input.value": x["value"], "positions": positions}
    out |= {"offset.k0": offset.k0, "offset.keep": keep.astype(np.uint8), "offset.mean": mean}
    out |= {"offset.inv_freq": rope.inv_freq, "offset.phase_step": rope.steps}
    for case, rates in (("plain", PLAIN_BITS), ("offset", OFFSET_BITS)):
        extra: dict[str, dict[str, Any]] = {"key": {}, "value": {}}
        if case == "offset":
            extra = {"key": {"offset": offset, "positions": positions}, "value": {"mean": mean}}
        for bits in rates:
            _add_case(out, f"{case}.{bits_name(bits)}", x, bits, extra, d)
    _add_rules(out, x)
    metadata = {
        "d": str(d),
        "pairing": rope.pairing,
        "attention_factor": repr(rope.attention_factor),
        "rotary_dim": str(rope.rotary_dim),
        "rule_key": RULES["key"],
        "rule_value": RULES["value"],
        "rotation": "hadamard",
    }
    return out, metadata


def _add_rules(out: Tensors, x: Tensors) -> None:
    """Add the scales of every rule at 1 and 3 bits, and the dense rotation at 64 channels."""
    for which, side in SIDES.items():
        for bits in (1, 3):
            for rule in scale.RULES:
                scales = turboquant.encode(x[which], bits, side, SEED, rule)[1]
                out[f"plain.b{bits}.{which}.scales.{rule}"] = scales.view(np.uint16)
        if x[which].shape[1] == 64:
            codes, scales = turboquant.encode(x[which], 3, side, SEED, RULES[which], "dense")
            out[f"dense.b3.{which}.codes"] = codes
            out[f"dense.b3.{which}.scales"] = scales.view(np.uint16)


def _add_case(
    out: Tensors, name: str, x: Tensors, bits: float, extra: dict[str, dict[str, Any]], d: int
) -> None:
    """Add codes, scales and pages of one rate to `out`."""
    codes, scales = {}, {}
    for which, side in SIDES.items():
        codes[which], scales[which] = turboquant.encode(
            x[which], bits, side, SEED, RULES[which], **extra[which]
        )
        out[f"{name}.{which}.codes"] = codes[which]
        out[f"{name}.{which}.scales"] = scales[which].view(np.uint16)
    side_layout = layout.Side(tuple(turboquant.runs(bits, d)))
    page = layout.Page(side_layout, side_layout)
    for filled in (64, 16):
        if filled == 64 or (bits in PART_FILLED_BITS and name.startswith("plain")):
            out[f"{name}.page{filled}"] = layout.pack_page(
                page,
                (codes["key"][:filled], codes["value"][:filled]),
                (scales["key"][None, :filled], scales["value"][None, :filled]),
            )


def rng_file() -> tuple[Tensors, dict[str, str]]:
    """Return words, keys, signs, gaussians and one dense rotation."""
    out: Tensors = {"words.seed0": rng.words(0, 8), "words.seed": rng.words(SEED, 8)}
    for side_name, side in SIDES.items():
        for d in (16, 64, 128, 256):
            key = rng.stream_key(SEED, rng.ROTATION_SIGNS, side, d)
            out[f"signs.{side_name}.d{d}.stream"] = np.array([key], np.uint64)
            out[f"signs.{side_name}.d{d}"] = rng.signs(key, d).astype(np.int8)
    key = rng.stream_key(SEED, rng.DENSE_ROTATION, rng.KEY, 80)
    out["gaussians.d80.stream"] = np.array([key], np.uint64)
    out["gaussians.d80"] = rng.gaussians(key, 80)
    out["dense.key.d80"] = rng.dense_rotation(SEED, rng.KEY, 80)
    out["dense.value.d3"] = rng.dense_rotation(SEED, rng.VALUE, 3)
    return out, {}


def phasor_file() -> tuple[Tensors, dict[str, str]]:
    """Return cosines and sines of two frequency tables at positions up to 2^20."""
    positions = np.array([0, 1, 2, 3, 100, 4095, 4096, 65537, 131071, 1_000_003, 1_048_575], np.int64)
    out: Tensors = {"positions": positions}
    for d in (64, 128):
        rope = ropes()[d]
        out[f"d{d}.inv_freq"], out[f"d{d}.phase_step"] = rope.inv_freq, rope.steps
        out[f"d{d}.cos"], out[f"d{d}.sin"] = phasor(positions, rope.steps)
    return out, {}


def codebook_file() -> tuple[Tensors, dict[str, str]]:
    """Return levels, values, thresholds and step of each width."""
    out: Tensors = {}
    for bits in range(1, 9):
        book = codebook.codebook(bits)
        out[f"b{bits}.levels"], out[f"b{bits}.values"] = book.levels, book.values
        out[f"b{bits}.step"] = np.array([book.step], np.float32)
        if bits <= 6:
            out[f"b{bits}.thresholds"] = book.thresholds
    return out, {}


def layout_file() -> tuple[Tensors, dict[str, str]]:
    """Return random codes of one tile and their bytes: a pair of blocks and a lone one, each width."""
    out: Tensors = {}
    for width in (*range(1, 9), 16):
        for channels in (16, 32, 48):
            draws = rng.words(rng.stream_key(SEED, TEST_DATA, width, channels), 16 * channels)
            codes = (draws >> np.uint64(64 - width)).astype(np.uint16).reshape(16, channels)
            name = f"w{width}.c{channels}"
            out[f"{name}.codes"] = codes
            for which, side in SIDES.items():
                out[f"{name}.{which}"] = layout.pack_run(codes, width, side)
    page = layout.raw16_page(48)
    raw = {name: x.astype(np.float16).view(np.uint16)[:16, :48] for name, x in _raw_rows().items()}
    out["raw16.key.rows"], out["raw16.value.rows"] = raw["key"], raw["value"]
    out["raw16.page"] = layout.pack_page(page, (raw["key"], raw["value"]), ([], []))
    return out, {}


def _raw_rows() -> Tensors:
    return {name: inputs(64, side) for name, side in SIDES.items()}


def files() -> dict[str, Maker]:
    """Return the golden files by name, each with the function that makes its content."""
    made: dict[str, Maker] = {
        "rng": rng_file,
        "phasor": phasor_file,
        "codebook": codebook_file,
        "layout": layout_file,
    }
    for d in ropes():
        made[f"turboquant_d{d}"] = partial(turboquant_file, d)
    return made


def render(make: Maker) -> bytes:
    """Return the bytes of one golden file."""
    tensors, metadata = make()
    return serialise(tensors, metadata | {"layout_version": str(LAYOUT_VERSION), "seed": str(SEED)})


def stale(folder: Path = FOLDER) -> list[str]:
    """Return the names of golden files that are missing, unknown or differ from what is made now."""
    made = files()
    bad = [p.stem for p in folder.glob("*.safetensors") if p.stem not in made]
    for name, make in made.items():
        path = folder / f"{name}.safetensors"
        if not path.exists() or path.read_bytes() != render(make):
            bad.append(name)
    return bad


def main() -> int:
    """Write the golden files, or compare them with ``--check``; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare bytes instead of writing")
    if parser.parse_args().check:
        bad = stale()
        print("golden files are current" if not bad else f"golden files differ: {', '.join(bad)}")
        return 1 if bad else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in files().items():
        (FOLDER / f"{name}.safetensors").write_bytes(render(make))
    return 0


if __name__ == "__main__":
    sys.exit(main())
