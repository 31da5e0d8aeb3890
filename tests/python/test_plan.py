"""Plans: validation by name, files, hashes, and the offsets."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import kvrs
import numpy as np
import pytest
from conftest import make_store, shape, tensors
from kvrs import _kvrs

TQ4 = kvrs.TurboQuant(bits=4)


def plan(**settings: object) -> kvrs.Plan:
    return kvrs.Plan(shape(), TQ4, TQ4, **settings)


def test_one_setting_or_one_per_layer_are_both_taken() -> None:
    mixed = kvrs.Plan(shape(), keys=[TQ4, kvrs.Raw16()], values=kvrs.TurboQuant(bits=2))
    assert mixed.keys == (TQ4, kvrs.Raw16())
    assert mixed.values == (kvrs.TurboQuant(bits=2),) * 2
    assert [report.keys.split("(")[0] for report in mixed.describe()] == ["turboquant", "raw16"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keys": [TQ4]}, ["keys", "1", "2"]),
        ({"values": [TQ4] * 3}, ["values", "3", "2"]),
        ({"keys": "turboquant:4"}, ["keys[0]", "turboquant:4"]),
        ({"sinks": -1}, ["sinks", "-1"]),
        ({"recent": 1.5}, ["recent", "1.5"]),
        ({"recent": True}, ["recent", "True"]),
        ({"seed": "x"}, ["seed", "x"]),
        ({"window_dtype": "float8"}, ["window_dtype", "float8", "float16", "bfloat16"]),
        ({"window_dtype": "float32"}, ["window_dtype", "float32"]),
        ({"evict": object()}, ["evict", "None"]),
        ({"attend": "topk"}, ["attend", "topk", "None"]),
        ({"key_offset": [None]}, ["key_offset", "1", "2"]),
        ({"key_offset": 3.0}, ["key_offset", "3.0"]),
        ({"key_offset": [np.full((2, 64), np.inf, np.float32), None]}, ["key_offset[0]", "inf"]),
        ({"shape": "gemma"}, ["shape", "gemma"]),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(settings: dict, words: list[str]) -> None:
    arguments = {"shape": shape(), "keys": TQ4, "values": TQ4} | settings
    with pytest.raises(kvrs.PlanError) as caught:
        kvrs.Plan(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "allowed" in str(caught.value)


def test_an_unknown_or_doubled_keyword_is_an_ordinary_type_error() -> None:
    with pytest.raises(TypeError, match="recents"):
        plan(recents=3)
    with pytest.raises(TypeError, match="keys"):
        kvrs.Plan(shape(), TQ4, TQ4, keys=TQ4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"query_heads": 5}, ["query_heads[0]", "5", "multiple"]),
        ({"kv_heads": 0}, ["kv_heads", "0"]),
        ({"head_dim": [64]}, ["head_dim", "1", "2"]),
        ({"head_dim": 4096}, ["head_dim[0]", "4096"]),
        ({"head_dim": True}, ["head_dim[0]", "True"]),
        ({"value_dim": [64, -3]}, ["value_dim[1]", "-3"]),
        ({"sliding": [None, 0]}, ["sliding[1]", "0"]),
        ({"rope": [None, 3.0]}, ["rope[1]", "3.0"]),
        ({"rope": kvrs.Rope(1e4, dim=33)}, ["dim", "33"]),
        ({"rope": kvrs.Rope(1e4, inv_freq=[1.0])}, ["inv_freq", "1"]),
        ({"layers": 0}, ["layers", "0"]),
        ({"layers": 2.0}, ["layers", "2.0"]),
    ],
)
def test_a_wrong_shape_is_named_field_by_field(fields: dict, words: list[str]) -> None:
    with pytest.raises(kvrs.PlanError) as caught:
        shape(**fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("rope", [{"theta": 0.0}, {"theta": -1.0}, {"theta": float("nan")}, {"theta": "1e4"}])
def test_a_rope_without_a_positive_base_is_refused(rope: dict) -> None:
    with pytest.raises(kvrs.PlanError, match=r"rope\.theta"):
        kvrs.Rope(**rope)


@pytest.mark.parametrize("bits", [0, 9, -1, 0.5, float("nan"), float("inf"), True, "4", None])
def test_case_b45_bits_outside_their_range_raise_at_construction_and_name_the_field(bits: object) -> None:
    with pytest.raises(kvrs.PlanError, match="bits"):
        kvrs.TurboQuant(bits=bits)


@pytest.mark.parametrize("bits", [1, 2.5, 3, 8])
def test_case_b45_bits_in_their_range_including_fractions_are_taken(bits: float) -> None:
    assert kvrs.TurboQuant(bits=bits).bits == bits


@pytest.mark.parametrize(("field", "value"), [("variant", "best"), ("scale", "max"), ("rotation", "givens")])
def test_a_wrong_option_of_a_codec_is_named(field: str, value: str) -> None:
    with pytest.raises(kvrs.PlanError, match=f"{field} is {value}"):
        kvrs.TurboQuant(bits=4, **{field: value})


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("windows", [(0, 0), (8, 4), (2, 64), (100, 100)])
def test_case_b45_windows_longer_than_the_prompt_keep_every_token_in_order(
    windows: tuple[int, int], prompt: int, rng: np.random.Generator
) -> None:
    store = make_store(TQ4, sinks=windows[0], recent=windows[1])
    seqs = store.new()
    k = tensors(rng, 1, prompt)
    for layer in range(2):
        store.append(layer, k, k, seqs)
    assert store.length(seqs[0]) == prompt
    assert store.kept_positions(seqs[0], 1, 0).tolist() == list(range(prompt))
    if prompt:
        assert np.array_equal(store.decode(0, seqs[0], 1)[0], k[0, 1])


def test_case_b43_unknown_keys_and_names_raise_and_list_the_valid_ones() -> None:
    with pytest.raises(kvrs.PlanError) as caught:
        _kvrs.check_codec('{"name": "turboqant", "params": {"bits": 4}}')
    assert all(word in str(caught.value) for word in ("turboqant", "turboquant", "raw16"))
    with pytest.raises(kvrs.PlanError) as caught:
        _kvrs.check_codec('{"name": "turboquant", "params": {"bits": 4, "bit": 3}}')
    assert all(word in str(caught.value) for word in ("bit", "variant", "rotation"))
    with pytest.raises(kvrs.PlanError) as caught:
        _kvrs.Plan('{"shape": [], "keys": [], "values": [], "sink": 4}')
    assert all(word in str(caught.value) for word in ("sink", "sinks", "recent"))
    with pytest.raises(TypeError, match="bit"):
        kvrs.TurboQuant(bit=4)


def test_case_b43_four_bits_are_under_35_percent_in_every_layer_that_says_it_is_compressed(
    rng: np.random.Generator,
) -> None:
    fields = {"layers": 4, "head_dim": [64, 100, 64, 64]}
    store = make_store(TQ4, fields=fields, recent=16)
    seqs = store.new()
    for layer, dim in enumerate((64, 100, 64, 64)):
        k = tensors(rng, 1, 2048, dim=dim)
        store.append(layer, k, k, seqs)
    stats = store.stats()
    for layer, dim in zip(stats.per_layer, (64, 100, 64, 64), strict=True):
        fp16 = 2 * 2 * 2048 * 2 * dim
        used = layer.bytes_codes + layer.bytes_scales + layer.bytes_window
        assert used <= 0.35 * fp16 if not layer.raw else layer.note


def test_a_saved_plan_is_the_same_plan(tmp_path: Path, rng: np.random.Generator) -> None:
    offset = [rng.standard_normal((2, 64)).astype(np.float32), None]
    rope = [kvrs.Rope(1e4, inv_freq=[0.5 ** (i + 1) for i in range(32)]), None]
    made = kvrs.Plan(
        shape(rope=rope, sliding=[None, 512]),
        keys=[TQ4, kvrs.Raw16()],
        values=kvrs.TurboQuant(bits=2.5, rotation="dense", scale="norm"),
        sinks=0,
        recent=32,
        key_offset=offset,
        window_dtype="bfloat16",
        seed=2**63,
        name="tiny",
    )
    made.save(tmp_path / "a.kvplan")
    read = kvrs.Plan.load(tmp_path / "a.kvplan")
    assert read == made
    assert read.hash == made.hash
    assert (read.keys, read.values, read.seed, read.name) == (made.keys, made.values, 2**63, "tiny")
    assert np.array_equal(read.key_offset[0].numpy(), offset[0])
    assert read.key_offset[1] is None
    assert read.value_offset is None


def test_the_hash_follows_what_decides_codes_and_nothing_else(rng: np.random.Generator) -> None:
    base = plan()
    offset = [rng.standard_normal((2, 64)).astype(np.float32)] * 2
    assert len(base.hash) == 64
    assert plan().hash == base.hash
    assert plan(name="other", window_dtype="bfloat16").hash == base.hash
    changes = [{"seed": 1}, {"recent": 64}, {"sinks": 0}, {"key_offset": offset}, {"value_offset": offset}]
    assert len({base.hash, *(plan(**change).hash for change in changes)}) == 6


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_cut_plan_file_is_a_format_error_that_names_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.kvplan"
    plan(key_offset=[np.ones((2, 64), np.float32)] * 2).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(kvrs.FormatError, match=r"a\.kvplan"):
        kvrs.Plan.load(path)


def test_a_file_that_is_no_plan_and_a_missing_file_are_format_and_os_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.kvplan"
    path.write_text("not a plan at all, but a long enough text to be read as one")
    with pytest.raises(kvrs.FormatError, match=r"a\.kvplan"):
        kvrs.Plan.load(path)
    with pytest.raises(OSError, match=r"missing\.kvplan"):
        kvrs.Plan.load(tmp_path / "missing.kvplan")
    with pytest.raises(kvrs.FormatError):
        plan().save(tmp_path / "no" / "folder" / "a.kvplan")


def test_another_safetensors_file_is_not_taken_for_a_plan(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"x": np.ones(3, np.float32)}, tmp_path / "a.kvplan")
    with pytest.raises(kvrs.FormatError, match=r"a\.kvplan"):
        kvrs.Plan.load(tmp_path / "a.kvplan")


def test_a_plan_file_of_another_version_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "a.kvplan"
    plan().save(path)
    raw = path.read_bytes()
    assert raw.count(b'"version":"1"') == 1
    path.write_bytes(raw.replace(b'"version":"1"', b'"version":"7"'))
    with pytest.raises(kvrs.FormatError, match="7"):
        kvrs.Plan.load(path)


def test_memory_of_four_bits_is_far_below_16_bits_and_grows_with_tokens() -> None:
    wide = kvrs.Plan(shape(layers=4, head_dim=128), TQ4, TQ4)
    memory = wide.memory(tokens=16384)
    assert memory.bytes_fp16 == 4 * 2 * 2 * 128 * 2 * 16384
    assert memory.bytes_total <= 0.3 * memory.bytes_fp16
    assert wide.memory(tokens=16384, batch=3).bytes_total > 2.8 * memory.bytes_total
    assert "ratio" in repr(memory)
    with pytest.raises(kvrs.ArgumentError, match="tokens"):
        wide.memory(tokens=-1)


def test_a_plan_cannot_be_changed_pickled_or_confused() -> None:
    made = plan()
    with pytest.raises(AttributeError):
        made.recent = 3
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(made)
    assert made == plan()
    assert made != plan(seed=3)
    assert hash(made) == hash(plan())
    assert "TurboQuant(bits=4" in repr(made)
    assert made.hash[:12] in repr(made)


def test_the_window_dtype_may_be_a_torch_or_numpy_type() -> None:
    torch = pytest.importorskip("torch")
    assert plan(window_dtype=torch.bfloat16).window_dtype == "bfloat16"
    assert plan(window_dtype=np.float16).window_dtype == "float16"
    assert plan(window_dtype=np.dtype("float16")).window_dtype == "float16"


def fake_model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a model whose readers are replaced: shape() and constant offsets."""
    shapes = ModuleType("kvrs.hf.shapes")
    shapes.shape_from_config = lambda config: shape(layers=config.layers)
    shapes.offsets_from_model = lambda _model: ([np.full((2, 64), 3.0, np.float32)] * 2, None)
    monkeypatch.setitem(sys.modules, "kvrs.hf", ModuleType("kvrs.hf"))
    monkeypatch.setitem(sys.modules, "kvrs.hf.shapes", shapes)
    return SimpleNamespace(config=SimpleNamespace(layers=2, _name_or_path="fake/tiny"))


def test_for_model_reads_offsets_from_a_model_and_not_from_a_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fake_model(monkeypatch)
    made = kvrs.Plan.for_model(model, keys=TQ4, values=TQ4, recent=16)
    assert np.array_equal(made.key_offset[1].numpy(), np.full((2, 64), 3.0))
    assert (made.value_offset, made.name, made.recent) == (None, "fake/tiny", 16)
    assert kvrs.Plan.for_model(model, TQ4, TQ4, key_offset=False).key_offset is None
    assert kvrs.Plan.for_model(model.config, TQ4, TQ4).key_offset is None
    own = [np.ones((2, 64), np.float32)] * 2
    assert kvrs.Plan.for_model(model, TQ4, TQ4, key_offset=own).key_offset[0].numpy()[0, 0] == 1.0
    with pytest.raises(TypeError, match="recnt"):
        kvrs.Plan.for_model(model, TQ4, TQ4, recnt=3)
