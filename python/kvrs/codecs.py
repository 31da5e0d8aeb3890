"""Codecs: how keys and values are packed. Frozen settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvrs import _kvrs, settings
from kvrs.calibrated import AATC, KVTC, PALU, KVQuant
from kvrs.codec import Codec

__all__ = [
    "FP8",
    "KIVI",
    "QJL",
    "Codec",
    "Int8",
    "RaBitQ",
    "Raw16",
    "TurboQuant",
    "codecs",
    "from_spec",
]


@dataclass(frozen=True)
class Raw16(Codec):
    """Keep the 16-bit values as they came.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.Raw16()
    Raw16()
    """

    name: ClassVar[str] = "raw16"


@dataclass(frozen=True)
class TurboQuant(Codec):
    """Rotate, then quantise every coordinate with one optimal scalar codebook.

    TurboQuant (Zandieh et al., 2025, arXiv:2504.19874). Differs from the paper: one gaussian codebook with
    integer levels serves all dimensions; the scale of keys makes inner products unbiased without a bit for
    it, which errs less than ``variant="prod"``; fractions of a bit mix two widths under one rotation.

    Parameters
    ----------
    bits : float
        Bits of a code, 1 to 8; fractions mix two widths (``"mse"`` only). Scales are not counted.
    variant : {"mse", "prod"}
        The variant with the least squared error; or the paper's unbiased one, whose last bit is the sign of a
        random sketch of what the others miss. ``"prod"`` stores a second scale per token.
    scale : {"unbiased", "norm", "lsq", "raw"}, optional
        How a vector's scale is chosen; by default ``"unbiased"`` for keys and ``"norm"`` for values, and
        always ``"raw"`` for ``"prod"``.
    rotation : {"hadamard", "dense"}
        A Hadamard transform with random signs, or a dense orthogonal matrix.
    sketch : {"gaussian", "orthogonal"}, optional
        The rows of the sketch of ``"prod"``: independent, as in the paper (default), or orthogonal, which
        varies less.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.TurboQuant(bits=4)
    TurboQuant(bits=4, variant='mse', scale=None, rotation='hadamard', sketch=None)
    """

    name: ClassVar[str] = "turboquant"

    bits: float
    variant: str = "mse"
    scale: str | None = None
    rotation: str = "hadamard"
    sketch: str | None = None


@dataclass(frozen=True)
class RaBitQ(Codec):
    """Rotate, then round to an evenly spaced grid whose inner products are unbiased.

    RaBitQ (Gao et al., 2024, arXiv:2405.12497, extended in arXiv:2409.09913). Differs from the paper: the
    grid has the step of least squared error for gaussian coordinates instead of one that is searched per
    vector; the centre is the plan's ``key_offset`` or ``value_offset``; values keep their length instead of
    being unbiased.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8. Scales are not counted.
    error_bound : bool
        Store one more number per key, from which a bound on the error of its inner products follows. Keys
        only.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if values ask for a bound.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.RaBitQ(bits=4)
    RaBitQ(bits=4, error_bound=False)
    """

    name: ClassVar[str] = "rabitq"

    bits: int
    error_bound: bool = False


@dataclass(frozen=True)
class QJL(Codec):
    """Keep the signs of a random gaussian sketch of each key, and its length. For keys only.

    QJL (Zandieh et al., 2024, arXiv:2406.03482). Differs from the paper: no channels are kept apart as
    outliers, and first layers have no wider sketch unless the plan gives them one. The paper's values are
    ``KIVI(bits=2)``.

    Parameters
    ----------
    m : int
        Rows of the sketch, and bits of a key: a multiple of 16, up to 1024.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, if it is the codec of values.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.QJL()
    QJL(m=256)
    """

    name: ClassVar[str] = "qjl"

    m: int = 256


@dataclass(frozen=True)
class KIVI(Codec):
    """Round between minimum and maximum: keys per channel over tokens, values per token over channels.

    KIVI (Liu et al., 2024, arXiv:2402.02750). Differs from the paper: any width and three group sizes; the
    uncompressed window is the plan's. Nothing is rotated, so outlier channels are met by their own ranges.

    Parameters
    ----------
    bits : int
        Bits of a code, 1 to 8 (the paper: 2 or 4). Ranges are not counted: 32 bits per group.
    group : {16, 32, 64}
        Tokens (keys) or channels (values) that share a range. Keys are encoded in groups of that many tokens,
        and cannot be moved one by one afterwards.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.KIVI(bits=2)
    KIVI(bits=2, group=32)
    """

    name: ClassVar[str] = "kivi"

    bits: int
    group: int = 32


@dataclass(frozen=True)
class Int8(Codec):
    """Keep signed bytes scaled by the largest magnitude of each token.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.Int8()
    Int8()
    """

    name: ClassVar[str] = "int8"


@dataclass(frozen=True)
class FP8(Codec):
    """Keep 8-bit floats scaled by the largest magnitude of each token.

    The formats of Micikevicius et al. (2022, arXiv:2209.05433). The largest magnitude becomes 448 in both.

    Parameters
    ----------
    format : {"e4m3", "e5m2"}
        Four exponent bits and three of mantissa, or five and two.

    Raises
    ------
    kvrs.PlanError
        If the format is another.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.FP8(format="e5m2")
    FP8(format='e5m2')
    """

    name: ClassVar[str] = "fp8"

    format: str = "e4m3"


_ALL: tuple[type[Codec], ...] = (
    *(Raw16, TurboQuant, RaBitQ, QJL, KIVI, Int8, FP8),
    *(AATC, KVQuant, KVTC, PALU),
)
_CLASSES: dict[str, type[Codec]] = {codec.name: codec for codec in _ALL}


def codecs() -> list[type[Codec]]:
    """Return the codecs of this version."""
    return [_CLASSES[name] for name in _kvrs.codecs() if name in _CLASSES]


def from_spec(spec: dict[str, Any]) -> Codec:
    """Return the codec that `Codec.spec` described.

    Raises
    ------
    kvrs.PlanError
        If the name or a parameter is unknown.
    """
    return settings.from_spec("codec", _CLASSES, spec)
