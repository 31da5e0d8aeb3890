"""Beams, several samples, prompt lookup and assistants: the same text as transformers' own cache."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvrs  # noqa: E402
import kvrs.hf  # noqa: E402
from kvrs.eval.generation import RoundedCache, raw_plan  # noqa: E402
from kvrs.hf.compat import CACHE_ARGUMENT  # noqa: E402
from test_hf import batch, gemma3, llama, mistral, qwen2  # noqa: E402
from transformers import DynamicCache  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "four beams": {"num_beams": 4},
    "beams that all return": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
}


def generate(model: Any, inputs: dict[str, Any], cache: Any, **options: Any) -> Any:
    torch.manual_seed(11)
    settings = {"max_new_tokens": 24, "do_sample": False} | options
    return model.generate(**inputs, **{CACHE_ARGUMENT: cache}, **settings)


def packed(model: Any, evict: Any = None) -> kvrs.hf.KVCache:
    codec = kvrs.TurboQuant(4)
    return kvrs.hf.KVCache(
        model, kvrs.Plan.for_model(model, keys=codec, values=codec, recent=16, evict=evict)
    )


def repetitive() -> dict[str, Any]:
    """Return a prompt in which looking up the last tokens finds candidates."""
    return {"input_ids": torch.tensor([[5, 9, 13, 21, 8, 30] * 12])}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", [llama, qwen2, gemma3], ids=lambda family: family.__name__)
def test_beams_and_samples_give_the_tokens_of_transformers_own_cache(
    family: Any, options: dict[str, Any]
) -> None:
    model, inputs = family(), batch([40, 90])
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)), **options)
    assert torch.equal(ours, generate(model, inputs, RoundedCache(config=model.config), **options))
    assert torch.equal(ours, generate(model, inputs, DynamicCache(config=model.config), **options))


@pytest.mark.parametrize("family", [llama, mistral], ids=lambda family: family.__name__)
def test_prompt_lookup_gives_the_tokens_of_greedy_search_and_takes_some_back(family: Any) -> None:
    model = family()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    cropped: list[int] = []
    crop = cache.crop
    cache.crop = lambda n: (cropped.append(n), crop(n))[1]
    options = {"prompt_lookup_num_tokens": 4}
    ours = generate(model, repetitive(), cache, **options)
    assert torch.equal(ours, generate(model, repetitive(), RoundedCache(config=model.config)))
    assert min(cropped) < 0
    assert cache.get_seq_length() == cache.store.length(cache.seqs[0]) == ours.shape[1] - 1


def test_assisted_decoding_gives_the_tokens_of_greedy_search() -> None:
    model, inputs = llama(), batch([40])
    assistant = llama()
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    greedy = generate(model, inputs, RoundedCache(config=model.config))
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)), assistant_model=assistant)
    assert torch.equal(ours, greedy)


@pytest.mark.parametrize(
    "options", [*WAYS.values(), {"prompt_lookup_num_tokens": 4}], ids=[*WAYS, "prompt lookup"]
)
def test_a_packed_cache_gives_the_same_text_twice(options: dict[str, Any]) -> None:
    model = llama()
    inputs = repetitive() if "prompt_lookup_num_tokens" in options else batch([40, 90])
    texts = [generate(model, inputs, packed(model), **options) for _ in range(2)]
    assert torch.equal(*texts)
    cache = packed(model)
    out = generate(model, inputs, cache, return_dict_in_generate=True, output_logits=True, **options)
    assert all(bool(torch.isfinite(step).all()) for step in out.logits)
    cache.store.check()


def test_beams_share_the_pages_of_the_prompt() -> None:
    model, inputs = llama(), batch([400])
    cache = packed(model)
    with torch.no_grad():
        model(**inputs, **{CACHE_ARGUMENT: cache})
    one = cache.store.stats()
    cache.batch_repeat_interleave(4)
    cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
    four = cache.store.stats()
    assert (four.bytes_codes, four.bytes_window) == (one.bytes_codes, one.bytes_window)
    assert four.tokens_logical == 4 * 400
    with torch.no_grad():
        ids = torch.full((4, 1), 7)
        logits = model(ids, **{CACHE_ARGUMENT: cache}).logits
    assert torch.equal(logits[0], logits[3])


def test_rows_are_selected_and_repeated_as_in_transformers_own_cache() -> None:
    model, inputs = llama(), batch([20, 33, 33])
    ours, theirs = kvrs.hf.KVCache(model, raw_plan(model)), RoundedCache(config=model.config)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        for cache in (ours, theirs):
            model(**inputs, **{CACHE_ARGUMENT: cache})
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
        mask = torch.cat([mask[[2, 2, 0, 0]], torch.ones(4, 1, dtype=torch.long)], 1)
        ids = torch.tensor([[3], [4], [5], [6]])
        logits = [model(ids, attention_mask=mask, **{CACHE_ARGUMENT: c}).logits for c in (ours, theirs)]
    assert ours.batch_size == 4
    torch.testing.assert_close(*logits, atol=1e-3, rtol=0)


def test_a_crop_takes_back_what_a_later_call_brings_again() -> None:
    model, inputs = llama(), batch([33, 33])
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    step = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    with torch.no_grad():
        model(inputs["input_ids"], **{CACHE_ARGUMENT: cache})
        first = model(**step, **{CACHE_ARGUMENT: cache}).logits
        cache.crop(0)
        cache.crop(-3)
        assert cache.get_seq_length() == 33
        again = model(**step, **{CACHE_ARGUMENT: cache}).logits
    assert torch.equal(first, again)
    cache.crop(-36)
    assert cache.get_seq_length() == 0
    assert [cache.store.length(seq) for seq in cache.seqs] == [0, 0]


def test_crops_that_cannot_be_done_are_named_and_change_nothing() -> None:
    model = gemma3()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    with torch.no_grad():
        model(**batch([120, 200]), **{CACHE_ARGUMENT: cache})
    with pytest.raises(kvrs.ArgumentError, match="tokens_to_remove is 3; allowed: 0 or below"):
        cache.crop(3)
    with pytest.raises(kvrs.SequenceError, match=r"tokens_to_remove is -201; allowed: -120\.\.=0 or -200"):
        cache.crop(-201)
    with pytest.raises(kvrs.SequenceError, match="80 of which have padding"):
        cache.crop(-121)
    with pytest.raises(kvrs.SequenceError, match="behind its window"):
        cache.crop(-100)
    assert [cache.store.length(seq) for seq in cache.seqs] == [120, 200]
    assert cache.get_seq_length() == 200
    cache.store.check()


def test_assisted_decoding_is_refused_with_a_policy_that_evicts_as_tokens_come() -> None:
    model = llama()
    for policy in (kvrs.H2O(budget=64), kvrs.StreamingLLM(budget=64)):
        cache = packed(model, evict=policy)
        assert not cache.is_croppable
        with pytest.raises(kvrs.KVError, match=f"assisted decoding takes tokens back, and {policy.name}"):
            generate(model, repetitive(), cache, prompt_lookup_num_tokens=4)
        assert cache.seqs == []
    cache = packed(model, evict=kvrs.SnapKV(budget=64))
    assert cache.is_croppable
    assert generate(model, repetitive(), cache, prompt_lookup_num_tokens=4).shape[1] > 72


def test_a_crop_below_the_last_eviction_is_refused_by_name() -> None:
    model = llama()
    cache = packed(model, evict=kvrs.H2O(budget=64))
    with torch.no_grad():
        model(**batch([120]), **{CACHE_ARGUMENT: cache})
    with pytest.raises(kvrs.SequenceError, match="h2o in layer 0 dropped tokens"):
        cache.crop(-2)


@pytest.mark.parametrize(
    "method", ["reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"]
)
def test_one_layer_alone_is_not_changed(method: str) -> None:
    model = llama()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    with pytest.raises(kvrs.KVError, match=f"{method} was called on one layer"):
        getattr(cache.layers[0], method)(0)
