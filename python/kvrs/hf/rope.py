"""Read the rotary position embedding of each layer from a transformers configuration.

A plan uses it to rotate the key offset, which it subtracts from a key and adds back to the score.
Frequencies that a model changes with the length of its input ("dynamic", "longrope") are read once, for
short inputs: beyond that the offset takes out less of the key, and the result stays right.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import kvrs

ROPE_ON_SLIDING_LAYERS_ONLY = frozenset({"cohere2", "exaone4"})


def rope_of_layer(config: Any, layer: int, head_dim: int) -> kvrs.Rope | None:
    """Return the rotation of one layer's keys, None if its keys are not rotated.

    Parameters
    ----------
    config : PreTrainedConfig
        The text decoder's configuration.
    layer : int
        Index of the layer.
    head_dim : int
        Channels of one key.
    """
    import kvrs
    from kvrs.hf.shapes import layer_types

    kind = layer_types(config)[layer]
    parameters = _parameters(config, kind)
    if parameters is None or not _rotates(config, layer, kind):
        return None
    theta, name = float(parameters["rope_theta"]), parameters.get("rope_type", "default")
    if name == "default":
        dim = int(head_dim * _partial(config, parameters))
        return kvrs.Rope(theta=theta, dim=None if dim == head_dim else dim, pairing=_pairing(config))
    frequencies, factor = _scaled(config, name, kind)
    return kvrs.Rope(
        theta=theta,
        dim=None if 2 * len(frequencies) == head_dim else 2 * len(frequencies),
        pairing=_pairing(config),
        inv_freq=frequencies,
        attention_factor=factor,
    )


def _parameters(config: Any, kind: str) -> dict[str, Any] | None:
    """Return theta and type of a layer type's rotation from the configuration's newer or older fields."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:
        nested = parameters.get(kind, None) if kind in parameters else parameters
        return dict(nested) if nested and "rope_theta" in nested else None
    if getattr(config, "rope_theta", None) is None:
        return None
    if kind == "sliding_attention" and getattr(config, "rope_local_base_freq", None):
        return {"rope_theta": config.rope_local_base_freq}
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    return {"rope_theta": config.rope_theta, **scaling}


def _rotates(config: Any, layer: int, kind: str) -> bool:
    switches = getattr(config, "no_rope_layers", None)
    if switches:
        return bool(switches[layer])
    only_sliding = getattr(config, "model_type", "") in ROPE_ON_SLIDING_LAYERS_ONLY
    return not (only_sliding and kind == "full_attention" and "sliding_attention" in config.layer_types)


def _partial(config: Any, parameters: dict[str, Any]) -> float:
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return 1.0 if share is None else float(share)


def _scaled(config: Any, name: str, kind: str) -> tuple[tuple[float, ...], float]:
    """Return the inverse frequencies and the factor on cos and sin of a scaled rotation."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    import kvrs

    if name not in ROPE_INIT_FUNCTIONS:
        allowed = ", ".join(sorted(["default", *ROPE_INIT_FUNCTIONS]))
        raise kvrs.PlanError(f"config.rope_type is {name!r}; allowed: {allowed}")
    nested = kind in (getattr(config, "rope_parameters", None) or {})
    extra = {"layer_type": kind} if nested else {}
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](config, "cpu", **extra)
    return tuple(float(value) for value in frequencies), float(factor)


def _pairing(config: Any) -> Literal["half", "interleaved"]:
    """Return how channels form pairs, by asking the `rotate_half` of the model's own code."""
    import torch

    module = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        rotate = getattr(importlib.import_module(module), "rotate_half", None)
    except ImportError:
        rotate = None
    if rotate is None:
        return "half"
    turned = [int(value) for value in rotate(torch.arange(1.0, 5.0)[None])[0]]
    return "interleaved" if turned == [-2, 1, -4, 3] else "half"
