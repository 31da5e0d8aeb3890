"""Say by name, before anything runs, why a model or a way of generating cannot use a kvrs cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrs import KVError, PlanError
from kvrs.hf.shapes import FULL_TYPES, SLIDING_TYPES, layer_types

if TYPE_CHECKING:
    from kvrs import KVStore

ALLOWED = "decoder-only models with full or sliding-window causal self-attention in every layer"
GENERATION_MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"})
BIDIRECTIONAL_IMAGE_MODELS = frozenset({"gemma3", "gemma4", "paligemma"})


def check_config(config: Any) -> None:
    """Refuse a configuration whose attention kvrs does not compute.

    Parameters
    ----------
    config : PreTrainedConfig
        A model's configuration.

    Raises
    ------
    kvrs.PlanError
        Naming the kind of attention and the field of the configuration that asks for it.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    reason = _config_reason(config, text)
    if reason is not None:
        raise PlanError(f"model {getattr(config, 'model_type', '?')!r} uses {reason}; allowed: {ALLOWED}")


def check_model(model: Any) -> None:
    """Refuse a model that cannot use a kvrs cache.

    Parameters
    ----------
    model : PreTrainedModel
        The model that is to generate.

    Raises
    ------
    kvrs.PlanError
        Naming the reason.
    """
    check_config(model.config)
    reason = _model_reason(model)
    if reason is not None:
        raise PlanError(f"model {type(model).__name__} {reason}; allowed: {ALLOWED}")


def check_generation(generation_config: Any, mode: Any, store: KVStore) -> None:
    """Refuse the ways of generating that need more from a cache than it offers.

    Parameters
    ----------
    generation_config : GenerationConfig
        What this call of `generate` resolved to.
    mode : GenerationMode or other
        The decoding method, where this version of transformers passes it.
    store : KVStore
        The store of the cache.

    Raises
    ------
    kvrs.KVError
        Naming the argument of `generate`.
    """
    name = getattr(mode, "value", None)
    lookup = getattr(generation_config, "prompt_lookup_num_tokens", None)
    policy = stepping(store)
    if name is not None and name not in GENERATION_MODES:
        reason = f"the decoding method is {name!r}; allowed: {', '.join(sorted(GENERATION_MODES))}"
    elif policy is not None and (name == "assisted_generation" or lookup):
        reason = (
            f"assisted decoding takes tokens back, and {policy} evicts as they come; allowed: other methods"
        )
    elif getattr(generation_config, "cache_implementation", None) is not None:
        reason = f"cache_implementation is {generation_config.cache_implementation!r}; allowed: None"
    elif getattr(generation_config, "use_cache", True) is False:
        reason = "use_cache is False; allowed: True"
    elif getattr(generation_config, "output_attentions", False):
        reason = "output_attentions is True: weights are never written out; allowed: False"
    else:
        return
    raise KVError(f"generate with a kvrs cache: {reason}")


def stepping(store: KVStore) -> str | None:
    """Return the policy that evicts while tokens come, so that none can be taken back, or None."""
    for report in store.plan.describe():
        if report.evicts is not None and not report.evicts.startswith("at the end of a prompt"):
            return str(report.evict)
    return None


def attention_modules(model: Any) -> list[Any]:
    """Return the decoder's self-attention modules in the order of their layers, as far as found."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = getattr(decoder, "language_model", decoder)
    layers = getattr(decoder, "layers", None)
    if layers is None:
        layers = getattr(getattr(decoder, "model", None), "layers", [])
    found = [getattr(layer, "self_attn", getattr(layer, "attention", None)) for layer in layers]
    return [module for module in found if module is not None]


def _config_reason(config: Any, text: Any) -> str | None:
    for part in (text, config):
        for field, reason in _FIELDS.items():
            if getattr(part, field, None):
                return f"{reason} (config.{field} is {getattr(part, field)!r})"
    if _is_alibi(text):
        return "ALiBi position biases"
    if getattr(config, "model_type", "") in BIDIRECTIONAL_IMAGE_MODELS and hasattr(config, "vision_config"):
        return "bidirectional image masks (config.vision_config is set)"
    if getattr(text, "is_causal", True) is False:
        return "attention that is not causal (config.is_causal is False)"
    return _layer_type_reason(text)


_FIELDS = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "is_encoder_decoder": "cross-attention of an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "cross_attention_layers": "cross-attention",
    "num_kv_shared_layers": "cross-layer KV sharing",
    "kv_sharing_modes": "cross-layer KV sharing",
    "use_bidirectional_attention": "bidirectional image masks or bidirectional attention",
}


def _is_alibi(text: Any) -> bool:
    nested = getattr(text, "attn_config", None)
    nested = nested if isinstance(nested, dict) else getattr(nested, "__dict__", {})
    return bool(
        getattr(text, "alibi", False)
        or nested.get("alibi", False)
        or getattr(text, "position_embedding_type", "") == "alibi"
        or getattr(text, "model_type", "") in {"bloom", "mpt"}
    )


def _layer_type_reason(text: Any) -> str | None:
    if getattr(text, "num_hidden_layers", None) is None:
        return "a configuration without num_hidden_layers"
    kinds = set(layer_types(text))
    if "chunked_attention" in kinds:
        return "chunked-local attention (config.layer_types or config.attention_chunk_size)"
    other = sorted(kinds - FULL_TYPES - SLIDING_TYPES)
    return f"layers of type {', '.join(other)} (config.layer_types)" if other else None


def _model_reason(model: Any) -> str | None:
    if hasattr(model, "_orig_mod"):
        return "is compiled by torch.compile, which needs a static cache"
    if getattr(getattr(model, "generation_config", None), "cache_implementation", None) is not None:
        name = model.generation_config.cache_implementation
        return f"asks for the cache {name!r} (generation_config.cache_implementation), as torch.compile needs"
    if not getattr(model, "_supports_attention_backend", False):
        return "does not go through transformers' attention interface (_supports_attention_backend)"
    if any(getattr(module, "is_causal", True) is False for module in attention_modules(model)):
        return "has attention modules that are not causal"
    return None
