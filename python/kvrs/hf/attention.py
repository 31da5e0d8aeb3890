"""The attention and mask functions that transformers calls under the name "kvrs".

Both are registered when this module is imported. The mask function hands the two-dimensional padding
mask through as it is, because the store itself drops padding and keeps ragged lengths; transformers
loses padding silently for an attention function that has no mask function.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvrs import KVError

if TYPE_CHECKING:
    import torch

    from kvrs.hf.step import Step

IMPLEMENTATION = "kvrs"
"""The name of the attention implementation."""

HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "token_type_ids", "attention_mask"})


class _Active(threading.local):
    """The model steps that run in this thread, innermost last."""

    def __init__(self) -> None:
        self.steps: list[Step] = []


ACTIVE = _Active()


def current_step() -> Step | None:
    """Return the step of the kvrs cache that this thread's model call uses, None outside of one."""
    return ACTIVE.steps[-1] if ACTIVE.steps else None


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over what the store holds and over the new tokens, then append these.

    Parameters
    ----------
    module : Module
        The attention module that calls.
    query : Tensor
        ``[B, Hq, T, D]`` after RoPE.
    key, value : Tensor
        ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``: the new tokens, as `StoreLayer.update` returned them.
    attention_mask : Tensor or None
        The padding mask ``[B, columns so far + T]``, False for padding.
    scaling : float or None
        Factor on the scores, None for ``D ** -0.5``.
    dropout : float
        Must be 0.
    **kwargs
        ``softcap``, ``s_aux`` (one learned logit a head) and ``sliding_window`` are used.

    Returns
    -------
    output : Tensor
        ``[B, T, Hq, Dv]``, contiguous.
    weights : None
        Attention weights are never written out.

    Raises
    ------
    kvrs.KVError
        Without a kvrs cache, or if the call asks for something that the store does not compute.
    """
    step = current_step()
    if step is None:
        raise KVError(
            f"attention implementation {IMPLEMENTATION!r} was called without a kvrs cache; allowed: a "
            "call of the model with a kvrs.hf.KVCache that was made for it"
        )
    _check_call(module, query, dropout, kwargs)
    output = step.attend(
        query,
        key,
        value,
        attention_mask,
        scale=scaling,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
        sliding=kwargs.get("sliding_window"),
        positions=kwargs.get("position_ids"),
    )
    return output.transpose(1, 2).contiguous(), None


def padding_mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """Return the padding mask as it is: the store knows causality and the sliding window itself.

    Parameters
    ----------
    attention_mask : Tensor or None
        ``[B, columns]``, False for padding; None if there is none.
    **kwargs
        What transformers builds other kinds of masks from.

    Raises
    ------
    kvrs.KVError
        If the model lays another mask over the causal one (images, trees, packed sequences).
    """
    plain = kwargs.get("allow_is_causal_skip", True) and not kwargs.get("use_vmap", False)
    if not plain or "allow_is_bidirectional_skip" in kwargs:
        raise KVError(
            "attention_mask is not causal plus padding (bidirectional images, trees or packed sequences); "
            "allowed: a causal or sliding-window mask with padding"
        )
    return attention_mask


def _check_call(module: Any, query: torch.Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise KVError(f"dropout is {dropout}; allowed: 0 (call model.eval())")
    if kwargs.get("output_attentions"):
        raise KVError("output_attentions is True; allowed: False (weights are never written out)")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if causal is False and query.shape[2] > 1:
        raise KVError(f"{type(module).__name__}.is_causal is False; allowed: causal self-attention")
    used = HARMLESS_TENSORS | {"s_aux"}
    for name, extra in kwargs.items():
        if name not in used and hasattr(extra, "dtype") and getattr(extra, "ndim", 0) > 0:
            raise KVError(f"attention got the tensor {name!r} of shape {tuple(extra.shape)}; allowed: s_aux")


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
