"""The error of a layer's output that codes make: predicted channel by channel, and measured.

With white noise on keys and values the expected squared error of a head's output behind the output
projection is D = D_K + D_V + R (arXiv:2608.14191). Token i, read with attention a_i by a query q, adds
``a_i^2 |W (v_i - o)|^2 s^2 q' N_K q`` to D_K and ``a_i^2 tr(W N_V W')`` to D_V, with N the covariance of the
noise, s the softmax scale, W the head's columns of the projection and o the head's output. R is of higher
order in the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvrs import _kvrs
from kvrs.calibration.coding import packed_mask
from kvrs.calibration.hooks import Call, attention_calls
from kvrs.calibration.layers import RUN, attention_module

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrs.calibration.allocate import SideKey
    from kvrs.calibration.coding import SideCoder
    from kvrs.calibration.transform import Channels


@dataclass(frozen=True)
class Distortion:
    """Squared error of one layer's heads behind the output projection, mean over queries, sum over heads.

    Attributes
    ----------
    layer : int
        Which layer.
    keys, values : float
        Predicted D_K and D_V.
    measured_keys, measured_values, measured : float
        With only the keys, only the values, and both quantised.
    energy : float
        Of the exact outputs, for comparison.
    """

    layer: int
    keys: float
    values: float
    measured_keys: float
    measured_values: float
    measured: float
    energy: float

    def to_dict(self) -> dict[str, float]:
        """Return the numbers with the remainder R and the ratio of predicted to measured."""
        predicted = self.keys + self.values
        return {
            **vars(self),
            "predicted": predicted,
            "remainder": self.measured - predicted,
            "ratio": predicted / self.measured if self.measured > 0 else float("nan"),
        }


def noise_covariance(
    channels: Sequence[Channels], widths: Sequence[Sequence[int]]
) -> list[np.ndarray[Any, Any]]:
    """Return the covariance of the noise that codes of a width make, of each head group, float64.

    Parameters
    ----------
    channels : sequence of Channels
        One a head group.
    widths : sequence of sequence of int
        Bits of each run of 16 channels.
    """
    curve = np.array(_kvrs.gaussian_distortion())
    found = []
    for group, bits in zip(channels, widths, strict=True):
        noise = group.variance * np.repeat(curve[list(bits)], RUN)
        found.append(group.basis.T * noise @ group.basis)
    return found


def measure(
    model: Any,
    ids: torch.Tensor,
    coders: Mapping[SideKey, SideCoder],
    noise: Mapping[SideKey, Sequence[np.ndarray[Any, Any]]],
    *,
    sinks: int,
    recent: int,
    first: int,
) -> list[Distortion]:
    """Return the predicted and the measured distortion of each layer on one text, with exact inputs.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    ids : Tensor
        Token ids, ``[tokens]``.
    coders : mapping
        By layer and side; layers with both are measured.
    noise : mapping
        `noise_covariance` of the same sides, coded head by head behind the rotation.
    sinks, recent : int
        First and newest tokens that stay as they are.
    first : int
        Queries before it are left out, as they see few tokens packed.
    """
    mask = packed_mask(len(ids), sinks, recent)
    found: list[Distortion] = []

    def look(call: Call) -> None:
        keys, values = ((call.layer, side) for side in ("keys", "values"))
        if keys in coders and values in coders:
            columns = _columns(model, call, values, coders)
            decoded = coders[keys].decoded(call.k), coders[values].decoded(call.v)
            pair = [torch.from_numpy(np.stack(list(noise[key]))).float() for key in (keys, values)]
            found.append(_of_layer(call, columns, decoded, (pair[0], pair[1]), mask, first))

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    with attention_calls(model, look), torch.no_grad():
        decoder(ids[None].to(model.device), use_cache=False)
    return found


def _columns(model: Any, call: Call, key: SideKey, coders: Mapping[SideKey, SideCoder]) -> torch.Tensor:
    """Return ``W' W`` of each query head's columns of the output projection, ``[Hq, dv, dv]``."""
    dim = coders[key].layer.value_dim
    weight = attention_module(model, call.layer).o_proj.weight.detach().float()
    columns = weight.reshape(weight.shape[0], -1, dim).transpose(0, 1)
    return columns.transpose(1, 2) @ columns


def _of_layer(
    call: Call,
    columns: torch.Tensor,
    decoded: tuple[torch.Tensor, torch.Tensor],
    noise: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    first: int,
) -> Distortion:
    out, weights = call.attention()
    k, v = decoded
    cases = {"measured_keys": (k, call.v), "measured_values": (call.k, v), "measured": (k, v)}
    errors = {name: call.attention((*pair, mask))[0] - out for name, pair in cases.items()}
    squares = {name: _squared(error, columns, first) for name, error in errors.items()}
    predicted_keys, predicted_values = predicted(
        call, out, weights.masked_fill(~mask, 0.0), columns, noise, first
    )
    energy = _squared(out, columns, first)
    return Distortion(call.layer, predicted_keys, predicted_values, **squares, energy=energy)


def predicted(
    call: Call,
    out: torch.Tensor,
    packed: torch.Tensor,
    columns: torch.Tensor,
    noise: tuple[torch.Tensor, torch.Tensor],
    first: int,
) -> tuple[float, float]:
    """Return D_K and D_V, means over the queries from `first` on, summed over query heads.

    Parameters
    ----------
    call : Call
        The layer's queries, keys and values.
    out : Tensor
        What each query head gets, ``[Hq, T, dv]``.
    packed : Tensor
        Its attention to packed tokens, zero elsewhere, ``[Hq, T, T]``.
    columns : Tensor
        ``W' W`` of each query head, ``[Hq, dv, dv]``.
    noise : tuple of Tensor
        Covariances of the noise of keys ``[Hkv, d, d]`` and values ``[Hkv, dv, dv]``.
    first : int
        Queries before it are left out.
    """
    group = call.q.shape[0] // call.k.shape[0]
    key_noise, value_noise = (x.repeat_interleave(group, 0) for x in noise)
    values = call.v.repeat_interleave(group, 0)
    squares = packed[:, first:].square()
    o = out[:, first:]
    # |W (v_i - o)|^2 for each query and token, out of three products.
    folded = values @ columns
    away = (folded * values).sum(-1)[:, None] - 2 * o @ folded.transpose(1, 2)
    away = (away + ((o @ columns) * o).sum(-1)[..., None]).clamp_min(0.0)
    queries = call.q[:, first:]
    reading = call.scale**2 * ((queries @ key_noise) * queries).sum(-1)
    keys = ((squares * away).sum(-1) * reading).mean(1).sum()
    each = torch.einsum("hij,hji->h", columns, value_noise)
    return float(keys), float((squares.sum(-1).mean(1) * each).sum())


def _squared(error: torch.Tensor, columns: torch.Tensor, first: int) -> float:
    part = error[:, first:]
    return float(((part @ columns) * part).sum(-1).mean(1).sum())
