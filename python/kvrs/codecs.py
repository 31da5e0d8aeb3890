"""Codecs: how keys and values are packed. Frozen settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvrs import _kvrs, settings
from kvrs.settings import Setting

__all__ = ["Codec", "Raw16", "TurboQuant", "codecs", "from_spec"]


@dataclass(frozen=True)
class Codec(Setting):
    """Base of all codecs."""

    kind: ClassVar[str] = "codec"

    def _check(self, spec: str) -> None:
        _kvrs.check_codec(spec)


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

    TurboQuant (Zandieh et al., 2025, arXiv:2504.19874).

    Parameters
    ----------
    bits : float
        Bits of a code, 1 to 8; fractions mix two widths. Scales are not counted.
    variant : {"mse"}
        The variant with the least squared error.
    scale : {"unbiased", "norm", "lsq", "raw"}, optional
        How a vector's scale is chosen; by default ``"unbiased"`` for keys and ``"norm"`` for values.
    rotation : {"hadamard", "dense"}
        A Hadamard transform with random signs, or a dense orthogonal matrix.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.TurboQuant(bits=4)
    TurboQuant(bits=4, variant='mse', scale=None, rotation='hadamard')
    """

    name: ClassVar[str] = "turboquant"

    bits: float
    variant: str = "mse"
    scale: str | None = None
    rotation: str = "hadamard"


_CLASSES: dict[str, type[Codec]] = {codec.name: codec for codec in (Raw16, TurboQuant)}


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
