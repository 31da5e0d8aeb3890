"""Use a kvrs store as the KV cache of a transformers model.

Two spellings, for models that go through transformers' attention interface::

    cache = kvrs.hf.KVCache(model, plan)
    model.generate(**inputs, past_key_values=cache)

    with kvrs.hf.compressed(model, plan) as store:
        model.generate(**inputs)

The cache keeps keys and values packed in a `kvrs.KVStore` and computes attention on the packed
bytes, so nothing is ever decoded for the model.
"""

from __future__ import annotations

from kvrs.hf.cache import KVCache, compressed
from kvrs.hf.shapes import offsets_from_model, shape_from_config
from kvrs.hf.support import check_config, check_model

__all__ = ["KVCache", "check_config", "check_model", "compressed", "offsets_from_model", "shape_from_config"]
