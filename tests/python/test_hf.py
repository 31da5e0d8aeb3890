"""kvrs as the cache of transformers models: the same text as their own cache, or a refusal by name."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvrs  # noqa: E402
import kvrs.hf  # noqa: E402
from kvrs.eval import generation  # noqa: E402
from kvrs.eval.generation import RoundedCache, raw_plan  # noqa: E402
from kvrs.hf.compat import CACHE_ARGUMENT  # noqa: E402
from kvrs.hf.shapes import sliding_windows  # noqa: E402
from transformers import DynamicCache  # noqa: E402

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama() -> Any:
    return build(transformers.LlamaConfig(**SHAPE))


def qwen2() -> Any:
    model = build(transformers.Qwen2Config(**SHAPE))
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_(0, 2)
    return model


def mistral() -> Any:
    return build(transformers.MistralConfig(**SHAPE, sliding_window=24))


def gemma3() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return build(transformers.Gemma3TextConfig(**SHAPE, sliding_window=16, layer_types=types))


def gemma2() -> Any:
    return build(transformers.Gemma2Config(**SHAPE, sliding_window=16, attn_logit_softcapping=5.0))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**SHAPE, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)
    model = build(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0, 1)
    return model


FAMILIES = {f.__name__: f for f in (llama, qwen2, mistral, gemma3, gemma2, gpt_oss)}


def build(config: Any) -> Any:
    torch.manual_seed(7)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def batch(lengths: list[int], seed: int = 3) -> dict[str, Any]:
    """Left-padded random prompts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, SHAPE["vocab_size"], (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def generate(model: Any, inputs: dict[str, Any], cache: Any, new: int = 12, **options: Any) -> Any:
    return generation.generate(model, inputs, cache, new, **options)


def assert_same(ours: Any, reference: Any, tolerance: float = 1e-3) -> None:
    found = generation.difference(ours, reference)
    assert found["equal_tokens"]
    assert found["largest_logit_difference"] <= tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_one_sequence_generates_what_the_rounded_cache_generates(family: str) -> None:
    model, inputs = FAMILIES[family](), batch([70])
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)))
    assert_same(ours, generate(model, inputs, RoundedCache(config=model.config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_rows_generate_what_the_rounded_cache_generates(family: str) -> None:
    model, inputs = FAMILIES[family](), batch([3, 41, 90])
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    ours = generate(model, inputs, cache)
    assert_same(ours, generate(model, inputs, RoundedCache(config=model.config)))
    assert [cache.store.length(sequence) for sequence in cache.seqs] == [3 + 11, 41 + 11, 90 + 11]
    assert cache.get_seq_length() == 90 + 11


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunked_prefill_generates_what_the_rounded_cache_generates(family: str) -> None:
    model, inputs = FAMILIES[family](), batch([5, 60])
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)), prefill_chunk_size=16)
    assert_same(ours, generate(model, inputs, RoundedCache(config=model.config), prefill_chunk_size=16))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_second_generate_call_continues_on_the_same_cache(family: str) -> None:
    model = FAMILIES[family]()
    caches = [kvrs.hf.KVCache(model, raw_plan(model)), RoundedCache(config=model.config)]
    first = [generate(model, batch([9, 33]), cache) for cache in caches]
    assert_same(*first)
    mask = torch.cat([batch([9, 33])["attention_mask"], torch.ones(2, 12 + 7, dtype=torch.long)], 1)
    more = batch([7, 7], seed=5)["input_ids"]
    turn = {"input_ids": torch.cat([first[0].sequences, more], 1), "attention_mask": mask}
    assert_same(*[generate(model, turn, cache) for cache in caches])


def test_sampling_draws_the_same_tokens_as_the_rounded_cache() -> None:
    model, inputs = llama(), batch([20, 31])
    drawn = []
    for cache in (kvrs.hf.KVCache(model, raw_plan(model)), RoundedCache(config=model.config)):
        torch.manual_seed(11)
        drawn.append(generate(model, inputs, cache, do_sample=True, num_return_sequences=2).sequences)
    assert drawn[0].shape[0] == 4
    assert torch.equal(*drawn)


def test_a_bfloat16_model_keeps_its_own_type() -> None:
    model, inputs = llama().bfloat16(), batch([20])
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)), new=4)
    reference = generate(model, inputs, DynamicCache(config=model.config), new=4)
    assert ours.logits[0].dtype == reference.logits[0].dtype
    assert float((ours.logits[0] - reference.logits[0]).abs().max()) < 0.05


