"""Read a plan from one line: ``turboquant:4`` or ``keys=turboquant:3,values=turboquant:2,recent=64``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvrs

if TYPE_CHECKING:
    from kvrs.codecs import Codec

SETTINGS = ("keys", "values", "sinks", "recent", "offset", "seed")
PLAN_FILE_ENDING = ".kvplan"
SWITCH = {"on": True, "off": False}


def codecs() -> dict[str, type[Codec]]:
    """Return the codecs by the name that they have in a specification."""
    return {codec.name: codec for codec in kvrs.codecs()}


def parse_codec(text: str) -> Codec:
    """Return the codec of a specification such as ``raw16`` or ``turboquant:3.5``.

    Parameters
    ----------
    text : str
        A codec's name in any case; after each colon one field, in the order of the codec's own, or as
        ``field=value``.

    Raises
    ------
    kvrs.PlanError
        If there is no such codec or field; the message lists those that there are.
    """
    name, *arguments = text.strip().split(":")
    known = codecs()
    if name.lower() not in known:
        raise kvrs.PlanError(f"codec is {name!r}; allowed: {', '.join(sorted(known))}")
    codec = known[name.lower()]
    fields = [field.name for field in dataclasses.fields(codec)]
    if len(arguments) > len(fields):
        raise kvrs.PlanError(
            f"codec is {text!r} with {len(arguments)} fields; allowed: {', '.join(fields) or 'none'}"
        )
    values: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        field, _, value = argument.rpartition("=")
        field = field or fields[index]
        if field not in fields:
            raise kvrs.PlanError(f"field of {name} is {field!r}; allowed: {', '.join(fields)}")
        values[field] = _number(value)
    try:
        return codec(**values)
    except TypeError as error:
        raise kvrs.PlanError(f"codec is {text!r}: {error}; fields: {', '.join(fields)}") from error


def parse_settings(spec: str) -> dict[str, Any]:
    """Return the settings of a specification: codecs, integers, and ``offset`` as a bool.

    Parameters
    ----------
    spec : str
        One codec for keys and values, or ``key=value`` pairs divided by commas.

    Raises
    ------
    kvrs.PlanError
        If a key is unknown or given twice or a value cannot be read; the message lists what is allowed.
    """
    settings: dict[str, Any] = {}
    for part in spec.split(","):
        key, divider, value = part.strip().partition("=")
        if not divider or ":" in key:
            _set(settings, "keys", part)
            _set(settings, "values", part)
        else:
            _set(settings, key.strip(), value)
    for key in ("keys", "values"):
        if key not in settings:
            raise kvrs.PlanError(f"plan {spec!r} has no {key}; allowed: keys=CODEC,values=CODEC or one CODEC")
    return settings


def plan_from_spec(spec: str, model: Any) -> kvrs.Plan:
    """Return the plan of a specification, or of a plan file, for a model.

    Parameters
    ----------
    spec : str
        See `parse_settings`; or the path of a ``.kvplan`` file.
    model : PreTrainedModel or PreTrainedConfig
        Shape, RoPE and windows are read from it; from a model also the biases for the offset, unless the
        specification says ``offset=off``.
    """
    if spec.endswith(PLAN_FILE_ENDING):
        return kvrs.Plan.load(Path(spec))
    settings = parse_settings(spec)
    if not settings.pop("offset", True):
        settings |= {"key_offset": False, "value_offset": False}
    return kvrs.Plan.for_model(model, **settings)


def _set(settings: dict[str, Any], key: str, value: str) -> None:
    if key not in SETTINGS:
        raise kvrs.PlanError(f"setting is {key!r}; allowed: {', '.join(SETTINGS)}")
    if key in settings:
        raise kvrs.PlanError(f"setting {key!r} is given twice; allowed: once")
    if key in ("keys", "values"):
        settings[key] = parse_codec(value)
    elif key == "offset":
        if value not in SWITCH:
            raise kvrs.PlanError(f"offset is {value!r}; allowed: {', '.join(SWITCH)}")
        settings[key] = SWITCH[value]
    else:
        if not value.strip().isdigit():
            raise kvrs.PlanError(f"{key} is {value!r}; allowed: an integer from 0")
        settings[key] = int(value)


def _number(text: str) -> int | float | str:
    """Return text as the number it spells, else as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
