"""How much each layer's keys and values matter to what a model says, measured one at a time.

One side of one layer is quantised at 2 bits, everything else stays exact. The divergence of the model's
next-token distributions, over the distortion that those 2 bits make, is what one unit of distortion there
costs.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvrs.calibration.allocate import Share, allocate
from kvrs.calibration.coding import SideCoder, packed_mask
from kvrs.calibration.hooks import Call, attention_calls
from kvrs.calibration.transform import transform_of
from kvrs.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BITS = 2
FIRST_POSITION = 192
"""Before it, a query sees few tokens packed."""
STRIDE = 4
"""Every so many positions are compared: the output embedding costs as much as the layers of a small model."""
POSITIONS_AT_ONCE = 64
"""Positions whose logits are made at a time."""


@dataclass(frozen=True)
class ExactRun:
    """One text as the exact model reads it.

    Attributes
    ----------
    ids : Tensor
        Token ids, ``[tokens]``.
    outputs : list
        What each decoder layer gave.
    hidden : Tensor
        What the output embedding reads, ``[tokens, hidden]``.
    log_probabilities : Tensor
        Of the next token at every `STRIDE`-th position from `FIRST_POSITION` on, ``[positions, vocabulary]``.
    """

    ids: torch.Tensor
    outputs: list[Any]
    hidden: torch.Tensor
    log_probabilities: torch.Tensor


def exact_run(model: Any, ids: torch.Tensor) -> ExactRun:
    """Read a text with the exact model.

    Raises
    ------
    kvrs.PlanError
        If the text is too short, or the model's logits are not made of its last hidden state as expected.
    """
    if len(ids) <= FIRST_POSITION:
        raise PlanError(
            f"a text for sensitivities has {len(ids)} tokens; allowed: more than {FIRST_POSITION}, "
            'or allocation="local"'
        )
    ids = ids.to(model.device)
    outputs: list[Any] = []
    with ExitStack() as hooks, attention_calls(model, lambda _call: None), torch.no_grad():
        for layer in _decoder(model).layers:
            handle = layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            hooks.callback(handle.remove)
        hidden = _decoder(model)(ids[None], use_cache=False).last_hidden_state[0]
        whole = model(ids[None, :8], use_cache=False).logits[0].float()
    part = logits_of(model, hidden[:8])
    if not torch.allclose(whole, part, atol=1e-2 * float(whole.abs().max())):
        raise PlanError(
            f"model {type(model).__name__} does not make its logits of its last hidden state by its output "
            'embedding alone; allowed: allocation="local"'
        )
    found = torch.cat([x.log_softmax(-1) for x in _compared_logits(model, hidden)])
    return ExactRun(ids, outputs[: len(_decoder(model).layers)], hidden, found)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of some positions, float32 ``[positions, vocabulary]``."""
    from kvrs.hf.compat import text_config

    config = text_config(model)
    logits: torch.Tensor = model.get_output_embeddings()(hidden).float()
    logits = (
        logits
        * (getattr(config, "logit_scale", None) or 1.0)
        / (getattr(config, "logits_scaling", None) or 1.0)
    )
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def divergence(model: Any, exact: ExactRun, hidden: torch.Tensor) -> float:
    """Return the mean KL divergence from the exact next-token distributions, in nats."""
    total, start = 0.0, 0
    for logits in _compared_logits(model, hidden):
        one = exact.log_probabilities[start : start + len(logits)]
        other = logits.log_softmax(-1)
        total += float(torch.linalg.vecdot(one.exp(), one - other).double().sum())
        start += len(logits)
    return total / start


def _compared_logits(model: Any, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits of the positions that are compared, some at a time."""
    with torch.no_grad():
        for part in hidden[FIRST_POSITION::STRIDE].split(POSITIONS_AT_ONCE):
            yield logits_of(model, part)


def coded_hidden(
    model: Any,
    exact: ExactRun,
    coders: Mapping[tuple[int, str], SideCoder],
    *,
    sinks: int,
    recent: int,
) -> torch.Tensor:
    """Return the last hidden state ``[tokens, hidden]`` with some sides of some layers quantised.

    Layers before the first of them give what they gave to the exact model.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    exact : ExactRun
        The text.
    coders : mapping
        By layer and side.
    sinks, recent : int
        First and newest tokens that stay as they are.
    """
    mask = packed_mask(len(exact.ids), sinks, recent)

    def replaced(call: Call) -> torch.Tensor | None:
        keys, values = (coders.get((call.layer, side)) for side in ("keys", "values"))
        if keys is None and values is None:
            return None
        k = call.k if keys is None else keys.decoded(call.k)
        v = call.v if values is None else values.decoded(call.v)
        return call.attention((k, v, mask))[0]

    first = min(layer for layer, _ in coders)
    with attention_calls(model, replaced), _skipped(model, exact, first), torch.no_grad():
        hidden: torch.Tensor = _decoder(model)(exact.ids[None], use_cache=False).last_hidden_state[0]
    return hidden


def measure(
    model: Any,
    texts: list[ExactRun],
    share: Share,
    coder: SideCoder,
    *,
    rotated: bool = True,
    sinks: int,
    recent: int,
) -> dict[str, float]:
    """Return what one unit of distortion of one side of one layer costs.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    texts : list of ExactRun
        Calibration texts.
    share : Share
        The side's channels.
    coder : SideCoder
        The side's mean and heads; its transforms do not matter.
    rotated, sinks, recent
        As in the plan.

    Returns
    -------
    dict
        ``divergence`` in nats, ``distortion``, and their ratio, ``sensitivity``.
    """
    key = (share.layer, share.side)
    widths = allocate([share], int(BITS * share.elements))[key]
    transforms = [
        transform_of(group, bits, rotated=rotated) for group, bits in zip(share.channels, widths, strict=True)
    ]
    quantised = SideCoder(coder.layer, coder.side, coder.mean, transforms, coder.pre_rope)
    hidden = (coded_hidden(model, text, {key: quantised}, sinks=sinks, recent=recent) for text in texts)
    each = [divergence(model, text, state) for text, state in zip(texts, hidden, strict=True)]
    mean, distortion = sum(each) / len(each), share.distortion(widths)
    return {"divergence": mean, "distortion": distortion, "sensitivity": max(mean, 0.0) / distortion}


@contextmanager
def _skipped(model: Any, exact: ExactRun, first: int) -> Iterator[None]:
    """Let the layers before `first` answer with what they gave to the exact model."""
    layers = list(_decoder(model).layers[:first])
    known = exact.outputs[first - 1] if first else None
    for layer in layers:
        layer.forward = lambda *_args, **_kwargs: known
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return getattr(decoder, "language_model", decoder)