def test_a_packed_cache_is_near_the_exact_one_and_smaller() -> None:
    model, inputs, next_token = llama(), batch([600]), torch.tensor([[5]])
    logits, sizes = [], []
    for codec in (kvrs.Raw16(), kvrs.TurboQuant(4)):
        plan = kvrs.Plan.for_model(model, keys=codec, values=codec, recent=16)
        cache = kvrs.hf.KVCache(model, plan)
        with torch.no_grad():
            for ids in (inputs["input_ids"], next_token):
                last = model(ids, **{CACHE_ARGUMENT: cache}).logits[0, -1]
        logits.append(last)
        stats = cache.store.stats()
        sizes.append(stats.bytes_total - stats.bytes_slack)
    assert 0 < float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.1
    assert sizes[1] < 0.5 * sizes[0]


def test_compressed_serves_every_generate_call_and_frees_all() -> None:
    model, inputs = gemma3(), batch([9, 33])
    reference = generate(model, inputs, RoundedCache(config=model.config)).sequences
    with kvrs.hf.compressed(model, raw_plan(model)) as store:
        for _ in range(2):
            assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), reference)
            assert store.stats().bytes_total > 0
    assert store.stats().bytes_total == 0
    assert torch.equal(generate(model, inputs, DynamicCache(config=model.config)).sequences, reference)


def test_the_model_is_as_before_once_its_caches_are_gone() -> None:
    model, inputs = llama(), batch([12])
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks), len(vars(model))
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    generate(model, inputs, cache, new=2)
    assert model.config._attn_implementation == "eager"
    model(**inputs)
    del cache
    gc.collect()
    assert (len(model._forward_hooks), len(model._forward_pre_hooks), len(vars(model))) == hooks


@torch.no_grad()
def test_the_implementation_is_restored_after_an_error_in_the_model() -> None:
    model, inputs = llama(), batch([12])
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    model(**inputs, **{CACHE_ARGUMENT: cache})
    with pytest.raises(kvrs.ShapeError, match=r"batch has 2 rows; allowed: 1"):
        model(inputs["input_ids"].expand(2, -1), **{CACHE_ARGUMENT: cache})
    assert model.config._attn_implementation == "eager"
    cache.reset()
    generate(model, batch([4, 6]), cache, new=2)


def test_reset_empties_the_cache_for_another_batch() -> None:
    model = llama()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    generate(model, batch([12]), cache, new=2)
    cache.reset()
    assert cache.get_seq_length() == 0
    inputs = batch([5, 9])
    assert_same(generate(model, inputs, cache), generate(model, inputs, RoundedCache(config=model.config)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_cache": False}, "use_cache is False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is True"),
    ],
)
def test_ways_of_generating_that_need_more_are_refused_before_the_first_step(
    options: dict[str, Any], message: str
) -> None:
    model = llama()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    inputs = batch([9])
    with pytest.raises(kvrs.KVError, match=message):
        model.generate(**inputs, max_new_tokens=2, **{CACHE_ARGUMENT: cache}, **options)
    assert cache.seqs == []


def test_attention_without_a_kvrs_cache_is_refused() -> None:
    model, inputs = llama(), batch([9])
    model.set_attn_implementation("kvrs")
    with pytest.raises(kvrs.KVError, match="without a kvrs cache"):
        model(**inputs)


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = llama(), llama()
    cache = kvrs.hf.KVCache(other, raw_plan(other))
    with pytest.raises(kvrs.KVError, match="outside of its model"):
        model(**batch([9]), **{CACHE_ARGUMENT: cache})
    mine = kvrs.hf.KVCache(model, raw_plan(model))
    with pytest.raises(kvrs.KVError, match="another model"):
        model(**batch([9]), **{CACHE_ARGUMENT: cache})
    assert mine.seqs == []


def test_a_tree_mask_is_refused() -> None:
    model = llama()
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    mask = torch.zeros(1, 1, 9, 9)
    with pytest.raises(kvrs.KVError, match="a tree or a custom mask"), torch.no_grad():
        model(batch([9])["input_ids"], attention_mask=mask, **{CACHE_ARGUMENT: cache})


def test_gradients_are_refused_and_leaf_tensors_under_no_grad_are_not() -> None:
    model, inputs = llama(), batch([9])
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    with pytest.raises(kvrs.KVError, match="requires grad"), torch.enable_grad():
        model(**inputs, **{CACHE_ARGUMENT: cache})
    with torch.no_grad():
        model(**inputs, **{CACHE_ARGUMENT: cache})


def test_a_mask_that_hides_stored_tokens_later_is_refused() -> None:
    model, inputs = llama(), batch([9])
    cache = kvrs.hf.KVCache(model, raw_plan(model))
    with torch.no_grad():
        model(**inputs, **{CACHE_ARGUMENT: cache})
        mask = torch.ones(1, 10, dtype=torch.long)
        mask[0, 4] = 0
        with pytest.raises(kvrs.SequenceError, match="8 earlier tokens in row 0; allowed: 9"):
            model(inputs["input_ids"][:, :1], attention_mask=mask, **{CACHE_ARGUMENT: cache})


