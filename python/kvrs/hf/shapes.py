"""Read from a transformers configuration or model what a plan has to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvrs.hf.rope import rope_of_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import kvrs

    Offsets = list[np.ndarray[Any, np.dtype[np.float32]]]

SLIDING_TYPES = frozenset({"sliding_attention"})
FULL_TYPES = frozenset({"full_attention"})
KEY_NORMS = ("k_norm", "key_norm", "k_layernorm", "key_layernorm", "qk_norm")
VALUE_NORMS = ("v_norm", "value_norm", "v_layernorm")


def layer_types(config: Any) -> list[str]:
    """Return the attention type of every layer, as the model's own mask code sees it."""
    config = _text(config)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    if getattr(config, "attention_chunk_size", None) is not None:
        kind = "chunked_attention"
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kind = "sliding_attention"
    else:
        kind = "full_attention"
    return [kind] * int(config.num_hidden_layers)


def sliding_windows(config: Any) -> list[int | None]:
    """Return the sliding window of every layer in tokens, None where attention is full."""
    config = _text(config)
    return [int(config.sliding_window) if kind in SLIDING_TYPES else None for kind in layer_types(config)]


def shape_from_config(config: Any) -> kvrs.ModelShape:
    """Return the shape of a model's KV cache: layers, heads, head sizes, RoPE and sliding windows.

    Parameters
    ----------
    config : PreTrainedConfig
        A model's configuration; of a multimodal model the text part is read.

    Returns
    -------
    kvrs.ModelShape

    Raises
    ------
    kvrs.PlanError
        If the configuration asks for attention that kvrs does not compute; the message names it.
    """
    import kvrs
    from kvrs.hf.support import check_config

    check_config(config)
    config = _text(config)
    windows = sliding_windows(config)
    layers = len(windows)
    heads = int(config.num_attention_heads)
    dims = [_head_dim(config, window) for window in windows]
    return kvrs.ModelShape(
        layers=layers,
        query_heads=heads,
        kv_heads=_shared([_kv_heads(config, window) for window in windows]),
        head_dim=_shared(dims),
        value_dim=getattr(config, "v_head_dim", None),
        rope=_shared([rope_of_layer(config, index, dim) for index, dim in enumerate(dims)]),
        sliding=_shared(windows),
    )


def offsets_from_model(model: Any) -> tuple[Offsets | None, Offsets | None]:
    """Return the biases of the key and value projections as offsets of a plan.

    A bias adds the same vector to every key of a head before RoPE, which a plan can take out before it
    encodes. It is of no use where a norm follows the projection, so such models give None.

    Parameters
    ----------
    model : PreTrainedModel
        A model whose attention modules have separate ``k_proj`` and ``v_proj``.

    Returns
    -------
    key_offset, value_offset : list of ndarray or None
        One float32 array ``[kv_heads, head_dim]`` a layer; None if any layer has none.
    """
    from kvrs.hf.support import attention_modules

    modules = attention_modules(model)
    keys = [_bias(module, "k_proj", KEY_NORMS) for module in modules]
    values = [_bias(module, "v_proj", VALUE_NORMS) for module in modules]
    return _all_or_none(keys), _all_or_none(values)


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _shared(values: Sequence[Any]) -> Any:
    """Return the one value that all layers share, else the list."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _head_dim(config: Any, window: int | None) -> int:
    wide = getattr(config, "global_head_dim", None) if window is None else None
    return int(wide or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _kv_heads(config: Any, window: int | None) -> int:
    few = getattr(config, "num_global_key_value_heads", None) if window is None else None
    return int(few or getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _bias(module: Any, projection: str, norms: tuple[str, ...]) -> np.ndarray | None:
    bias = getattr(getattr(module, projection, None), "bias", None)
    if bias is None or any(getattr(module, name, None) is not None for name in norms):
        return None
    flat: np.ndarray = bias.detach().float().cpu().numpy()
    return np.ascontiguousarray(flat.reshape(-1, int(module.head_dim)))


def _all_or_none(offsets: list[np.ndarray | None]) -> Offsets | None:
    if not offsets or any(offset is None or not offset.any() for offset in offsets):
        return None
    return cast("Offsets", offsets)
