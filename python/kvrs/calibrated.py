"""Codecs that are built from data, and the data: what `kvrs.calibrate` measured of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvrs.codec import Codec

__all__ = ["AATC", "KVTC", "PALU", "Calibration", "KVQuant"]


@dataclass(frozen=True)
class AATC(Codec):
    """Attention-aware transform coding: channels that matter to attention get the bits.

    AATC (Laus et al., 2026, arXiv:2608.14191). Each head's keys and values, without their mean, go through
    a matrix into uncorrelated channels; reverse water-filling gives each run of 16 channels its bits,
    weighted by how queries and the output projection use it. Differs from the paper: codes are really
    packed; channels of a run are rotated among themselves, so that Lloyd-Max books fit; keys are coded
    behind the rotary embedding, where the inverse folds into the query.

    Parameters
    ----------
    bits : float, optional
        Mean bits of codes per element, over all layers; scales are not counted. Or give ``bytes``.
    bytes : int or str, optional
        Size of a sequence of 8192 tokens, everything counted, as ``"64MiB"``, instead of ``bits``.
    variant : {"post_rope", "pre_rope"}
        Where keys are coded. Before the rotary embedding, tiles of 16 tokens are rebuilt in each step,
        which is slow: for comparison.
    weights : {"attention", "variance"}
        By what attention makes of a channel, or by variance alone.
    run_rotation : bool
        Whether channels of a run are rotated among themselves.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if its data is missing.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.AATC(bits=2.75)
    AATC(bits=2.75, bytes=None, variant='post_rope', weights='attention', run_rotation=True)
    """

    name: ClassVar[str] = "aatc"

    bits: float | None = None
    bytes: int | str | None = None
    variant: str = "post_rope"
    weights: str = "attention"
    run_rotation: bool = True


@dataclass(frozen=True)
class KVTC(Codec):
    """Principal components before the rotary embedding, bits by dynamic programming.

    KVTC (2025, arXiv:2511.01815) in kind: without the entropy coder, so that attention reads the codes as
    they lie. Keys are rebuilt tile by tile.

    Parameters
    ----------
    bits : float
        Mean bits of codes per element, over all layers.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if its data is missing.
    """

    name: ClassVar[str] = "kvtc"

    bits: float


@dataclass(frozen=True)
class PALU(Codec):
    """A low-rank latent before the rotary embedding, evenly quantised.

    PALU (Chang et al., 2024, arXiv:2407.21118) in kind: ranks of layers by their squared singular values.
    Keys are rebuilt tile by tile.

    Parameters
    ----------
    rank : float
        Mean share of the channels that is kept, in (0, 1].
    bits : int
        Bits of a latent channel, 1 to 8.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if its data is missing.
    """

    name: ClassVar[str] = "palu"

    rank: float
    bits: int


@dataclass(frozen=True)
class KVQuant(Codec):
    """Codebooks out of data, keys before the rotary embedding, a few outliers kept apart.

    KVQuant (Hooper et al., 2024, arXiv:2401.18079). Keys are rebuilt tile by tile. Differs from the paper:
    the outliers are the largest entries of each 16 tokens, and the first tokens stay 16-bit as the plan's
    sinks.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8.
    outliers : float
        Share of the entries that is kept as 16-bit differences, up to 0.1.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if its data is missing.
    """

    name: ClassVar[str] = "kvquant"

    bits: int
    outliers: float = 0.01


@dataclass(frozen=True)
class Calibration:
    """What was measured of a model, for the codecs of a plan.

    Parameters
    ----------
    arrays : mapping of str to array
        float32 arrays by name, ``{keys|values}.LAYER.GROUP.ARRAY``.
    fingerprint : str
        Identity of the model's weights; a plan refuses another model.
    report : dict
        What was measured and decided, for people; not part of the plan's hash.
    """

    arrays: Mapping[str, Any]
    fingerprint: str = ""
    report: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """Return all but the arrays, as a plan stores it."""
        return {"fingerprint": self.fingerprint, "report": self.report}