def test_a_plan_for_another_shape_is_refused() -> None:
    with pytest.raises(kvrs.PlanError, match="sliding"):
        kvrs.hf.KVCache(llama(), raw_plan(mistral()))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("DeepseekV3Config", {}, "multi-head latent attention"),
        ("T5Config", {}, "cross-attention"),
        ("BertConfig", {"add_cross_attention": True}, "cross-attention"),
        ("Gemma3nTextConfig", {}, "cross-layer KV sharing"),
        ("Llama4TextConfig", {}, "chunked-local attention"),
        ("BloomConfig", {}, "ALiBi"),
        ("FalconConfig", {"alibi": True}, "ALiBi"),
        ("Gemma3Config", {}, "bidirectional image masks"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "bidirectional"),
        ("Qwen3NextConfig", {}, "layers of type linear_attention"),
    ],
)
def test_attention_that_kvrs_does_not_compute_is_refused_by_name(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(kvrs.PlanError, match=message):
        kvrs.hf.shape_from_config(getattr(transformers, name)(**settings))


def test_a_static_cache_or_a_compiled_model_is_refused() -> None:
    model = llama()
    plan = raw_plan(model)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(kvrs.PlanError, match=r"torch\.compile"):
        kvrs.hf.KVCache(model, plan)
    with pytest.raises(kvrs.PlanError, match=r"compiled by torch\.compile"):
        kvrs.hf.KVCache(torch.compile(llama()), plan)


def test_shapes_rope_and_windows_are_read_from_the_configuration() -> None:
    shape = kvrs.hf.shape_from_config(gemma3().config)
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 32)
    assert list(shape.sliding) == [16, None, 16]
    assert [rope.theta for rope in shape.rope] == [1e4, 1e6, 1e4]
    assert sliding_windows(mistral().config) == [24] * 3
    assert kvrs.hf.shape_from_config(llama().config).sliding is None


def test_scaled_rope_gives_the_frequencies_of_the_model() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = build(transformers.LlamaConfig(**SHAPE, rope_parameters=scaling))
    rope = kvrs.hf.shape_from_config(model.config).rope
    assert np.allclose(np.asarray(rope.inv_freq), model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)


def test_interleaved_pairs_are_told_from_halves() -> None:
    small = {**SHAPE, "num_hidden_layers": 2}
    assert kvrs.hf.shape_from_config(transformers.CohereConfig(**small)).rope.pairing == "interleaved"
    assert kvrs.hf.shape_from_config(transformers.LlamaConfig(**small)).rope.pairing == "half"


def test_biases_become_offsets_unless_a_norm_follows() -> None:
    model = qwen2()
    keys, values = kvrs.hf.offsets_from_model(model)
    attention = model.model.layers[1].self_attn
    assert len(keys) == len(values) == 3
    assert np.array_equal(keys[1].reshape(-1), attention.k_proj.bias.detach().numpy())
    assert np.array_equal(values[1].reshape(-1), attention.v_proj.bias.detach().numpy())
    assert kvrs.hf.offsets_from_model(llama()) == (None, None)
    normed = build(transformers.Qwen3Config(**SHAPE, attention_bias=True))
    with torch.no_grad():
        for layer in normed.model.layers:
            layer.self_attn.k_proj.bias.fill_(1)
            layer.self_attn.v_proj.bias.fill_(1)
    keys, values = kvrs.hf.offsets_from_model(normed)
    assert keys is None
    assert len(values) == 3


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    """Gemma 3 270M and its tokenizer, fetched if need be."""
    from kvrs.eval import models

    try:
        return models.load("gemma", quiet=True)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"Gemma cannot be fetched: {error}")


@pytest.mark.model
@pytest.mark.parametrize("lengths", generation.BATCHES, ids=["one row", "three left-padded rows"])
def test_gemma_generates_what_the_rounded_cache_generates(gemma: Any, lengths: tuple[int, ...]) -> None:
    model, _ = gemma
    inputs = generation.left_padded("gemma", lengths)
    ours = generate(model, inputs, kvrs.hf.KVCache(model, raw_plan(model)), new=32)
    reference = generate(model, inputs, RoundedCache(config=model.config), new=32)
    found = generation.difference(ours, reference)
    assert found["equal_tokens"]
    assert found["first_logit_difference"] <= 1e-3
    # Rounding edges (see `generation.difference`) let any two correct caches drift apart by about 1e-3.
    assert found["largest_logit_difference"] <= 1e-3 * found["largest_logit"]
