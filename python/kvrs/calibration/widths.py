"""The bits of every run of channels of a plan, by the rule of each codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvrs.calibrated import AATC, KVTC, PALU
from kvrs.calibration.allocate import Widths, allocate, local_factor
from kvrs.calibration.sides import Side, shares
from kvrs.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrs.calibration.allocate import SideKey
    from kvrs.calibration.transform import Channels

ALLOCATIONS = ("sensitivity", "local")


@dataclass(frozen=True)
class Rule:
    """How bits are divided among layers.

    Attributes
    ----------
    allocation : str
        ``"sensitivity"`` or ``"local"``.
    sensitivities : mapping
        What one unit of distortion costs, by layer and side; for ``"sensitivity"``.
    floors : mapping of int to int
        Least bits of all channels of a layer.
    """

    allocation: str
    sensitivities: Mapping[SideKey, float]
    floors: Mapping[int, int]


def widths_of(
    sides: Sequence[Side],
    channels: Mapping[SideKey, list[Channels]],
    rule: Rule,
    bits: float | None = None,
) -> Widths:
    """Return the bits of each run, by layer and side.

    Parameters
    ----------
    sides : sequence of Side
        Of the plan.
    channels : mapping
        Of each side that is transformed.
    rule : Rule
        How AATC divides its bits.
    bits : float, optional
        Takes the place of AATC's own bits per element.

    Raises
    ------
    kvrs.PlanError
        If a budget is below what the floors take.
    """
    widths: Widths = {}
    for name in ("keys", "values"):
        one = [side for side in sides if side.side == name]
        kvtc = [side for side in one if isinstance(side.codec, KVTC)]
        if kvtc:
            each = shares(kvtc, channels, {side.key: 1.0 for side in kvtc}, {})
            widths |= allocate(each, _budget(kvtc, channels, None), by="exact")
        widths |= ranks([side for side in one if isinstance(side.codec, PALU)], channels)
    aatc = [side for side in sides if isinstance(side.codec, AATC)]
    for together in _budgets(aatc, rule):
        if rule.allocation == "local":
            factors = {side.key: local_factor(channels[side.key]) for side in together}
        else:
            factors = {side.key: rule.sensitivities[side.key] for side in together}
        each = shares(together, channels, factors, rule.floors)
        widths |= allocate(each, _budget(together, channels, bits))
    return widths


def ranks(sides: Sequence[Side], channels: Mapping[SideKey, list[Channels]]) -> Widths:
    """Return PALU's bits: runs of the largest squared singular values under the total rank."""
    runs = [
        (side, group, run, value)
        for side in sides
        for group, found in enumerate(channels[side.key])
        for run, value in enumerate(found.variance.reshape(-1, 16).sum(axis=1))
    ]
    counts = {(side.key, group): 1 for side, group, _, _ in runs}
    total = round(sum(side.codec.rank for side, _, _, _ in runs))
    if runs and total < len(counts):
        raise PlanError(
            f"PALU.rank is {sides[0].codec.rank}; allowed: {len(counts) / len(runs):.4g} or more, 16 "
            "channels of each head group"
        )
    for side, group, _, _ in sorted((x for x in runs if x[2] > 0), key=lambda x: -x[3])[
        : total - len(counts)
    ]:
        counts[side.key, group] += 1
    widths: Widths = {}
    for side in sides:
        for group, found in enumerate(channels[side.key]):
            kept = counts[side.key, group]
            bits = [int(side.codec.bits)] * kept + [0] * (len(found.runs) - kept)
            widths.setdefault(side.key, []).append(bits)
    return widths


def mean_bits(widths: Widths) -> dict[str, dict[int, float]]:
    """Return the bits per element of each layer, by side."""
    found: dict[str, dict[int, float]] = {"keys": {}, "values": {}}
    for (layer, side), groups in widths.items():
        found[side][layer] = float(np.mean(np.concatenate(groups)))
    return found


def _budgets(sides: Sequence[Side], rule: Rule) -> list[list[Side]]:
    """Return the sides of each budget: measured sensitivities compare keys with values, local ones do not."""
    if rule.allocation != "local":
        return [list(sides)] if sides else []
    by_side = ([side for side in sides if side.side == name] for name in ("keys", "values"))
    return [together for together in by_side if together]


def _budget(sides: Sequence[Side], channels: Mapping[SideKey, list[Channels]], bits: float | None) -> int:
    total = 0.0
    for side in sides:
        each = side.codec.bits if bits is None else bits
        total += each * sum(len(group.variance) for group in channels[side.key])
    return int(total + 1e-6)
