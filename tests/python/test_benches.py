"""The benchmarks run, check the answers they time, and their records become tables and plots."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import kvrs
import pytest

torch = pytest.importorskip("torch", reason="the benchmarks measure torch, which is not installed")
pytest.importorskip("transformers", reason="the benchmarks measure transformers, which is not installed")
pytest.importorskip("rich", reason="the benchmarks print with rich, which is not installed")

from rich.console import Console  # noqa: E402

from benches import decode, extras, floor, inputs, machine, peers, plot, record, table, timing  # noqa: E402
from benches.peers.builder import MissingPeerError  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
COMMITTED = sorted(RESULTS.glob("bench-decode*.json"))
TOKENS = [40, 300]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads(), kvrs.get_num_threads()
    machine.set_threads(1)
    yield
    torch.set_num_threads(before[0])
    kvrs.set_num_threads(before[1])


@pytest.fixture(scope="module")
def run() -> record.Record:
    """Return the record of a tiny run, as it comes back from a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KVRS_GGML", raising=False)
        patch.setattr(timing, "PAUSE_SECONDS", 0.0)
        patch.setattr(floor, "BUFFER_BYTES", 1 << 20)
        made = decode.run(TOKENS, [1], 1e-3, TOKENS[-1], Console(quiet=True))
    return json.loads(json.dumps(made))


def paper() -> Console:
    """Return a console that writes into memory, as wide as where no terminal is."""
    return Console(width=decode.WIDTH, file=io.StringIO())


def written(console: Console) -> str:
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue()


def test_a_run_measures_every_form_or_says_why_not(run: record.Record) -> None:
    for name in peers.all_forms():
        rows = [record.find(run["rows"], name, 1, tokens) for tokens in TOKENS]
        assert (name in run["missing"]) != all(rows), name
    assert "KVRS_GGML" in run["missing"]["ggml f16"]
    assert {row["family"] for row in run["group_one"]} == {"torch", "kvrs"}
    assert {extra["unit"] for extra in run["extras"]} == {"x", "Mvec/s", "us"}


def test_medians_lie_between_the_quartiles(run: record.Record) -> None:
    for row in run["rows"]:
        low, high = row["quartiles_ms"]
        assert 0 < low <= row["median_ms"] <= high, row


def test_a_form_whose_answer_is_wrong_is_not_timed() -> None:
    case = inputs.make(40)
    wrong = timing.Form("torch", "wrong", lambda: -case.exact)
    with pytest.raises(RuntimeError, match="wrong has a relative error of 2"):
        peers.build(case, {"wrong": lambda _case: wrong})


def test_a_missing_peer_keeps_its_reason() -> None:
    def absent(_case: inputs.Case) -> timing.Form:
        raise MissingPeerError("not installed")

    assert peers.build(inputs.make(40), {"absent": absent}) == ([], {"absent": "not installed"})


def test_a_folder_without_ggml_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRS_GGML", str(tmp_path))
    with pytest.raises(MissingPeerError, match=r"no libggml-base.so in \$KVRS_GGML"):
        peers.all_forms()["ggml f16"](inputs.make(40))


def test_a_slow_form_is_called_once_and_its_time_marked() -> None:
    calls = []
    form = timing.Form("torch", "slow", lambda: calls.append(None))
    times = timing.measure([form], 0.001, limit=0.0)
    assert (len(calls), times["slow"].cut, len(times["slow"].ms)) == (1, True, 1)


