"""The few places where transformers' interface differs between versions."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

CACHE_ARGUMENT: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The keyword under which models and `generate` take a cache."""


def text_config(model_or_config: Any) -> Any:
    """Return the configuration of the text decoder.

    Parameters
    ----------
    model_or_config : PreTrainedModel or PreTrainedConfig
        A model, its configuration, or that of a multimodal model.

    Returns
    -------
    PreTrainedConfig
        The configuration that the decoder layers read.
    """
    config = getattr(model_or_config, "config", model_or_config)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def query_length(query: Any) -> int:
    """Return the number of new tokens from what `get_mask_sizes` is given (a count, or their positions)."""
    return int(query.shape[0]) if hasattr(query, "shape") and query.shape else int(query)
