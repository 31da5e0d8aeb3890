"""Settings that a plan stores by name: frozen dataclasses, checked when they are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from kvrs.errors import PlanError

__all__ = ["Setting", "from_spec", "of_layers"]

S = TypeVar("S", bound="Setting")


@dataclass(frozen=True)
class Setting:
    """Base of codecs and policies."""

    name: ClassVar[str] = ""
    """Its name in plans."""
    kind: ClassVar[str] = "setting"
    """What it is, for messages."""

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError(f"{self.kind} is {type(self).__name__}; allowed: a {self.kind} of kvrs")
        for field in fields(self):
            self._check_field(field.name, getattr(self, field.name))
        self._check(json.dumps(self.spec()))

    def spec(self) -> dict[str, Any]:
        """Return the setting as a plan stores it: its name and the parameters that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        params = {key: _plain(value) for key, value in values.items() if value is not None}
        return {"name": self.name, "params": {key: x for key, x in params.items() if not callable(x)}}

    def _check_field(self, name: str, value: Any) -> None:
        """Refuse what JSON cannot carry, so that the message still names the field."""
        what = f"{type(self).__name__}.{name}"
        switch = any(field.name == name and field.type == "bool" for field in fields(self))
        if switch != isinstance(value, bool):
            raise PlanError(
                f"{what} is {value!r}; allowed: {'True or False' if switch else 'a number or text'}"
            )
        if value is not None and not isinstance(value, (int, float, str)):
            raise PlanError(f"{what} is {value!r}; allowed: a number or a string")
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{what} is {value!r}; allowed: a finite number")

    def _check(self, spec: str) -> None:
        """Raise if the parameters, as JSON, are not allowed."""


def from_spec(kind: str, classes: Mapping[str, type[S]], spec: Mapping[str, Any]) -> S:
    """Return the setting that `Setting.spec` described.

    Parameters
    ----------
    kind : str
        What it is, for messages.
    classes : mapping of str to class
        The settings that there are, by name.
    spec : mapping
        ``name`` and ``params``.

    Raises
    ------
    kvrs.PlanError
        If the name or a parameter is unknown or not allowed.
    """
    name, params = spec["name"], spec.get("params", {})
    if name not in classes:
        raise PlanError(f"{kind} is {name!r}; allowed: {', '.join(classes)}")
    allowed = [field.name for field in fields(classes[name])]
    unknown = sorted(set(params) - set(allowed))
    if unknown:
        raise PlanError(f"{name}.{unknown[0]} is not a parameter; allowed: {', '.join(allowed) or 'none'}")
    return classes[name](**params)


def of_layers(field: str, values: list[Any], kind: type[S], allowed: str) -> tuple[S, ...]:
    """Return the settings of all layers; refuse what is none."""
    for index, value in enumerate(values):
        if not isinstance(value, kind):
            raise PlanError(f"{field}[{index}] is {value!r}; allowed: {allowed}")
    return tuple(values)


def _plain(value: Any) -> Any:
    return value.spec() if hasattr(value, "spec") else value