def test_forms_take_turns_and_restore_their_state_after_every_call() -> None:
    order: list[str] = []
    forms = [
        timing.Form("x", name, lambda name=name: order.append(name), lambda: order.append("restored"))
        for name in "ab"
    ]
    timing.measure(forms, 0.0, rounds=3)
    assert order[1::2] == ["restored"] * (len(order) // 2)
    assert order[::2] == ["a", "b"] * 4


def test_every_cache_of_transformers_stays_at_its_length() -> None:
    case = inputs.make(40)
    for name in ("DynamicCache bf16", "QuantizedCache fp8"):
        forms, missing = peers.build(case, {name: peers.all_forms()[name]})
        for form in forms:
            assert timing.once(form) > 0
            assert case.error(form.step()) < form.tolerance, "the second step attends over other tokens"
        assert forms or missing


def test_the_floor_counts_codes_scales_and_window(run: record.Record) -> None:
    raw, packed = (record.find(run["rows"], f"kvrs {name}", 1, 300) for name in ("raw16", "2 bits"))
    assert raw is not None
    assert packed is not None
    assert raw["read_bytes"] >= 300 * 8 * 2 * 128 * 2 > packed["read_bytes"]
    rate = run["bandwidth"]["1"]
    assert record.floor_of(run, raw) == pytest.approx(raw["read_bytes"] / rate * 1e3)


def test_the_ratio_is_taken_to_the_fastest_form_of_torch() -> None:
    rows = [
        {"form": form, "family": family, "threads": 1, "tokens": 8, "median_ms": ms}
        for form, family, ms in (("a", "torch", 9.0), ("b", "torch", 6.0), ("kvrs 4 bits", "kvrs", 2.0))
    ]
    assert record.torch_best(rows, 1, 8)["form"] == "b"
    assert record.speedup(rows, rows[2]) == 3.0


def test_ragged_lengths_differ_and_are_odd() -> None:
    lengths = extras.ragged_lengths(16383)
    assert len(set(lengths)) == 8
    assert all(length % 2 == 1 and 0 < length < 16384 for length in lengths)


@pytest.mark.parametrize("source", [None, *COMMITTED], ids=lambda path: path.stem if path else "tiny run")
def test_a_record_becomes_tables_of_110_columns_and_a_plot(
    source: Path | None, run: record.Record, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")
    made = run if source is None else json.loads(source.read_text())
    console = paper()
    decode.show(made, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= decode.WIDTH
    for name in [name for name in made["families"] if name not in made["missing"]]:
        assert name in text
    assert machine.line(made["machine"])[:20] in text
    plot.figure(made).savefig(tmp_path / "plot.png", dpi=40)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ms", "text"), [(0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_milliseconds_have_three_digits(ms: float, text: str) -> None:
    assert table.number(ms) == text


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512)).eval()


def test_a_decode_step_of_a_model_is_split_into_weights_and_attention() -> None:
    from benches import endtoend

    made = endtoend.measure(tiny_model(), 200, steps=3)
    assert {"DynamicCache", "kvrs 4 bits"} <= made["caches"].keys()
    for name, row in made["caches"].items():
        assert 0 < row["attention_ms"] < row["ms"], name
        assert row["weights_ms"] > 0, name
    shown = paper()
    heads = {"model": "tiny", "threads": 1, "dtype": "float32", "lengths": [made]}
    shown.print(endtoend.result_table(heads))
    assert "kvrs 4 bits" in written(shown)


def test_the_caches_of_an_endtoend_run_hold_the_same_tokens() -> None:
    from benches import endtoend

    model = tiny_model()
    caches, _ = endtoend.make_caches(model, 200)
    assert {cache.get_seq_length() for cache in caches.values()} == {200}
    ours, exact = caches["kvrs 4 bits"], caches["DynamicCache"]
    k, _, _ = ours.store.decode(1, ours.seqs[0], 0)
    assert (torch.tensor(k) - exact.layers[1].keys[0, 0]).norm() < 0.2 * exact.layers[1].keys[0, 0].norm()
    for cache in caches.values():
        endtoend.step(model, cache)
    assert {cache.get_seq_length() for cache in caches.values()} == {201}
    ours.close()


def test_clocks_leave_no_trace_on_the_attention_functions() -> None:
    from transformers import DynamicCache
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from benches import endtoend

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    cache = DynamicCache()
    with endtoend.attention_clock(cache):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "update" not in vars(cache)


def test_every_policy_has_a_step_beside_attention_over_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benches import policy

    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(policy, "CODECS", {"4 bits": kvrs.TurboQuant(4)})
    rows = policy.steps(300, 1e-3)
    assert [row["policy"] for row in rows] == [*policy.policies(300)]
    for row in rows:
        assert row["attend_ms"] > 0, row
        assert row["to_attend"] == pytest.approx(row["step_ms"] / row["attend_ms"])
        assert row["mean_to_attend"] > 0
    assert rows[0]["to_plain"] == 1.0
    record = {"machine": machine.describe(), "kept": 300, "threads": 1, "model": "none", "steps": rows}
    shown = paper()
    policy.show(record, shown)
    assert all(name in written(shown) for name in policy.policies(300))
    assert max(map(len, written(shown).splitlines())) <= policy.WIDTH


def test_steps_that_evict_hold_their_budget_and_others_return_to_their_length() -> None:
    from benches import policy

    for name, made in policy.policies(300).items():
        attend, step = policy.forms(kvrs.Raw16(), name, made, 300)
        store, seqs = step.step.func.__self__, step.step.args[-1]
        assert attend.step.func.__self__ is store
        for _ in range(40):
            timing.once(step)
        kept = len(store.kept_positions(seqs[0], 0, 0))
        assert 150 <= kept <= 300 + 15, name
        assert (store.length(seqs[0]) > 400) == (name not in ("none", "snapkv"))


def test_the_end_of_a_prompt_is_a_share_of_the_scaled_time_of_a_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benches import policy

    monkeypatch.setattr(policy, "PLAN", "keys=turboquant:4,values=turboquant:4,evict=snapkv:192")
    made = policy.prompt_end(tiny_model(), 400, 100, runs=1)
    assert made["scaled_s"] == pytest.approx(4 * made["forward_s"])
    assert 0 < made["selection_s"] == pytest.approx(made["share"] * made["scaled_s"])
    record = {"machine": machine.describe(), "kept": 1, "threads": 1, "model": "tiny", "steps": []}
    shown = paper()
    policy.show(record | {"prompt_end": made}, shown)
    assert "SnapKV at the end of 400 tokens" in written(shown).replace("\n", " ")


def test_every_codec_is_timed_over_a_store_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from benches import codecs

    monkeypatch.setattr(timing, "PAUSE_SECONDS", 0.0)
    case = inputs.make(300)
    rows = {row["codec"]: row for row in codecs.measure(case, 1e-3)}
    assert {"raw16", "turboquant 4", "kivi 2", "aatc 4", "kvquant 4"} <= set(rows)
    assert rows["turboquant 4"]["to_base"] == 1.0
    assert rows["aatc 4"]["path"] == "dot"
    assert rows["kvquant 4"]["path"] == "tile"
    result = {"tokens": 300, "threads": 1, "rows": list(rows.values())}
    shown = paper()
    shown.print(codecs.table(result))
    assert "turboquant" in written(shown)
