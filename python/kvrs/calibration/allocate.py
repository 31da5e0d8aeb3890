"""How many bits each run of channels gets, over all layers and sides that share a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrs import _kvrs
from kvrs.calibration.layers import RUN
from kvrs.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrs.calibration.transform import Channels

PERCENTILE = 95.0
SideKey = tuple[int, str]
"""Layer, and ``"keys"`` or ``"values"``."""
Widths = dict[SideKey, list[list[int]]]
"""Bits of each run, by layer and side: one list a head group."""


@dataclass(frozen=True)
class Share:
    """One side of one layer that takes part in an allocation.

    Attributes
    ----------
    layer : int
        Which layer.
    side : str
        ``"keys"`` or ``"values"``.
    channels : sequence of Channels
        One a head group.
    factor : float
        By what its distortion is multiplied to compare with the others'.
    floor : int
        Least bits of all its channels.
    """

    layer: int
    side: str
    channels: Sequence[Channels]
    factor: float = 1.0
    floor: int = 0

    @property
    def elements(self) -> int:
        """Channels of all head groups: elements a token."""
        return sum(len(group.variance) for group in self.channels)

    def distortion(self, widths: Sequence[Sequence[int]]) -> float:
        """Return ``sum a D(b)`` of an allocation, not multiplied by the factor."""
        curve = np.array(_kvrs.gaussian_distortion())
        pairs = zip(self.channels, widths, strict=True)
        return float(sum((group.runs * curve[list(bits)]).sum() for group, bits in pairs))


def local_factor(channels: Sequence[Channels]) -> float:
    """Return 1 over the 95th percentile of a layer's channels, as the paper makes layers comparable."""
    top = np.percentile(np.concatenate([group.value for group in channels]), PERCENTILE)
    return float(1.0 / top) if top > 0 else 1.0


def allocate(shares: Sequence[Share], budget: int, *, by: str = "greedy") -> Widths:
    """Divide bits a token among runs of 16 channels.

    The first run of each head group keeps 1 bit at least. Ties go to the lower layer, then keys, head, run.

    Parameters
    ----------
    shares : sequence of Share
        Layers and sides under one budget.
    budget : int
        Bits a token, of codes alone.
    by : {"greedy", "exact", "waterfill"}
        Marginal gain, dynamic programming, or bisection for a water level.

    Raises
    ------
    kvrs.PlanError
        If the budget is below what the floors take.
    """
    shares = sorted(shares, key=lambda share: (share.layer, share.side))
    runs = [(share, group) for share in shares for group in share.channels]
    weights = np.concatenate([share.factor * group.runs for share, group in runs])
    floors = np.concatenate([_floors(share, len(group.runs)) for share, group in runs])
    least = int(RUN * floors.sum())
    if budget < least:
        elements = sum(share.elements for share in shares)
        raise PlanError(
            f"bits is {budget / elements:.4g} per element on average; allowed: {least / elements:.4g} or "
            "more, "
            "as the first 16 channels of each head keep 1 bit"
        )
    function: Any = getattr(_kvrs, f"allocate_{by}")
    flat = function(weights.tolist(), [RUN] * len(weights), floors.tolist(), budget)
    widths: Widths = {}
    start = 0
    for share, group in runs:
        count = len(group.runs)
        widths.setdefault((share.layer, share.side), []).append(_falling(flat[start : start + count]))
        start += count
    return widths


def _floors(share: Share, runs: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    floors = np.full(runs, share.floor)
    floors[0] = max(1, share.floor)
    return floors


def _falling(widths: list[int]) -> list[int]:
    """Return bits of runs from most to least: runs of equal value may come out in any order."""
    return sorted(widths, reverse=True)
