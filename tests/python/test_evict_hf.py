"""Eviction in `generate`: prompts framed by the adapter, logical lengths, and the text of a cut cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvrs  # noqa: E402
import kvrs.hf  # noqa: E402
from kvrs import cli  # noqa: E402
from kvrs.eval import capture, models, perplexity, pictures, policies, results, selection  # noqa: E402
from kvrs.eval.generation import RoundedCache  # noqa: E402
from kvrs.hf.compat import CACHE_ARGUMENT  # noqa: E402
from test_eval import Letters  # noqa: E402
from test_hf import batch, gemma3, generate, gpt_oss, llama, qwen2  # noqa: E402

RAW = kvrs.Raw16()
PROMPT, NEW = 90, 12
SNAP = kvrs.SnapKV(32, window=8)


def plan_of(model: Any, evict: Any = SNAP, **settings: Any) -> kvrs.Plan:
    settings = {"sinks": 2, "recent": 8, "keys": RAW, "values": RAW} | settings
    return kvrs.Plan.for_model(model, evict=evict, **settings)


def cut(model: Any, ids: Any, store: kvrs.KVStore, seq: int, new: int) -> list[Any]:
    """Return greedy logits of transformers' own cache from which a prompt's evicted tokens were taken."""
    cache, logits = RoundedCache(config=model.config), []
    step, position = ids, 0
    for _ in range(new):
        positions = torch.arange(position, position + step.shape[1])[None]
        with torch.no_grad():
            output = model(step, position_ids=positions, **{CACHE_ARGUMENT: cache})
        if position == 0:
            for index, layer in enumerate(cache.layers):
                heads = range(layer.keys.shape[1])
                kept = [store.kept_positions(seq, index, head) for head in heads]
                kept = [torch.from_numpy(places[places < ids.shape[1]]) for places in kept]
                layer.keys = torch.stack([layer.keys[0, h, kept[h]] for h in heads])[None]
                layer.values = torch.stack([layer.values[0, h, kept[h]] for h in heads])[None]
        position += step.shape[1]
        logits.append(output.logits[:, -1])
        step = output.logits[:, -1:].argmax(-1)
    return logits


@pytest.mark.parametrize("family", [llama, qwen2])
@pytest.mark.parametrize(
    "policy", [SNAP, kvrs.PyramidKV(32, scores=kvrs.SnapKV(window=8))], ids=lambda p: p.name
)
def test_a_prompt_is_answered_from_what_was_kept_of_it(family: Any, policy: Any) -> None:
    model, inputs = family(), batch([PROMPT])
    cache = kvrs.hf.KVCache(model, plan_of(model, policy))
    ours = generate(model, inputs, cache, NEW)
    (seq,) = cache.seqs
    counts = [len(cache.store.kept_positions(seq, layer, 0)) for layer in range(3)]
    assert sum(counts) == 3 * (32 + NEW - 1)
    assert (len(set(counts)) == 1) == (policy is SNAP)
    if policy is not SNAP:
        return  # transformers' masks take one length for all layers
    assert cache.store.length(seq) == cache.get_seq_length() == PROMPT + NEW - 1
    want = cut(model, inputs["input_ids"], cache.store, seq, NEW)
    for got, logits in zip(ours.logits, want, strict=True):
        assert (got - logits).abs().max() <= 1e-3
    full = generate(model, inputs, RoundedCache(config=model.config), NEW)
    apart = max(float((a - b).abs().max()) for a, b in zip(ours.logits, full.logits, strict=True))
    assert apart > 4e-3, "something went that mattered"


@pytest.mark.parametrize("chunk", [7, 30, 89])
@pytest.mark.parametrize(
    "policy", [SNAP, kvrs.H2O(32), kvrs.Random(32), kvrs.AdaKV(SNAP), kvrs.KNorm(32)], ids=lambda p: p.name
)
def test_a_prompt_in_chunks_is_one_prompt(policy: Any, chunk: int) -> None:
    model, inputs = llama(), batch([50, PROMPT])
    kept, texts = [], []
    for size in (None, chunk):
        cache = kvrs.hf.KVCache(model, plan_of(model, policy, prompt_budget=100))
        texts.append(generate(model, inputs, cache, NEW, prefill_chunk_size=size).sequences)
        assert cache.store.stats().waiting == []
        kept.append(
            [
                cache.store.kept_positions(seq, layer, head).tolist()
                for seq in cache.seqs
                for layer in range(3)
                for head in range(2)
            ]
        )
    assert torch.equal(*texts)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("policy", [SNAP, kvrs.TOVA(32), kvrs.StreamingLLM(32)], ids=lambda p: p.name)
def test_padded_rows_keep_what_they_keep_alone(policy: Any) -> None:
    model, lengths = llama(), [3, 41, PROMPT]
    inputs = batch(lengths)
    together = kvrs.hf.KVCache(model, plan_of(model, policy))
    generate(model, inputs, together, NEW)
    for row, length in enumerate(lengths):
        alone = kvrs.hf.KVCache(model, plan_of(model, policy))
        single = {"input_ids": inputs["input_ids"][row : row + 1, -length:]}
        generate(model, single, alone, NEW)
        for layer in range(3):
            sets = [
                cache.store.kept_positions(cache.seqs[i], layer, 1)
                for cache, i in ((together, row), (alone, 0))
            ]
            assert np.array_equal(*sets)


@pytest.mark.parametrize("family", [gemma3, gpt_oss])
def test_layers_with_windows_keep_theirs_and_the_others_evict(family: Any) -> None:
    model, inputs = family(), batch([PROMPT])
    cache = kvrs.hf.KVCache(model, plan_of(model))
    windows = [layer.sliding_window for layer in cache.layers]
    assert [policy is None for policy in cache.store.plan.evict] == [window is not None for window in windows]
    generate(model, inputs, cache, NEW)
    for layer, window in enumerate(windows):
        positions = cache.store.kept_positions(cache.seqs[0], layer, 0)
        assert window or len(positions) == 32 + NEW - 1
        assert positions[-1] == PROMPT + NEW - 2


def test_case_b19_generating_twice_with_one_store_is_generating_with_a_fresh_one() -> None:
    model = llama()
    first, second = batch([PROMPT - 5], seed=1), batch([PROMPT], seed=2)
    with kvrs.hf.compressed(model, plan_of(model)) as store:
        for inputs in (first, second):
            again = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
            assert {head.kept for head in store.selection_report(_only(store))} == {32 + NEW - 1}
    fresh = generate(model, second, kvrs.hf.KVCache(model, plan_of(model)), NEW)
    assert torch.equal(again, fresh.sequences)


def _only(store: kvrs.KVStore) -> int:
    """Return the id of the one sequence of a store."""
    for seq in range(8):
        try:
            store.length(seq)
        except kvrs.SequenceError:
            continue
        return seq
    raise AssertionError("no sequence")


def test_the_calls_of_a_model_are_framed_by_hand() -> None:
    model, ids = llama(), batch([PROMPT])["input_ids"]
    cache = kvrs.hf.KVCache(model, plan_of(model))
    with torch.no_grad(), cache.prompt():
        for part in ids.split(20, dim=1):
            model(part, **{CACHE_ARGUMENT: cache})
        assert len(cache.store.kept_positions(cache.seqs[0], 0, 0)) == PROMPT
        assert cache.store.stats().waiting
    assert len(cache.store.kept_positions(cache.seqs[0], 0, 0)) == 32
    one = kvrs.hf.KVCache(model, plan_of(model))
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: one})
    for layer in range(3):
        sets = [c.store.kept_positions(c.seqs[0], layer, 1) for c in (cache, one)]
        assert np.array_equal(*sets)


def test_a_second_turn_is_a_prompt_of_its_own() -> None:
    model, inputs = llama(), batch([PROMPT])
    cache = kvrs.hf.KVCache(model, plan_of(model))
    said = generate(model, inputs, cache, NEW).sequences
    ids = torch.cat([said, batch([60], seed=9)["input_ids"]], dim=1)
    generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, NEW)
    assert cache.store.length(cache.seqs[0]) == PROMPT + NEW + 60 + NEW - 1
    assert cache.store.stats().waiting == []
    assert len(cache.store.kept_positions(cache.seqs[0], 0, 0)) == 32 + NEW - 1


def test_after_a_failure_the_prompt_is_still_open_and_reset_begins_anew() -> None:
    model, inputs = llama(), batch([PROMPT])
    cache = kvrs.hf.KVCache(model, plan_of(model, prompt_budget=60))
    with pytest.raises(kvrs.SequenceError, match="prompt_budget = 60"):
        generate(model, inputs, cache, NEW)
    cache.reset()
    short = batch([50])
    generate(model, short, cache, NEW)
    assert len(cache.store.kept_positions(cache.seqs[0], 0, 0)) == 32 + NEW - 1


def test_the_model_is_as_it_was_without_the_cache() -> None:
    model, inputs = llama(), batch([PROMPT])
    before = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=40)
    cache = kvrs.hf.KVCache(model, plan_of(model))
    generate(model, inputs, cache, NEW)
    assert torch.equal(before, model.generate(**inputs, max_new_tokens=NEW, do_sample=False))
    cache.close()
    assert not {"_prefill", "_prefill_chunking"} & set(vars(model))


# --- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [llama, gemma3, gpt_oss])
def test_a_filled_cache_is_the_one_that_the_model_fills(family: Any) -> None:
    model, ids = family(), batch([PROMPT])["input_ids"]
    read, filled = (kvrs.hf.KVCache(model, plan_of(model)) for _ in range(2))
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: read})
    captured = capture.capture(model, ids[0].tolist())
    capture.fill(filled, captured.layers)
    for layer in range(3):
        for head in range(2):
            one, other = (c.store.decode(layer, c.seqs[0], head) for c in (read, filled))
            assert np.array_equal(one[2], other[2])
            assert np.allclose(one[0], other[0], atol=2e-3)
    assert filled.get_seq_length() == PROMPT


@pytest.mark.parametrize("family", [llama, gpt_oss])
def test_captured_attention_is_what_the_model_computes(family: Any) -> None:
    model, ids = family(), batch([40])["input_ids"]
    layers = capture.capture(model, ids[0].tolist()).layers
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for layer, want in zip(layers, weights, strict=True):
        if want.shape[-1] == 40 and family is llama:
            mean = want[0, :, 30:, :30].reshape(2, 2, 10, 30).mean(dim=1)
            assert torch.allclose(capture.attention(layer, 30), mean, atol=1e-5)
        assert capture.attention(layer, 30).sum(dim=2).max() <= 1 + 1e-5


def test_measures_of_a_choice_by_hand() -> None:
    seen = np.array([[[0.5, 0.01, 0.2, 0.2, 0.09], [0.1, 0.6, 0.0, 0.3, 0.0]]])
    kept = [np.array([0, 1, 3])]
    assert selection.hits(seen, kept, 0.1) == (5, 4)
    assert selection.hits(seen, kept, 0.5) == (1, 1)
    assert selection.best(seen[0], 2).tolist() == [0, 1]
    assert selection.overlap(np.array([1, 2, 3]), np.array([2, 3, 4])) == 0.5
    assert selection.recall(np.array([1, 2, 3]), np.array([2, 3, 4, 5])) == 0.5
    found = selection.judged(seen, kept, 0.1)
    assert (found["recall"], found["overlap"]) == (1.0, 1.0)
    assert found["mass"] == pytest.approx(1.71 / 2.0)


def test_policies_are_compared_in_one_table_that_continues() -> None:
    model, record = llama(), results.Record(None)
    found = policies.specifications(["random", "caote(snapkv:window=8)", "none"], "32")
    assert found == {
        "none": None,
        "random": "random:32",
        "caote(snapkv:window=8)": "caote(snapkv:window=8):32",
    }
    documents = {"text": batch([80])["input_ids"][0].tolist()}
    options = {"prompt": 60, "length": 200, "depths": 0}
    line = "raw16,recent=8,sinks=2"
    result = policies.evaluate(model, Letters(), "tiny", line, found, documents, record, **options)
    rows = {row["policy"]: row for row in result["rows"]}
    assert list(rows) == list(found)
    assert rows["none"]["mean_ratio"] == rows["none"]["hit_rate"] == rows["none"]["recall"] == 1.0
    for name in ("random", "caote(snapkv:window=8)"):
        assert rows[name]["mean_ratio"] != 1.0
        assert 0 < rows[name]["recall"] < 1
        assert rows[name]["bytes_ratio"] == pytest.approx(32 / 60)
    before = dict(record.parts)
    again = policies.evaluate(model, Letters(), "tiny", line, found, documents, record, **options)
    assert (again["rows"], record.parts) == (result["rows"], before)


def test_the_command_prints_the_table_and_refuses_what_it_cannot_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(models, "load", lambda *_args, **_options: (llama(), Letters()))
    text, out = tmp_path / "text.txt", tmp_path / "a.json"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    common = ["policies", "--model", "tiny", "--quiet", "--texts", str(text), "--prompt", "300"]
    line = ["--plan", "raw16,recent=8", "--policies", "h2o,snapkv:window=8", "--budget", "0.25"]
    assert cli.evaluate_command([*common, *line, "--continuation", "20", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("policies, tiny", "h2o", "snapkv:window=8", "hits", "overlap"))
    wrong = {
        ("--plan", "raw16,evict=h2o:64"): "one without evict",
        ("--policies", "quest"): "policy is 'quest'",
        ("--budget", "1.5"): "1.5",
        ("--continuation", "1"): "continuation 1",
    }
    for options, words in wrong.items():
        assert cli.evaluate_command([*common, *options]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("policy", [SNAP, kvrs.H2O(0.5), kvrs.CAOTE(SNAP), kvrs.AdaKV(kvrs.H2O(32))])
def test_perplexity_refuses_policies_that_wait_for_a_prompt(policy: Any) -> None:
    model = llama()
    with pytest.raises(ValueError, match=r"evict\[0\] is .*end of a prompt"):
        perplexity.evaluate(model, "tiny", plan_of(model, policy), {"a": [3] * 40}, results.Record(None))


def test_perplexity_takes_policies_that_act_as_tokens_come() -> None:
    model, ids = llama(), batch([120])["input_ids"][0].tolist()
    plan = plan_of(model, kvrs.StreamingLLM(32))
    result = perplexity.evaluate(model, "tiny", plan, {"a": ids}, results.Record(None))
    assert result["ratio"]["a"] != pytest.approx(1.0, abs=1e-5)


def test_a_picture_shows_what_each_head_keeps(tmp_path: Any) -> None:
    model, ids = gemma3(), batch([PROMPT])["input_ids"][0].tolist()
    layers = capture.capture(model, ids).layers
    kept, names = pictures.chosen(model, plan_of(model), layers)
    assert names == ["1.0", "1.1"]
    assert kept.sum(axis=1).tolist() == [32, 32]
    assert kept[:, -8:].all()
    assert kept[:, :2].all()
    assert pictures.shares(kept, 9).sum(axis=1) == pytest.approx(3.2)
    pictures.draw(kept, names, "snapkv", tmp_path / "snapkv.png")
    assert (tmp_path / "snapkv.png").read_bytes()[:4] == b"\x89PNG"
    assert pictures.file_name("caote(h2o)") == "caote-h2o.png"
