"""Check that raw pages change nothing: the same tokens and logits as transformers' cache, rounded alike.

A store keeps raw keys and values in 16 bits and shows a call its own tokens as they are. The reference is
transformers' cache, whose keys and values are rounded to the same type once they are stored.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

import kvrs
from kvrs.eval import texts
from kvrs.eval.results import Record, versions
from kvrs.hf import KVCache
from kvrs.hf.compat import CACHE_ARGUMENT

BATCHES = ((64,), (7, 64, 600))
NEW_TOKENS = 32
PADDING = 0


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache with its keys and values rounded to f16 after each call, as raw pages are."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the rounded past with the call's own tokens as they are."""
        seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        layer.keys = layer.keys.half().to(layer.keys.dtype)
        layer.values = layer.values.half().to(layer.values.dtype)
        return seen


def raw_plan(model: Any, **settings: Any) -> kvrs.Plan:
    """Return a plan that keeps everything raw."""
    return kvrs.Plan.for_model(model, keys=kvrs.Raw16(), values=kvrs.Raw16(), **settings)


def left_padded(model_name: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return prompts of real text of the given lengths as one batch, padded on the left."""
    width = max(lengths)
    rows = [texts.window(model_name, "wiki", length, document=row) for row, length in enumerate(lengths)]
    padding = [width - length for length in lengths]
    ids = [[PADDING] * pad + row for pad, row in zip(padding, rows, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any, new: int, **options: Any) -> Any:
    """Return what `generate` gives with a cache, the logits of each step included."""
    return model.generate(
        **inputs,
        max_new_tokens=new,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, CACHE_ARGUMENT: cache, **options},
    )


def difference(ours: Any, reference: Any) -> dict[str, Any]:
    """Return whether two outputs have the same tokens, and how far their logits are apart at most.

    The first logits follow from the prompt alone. Later ones also differ where two f32 keys, equal but for
    the order of sums, lie on either side of a rounding edge of f16: one step of f16 each time. On Gemma,
    transformers' own "sdpa" and "eager" then differ by 1e-3 within 16 tokens, of logits up to 28.
    """
    steps = [float((a - b).abs().max()) for a, b in zip(ours.logits, reference.logits, strict=True)]
    return {
        "equal_tokens": bool(torch.equal(ours.sequences, reference.sequences)),
        "first_logit_difference": steps[0],
        "largest_logit_difference": max(steps),
        "largest_logit": max(float(logits.abs().max()) for logits in reference.logits),
    }


def evaluate(model: Any, model_name: str, record: Record) -> dict[str, Any]:
    """Return the comparison for one row and for three rows padded on the left.

    Parameters
    ----------
    model : PreTrainedModel
        Gemma or Qwen, in float32.
    model_name : str
        ``"gemma"`` or ``"qwen"``.
    record : Record
        Where finished batches are kept and looked up.
    """
    plan = raw_plan(model)

    def compare(lengths: tuple[int, ...]) -> dict[str, Any]:
        inputs = left_padded(model_name, lengths)
        ours = generate(model, inputs, KVCache(model, plan), NEW_TOKENS)
        return difference(ours, generate(model, inputs, RoundedCache(config=model.config), NEW_TOKENS))

    batches = []
    for lengths in BATCHES:
        key = {"task": "generation", "model": model_name, "lengths": list(lengths), "plan": plan.hash}
        result = record.part(key, partial(compare, lengths))
        batches.append({"lengths": list(lengths), "new_tokens": NEW_TOKENS, **result})
    return {
        "task": "generation",
        "model": model_name,
        "dtype": str(model.dtype),
        "batches": batches,
        "plan": {"spec": "raw16", "hash": plan.hash},
        "versions": versions(),
    }
