"""Transform coding of one head group: uncorrelated channels, their worth, and a codec's matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrs.calibration.layers import RUN, Layer, attention_module
from kvrs.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrs.calibration.statistics import LayerStatistics

Array = np.ndarray[Any, np.dtype[np.float64]]
EIGENVALUE_FLOOR = 1e-8
"""Least variance of a channel, relative to the largest."""
ROTATION_SEED = 0x6B767273


@dataclass(frozen=True)
class Channels:
    """The principal components of one head group's keys or values, most valuable first.

    Attributes
    ----------
    basis : ndarray
        One direction a row, orthonormal, ``[channels, parts * d]``.
    variance : ndarray
        ``sigma^2`` of each, ``[channels]``.
    weights : ndarray
        What attention makes of an error of 1 in it, ``[channels]``.
    floored : int
        How many variances were below the floor.
    """

    basis: Array
    variance: Array
    weights: Array
    floored: int

    @property
    def value(self) -> Array:
        """``a = w * sigma^2``, not rising."""
        return self.weights * self.variance

    @property
    def runs(self) -> Array:
        """Sum of `value` over each run of 16 channels."""
        sums: Array = self.value.reshape(-1, RUN).sum(axis=1)
        return sums


@dataclass(frozen=True)
class Transform:
    """What a transform codec is made of; all float32.

    Attributes
    ----------
    analysis : ndarray
        From centred vectors to stored channels of unit variance, ``[n, parts * d]``.
    synthesis : ndarray
        A vector is the sum of its stored channels times these rows, ``[n, parts * d]``.
    widths : ndarray
        Bits of each run of 16 stored channels, not rising, ``[n / 16]``.
    """

    analysis: np.ndarray[Any, np.dtype[np.float32]]
    synthesis: np.ndarray[Any, np.dtype[np.float32]]
    widths: np.ndarray[Any, np.dtype[np.float32]]


def channels_of(
    covariance: Array, importance: Array | None, what: str, *, floor: float = EIGENVALUE_FLOOR
) -> Channels:
    """Return the principal components of a covariance, sorted by what an error in them costs.

    Parameters
    ----------
    covariance : ndarray
        ``[n, n]``.
    importance : ndarray or None
        Second moment of what reads the vectors, ``[n, n]``; the weight of a direction e is ``e' M e``. None:
        1.
    what : str
        Layer, side and heads, for messages.
    floor : float
        Least variance relative to the largest; at 0 a covariance without full rank is an error.

    Raises
    ------
    kvrs.PlanError
        If the covariance is not finite, or has not the rank for one run of channels, or not full rank without
        a floor.
    """
    if not np.isfinite(covariance).all():
        raise PlanError(f"covariance of {what} is not finite; allowed: finite numbers")
    values, vectors = np.linalg.eigh(covariance)
    values, basis = values[::-1], vectors[:, ::-1].T
    basis = basis * np.sign(basis[np.arange(len(basis)), np.abs(basis).argmax(axis=1)])[:, None]
    limit = max(values[0], 0.0) * (floor or len(values) * np.finfo(np.float64).eps)
    rank = int((values > limit).sum())
    if rank < (RUN if floor else len(values)):
        allowed = f"{RUN} or more" if floor else f"{len(values)}, or an eigenvalue floor above 0"
        raise PlanError(f"covariance of {what} has rank {rank}; allowed: {allowed}")
    variance = np.maximum(values, limit)
    weights = np.ones_like(variance)
    if importance is not None:
        weights = np.maximum(np.einsum("ci,ij,cj->c", basis, importance, basis, optimize=True), 0.0)
    order = np.argsort(-(weights * variance), kind="stable")
    return Channels(basis[order], variance[order], weights[order], len(values) - rank)


def transform_of(channels: Channels, widths: Sequence[int], *, rotated: bool = True) -> Transform:
    """Return the matrices of a codec; runs without bits are left out.

    Parameters
    ----------
    channels : Channels
        Of the head group.
    widths : sequence of int
        Bits of each run of 16 channels, not rising.
    rotated : bool
        Turn the channels of equal width among themselves, which makes them more gaussian.
    """
    kept = [bits for bits in widths if bits > 0]
    n = RUN * len(kept)
    sigma = np.sqrt(channels.variance[:n])[:, None]
    analysis, synthesis = channels.basis[:n] / sigma, channels.basis[:n] * sigma
    if rotated:
        for bits in sorted(set(kept)):
            run = np.repeat(np.array(kept) == bits, RUN)
            turn = rotation(int(run.sum()))
            analysis[run], synthesis[run] = turn @ analysis[run], turn @ synthesis[run]
    return Transform(*(np.ascontiguousarray(x, dtype=np.float32) for x in (analysis, synthesis, kept)))


def rotation(size: int) -> Array:
    """Return a random rotation ``[size, size]``, always the same."""
    draw = np.random.default_rng(ROTATION_SEED + size).standard_normal((size, size))
    q, r = np.linalg.qr(draw)
    turned: Array = q * np.sign(np.diag(r))
    return turned


def side_channels(
    statistics: LayerStatistics,
    layer: Layer,
    side: str,
    outputs: Array,
    *,
    pre_rope: bool,
    attention: bool,
    floor: float = EIGENVALUE_FLOOR,
) -> list[Channels]:
    """Return the channels of each head of one layer's keys or values.

    Parameters
    ----------
    statistics : LayerStatistics
        Of the layer.
    layer : Layer
        Its heads.
    side : str
        ``"keys"`` or ``"values"``.
    outputs : ndarray
        `output_moments` of the layer.
    pre_rope : bool
        Keys without their rotation.
    attention : bool
        Weigh channels by what attention makes of them, else alike.
    floor : float
        As for `channels_of`.
    """
    found = []
    if side == "keys":
        covariances = statistics.turned_keys if pre_rope else statistics.keys
        reading = statistics.turned_queries if pre_rope else statistics.queries
    else:
        covariances, reading = statistics.values, outputs
    for head in range(layer.kv_heads):
        importance = reading[head] if attention else None
        what = f"{side} of layer {layer.index}, head {head}"
        found.append(channels_of(covariances[head], importance, what, floor=floor))
    return found


def output_moments(model: Any, layer: Layer) -> Array:
    """Return what the output projection makes of an error in each head's values, ``[kv_heads, dv, dv]``.

    The sum of ``W' W`` over the query heads of a group, with W the columns of the projection that read a
    head.
    """
    weight = attention_module(model, layer.index).o_proj.weight.detach().double().cpu().numpy()
    columns = weight.reshape(weight.shape[0], layer.kv_heads, -1, layer.value_dim)
    moments: Array = np.einsum("ohgi,ohgj->hij", columns, columns, optimize=True)
    return moments
