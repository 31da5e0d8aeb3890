"""Codecs: how keys and values are packed. Frozen settings, checked when they are made."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvrs import _kvrs
from kvrs.errors import PlanError

__all__ = ["Codec", "Raw16", "TurboQuant", "codecs", "from_spec"]


@dataclass(frozen=True)
class Codec:
    """Base of all codecs."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError(f"codec is {type(self).__name__}; allowed: {', '.join(_CLASSES)}")
        for field in fields(self):
            _check_plain(f"{type(self).__name__}.{field.name}", getattr(self, field.name))
        _kvrs.check_codec(json.dumps(self.spec()))

    def spec(self) -> dict[str, Any]:
        """Return the codec as a plan stores it: its name and the parameters that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": self.name, "params": {key: x for key, x in values.items() if x is not None}}


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
    name, params = spec["name"], spec.get("params", {})
    if name not in _CLASSES:
        raise PlanError(f"codec is {name!r}; allowed: {', '.join(_CLASSES)}")
    allowed = [field.name for field in fields(_CLASSES[name])]
    unknown = sorted(set(params) - set(allowed))
    if unknown:
        raise PlanError(f"{name}.{unknown[0]} is not a parameter; allowed: {', '.join(allowed) or 'none'}")
    return _CLASSES[name](**params)


def _check_plain(what: str, value: object) -> None:
    """Refuse what JSON cannot carry, so that the message still names the field."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, str))):
        raise PlanError(f"{what} is {value!r}; allowed: a number or a string")
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{what} is {value!r}; allowed: a finite number")
