"""Read a plan from one line: ``turboquant:4`` or ``keys=turboquant:3,values=turboquant:2,evict=snapkv:1024``.

A plan is one codec for keys and values, or ``key=value`` pairs divided by commas::

    PLAN    keys=CODEC,values=CODEC[,evict=POLICY][,attend=topk:K][,SETTING=N]...[,offset=on|off]
    SETTING sinks, recent, prompt_budget, seed
    CODEC   NAME[:FIELD]...           turboquant:3.5   turboquant:4:prod   kivi:2:group=64   rabitq:4
                                      qjl:256   int8   fp8:e5m2   raw16
    POLICY  NAME[(POLICY)][:FIELD]... snapkv:1024   snapkv:0.25:window=16   caote(h2o):512   adakv:64MiB
    FIELD   VALUE or NAME=VALUE       in the order of the class; the first field of a policy is its budget

A policy in parentheses is the one that a wrapper takes its scores from; the wrapper's budget is for it too.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import kvrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvrs.codecs import Codec
    from kvrs.policy import Policy

T = TypeVar("T")
SETTINGS = ("keys", "values", "evict", "attend", "sinks", "recent", "prompt_budget", "offset", "seed")
POLICY = re.compile(r"(?P<name>[^():]*)(\((?P<scores>.*)\))?(?P<fields>(:[^()]*)?)")
PLAN_FILE_ENDING = ".kvplan"
SWITCH = {"on": True, "off": False}


def codecs() -> dict[str, type[Codec]]:
    """Return the codecs by the name that they have in a specification."""
    return {codec.name: codec for codec in kvrs.codecs()}


def parse_codec(text: str) -> Codec:
    """Return the codec of a specification such as ``raw16``, ``turboquant:3.5``, ``kivi:2`` or ``fp8:e5m2``.

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
    codec = _named("codec", codecs(), name)
    fields = [field.name for field in dataclasses.fields(codec)]
    values = _fields("codec", text, name, arguments, fields)
    try:
        return codec(**values)
    except TypeError as error:
        raise kvrs.PlanError(f"codec is {text!r}: {error}; fields: {', '.join(fields)}") from error


def policies() -> dict[str, type[Policy]]:
    """Return the policies that a specification may name: those without a function of the caller's."""
    return {policy.name: policy for policy in kvrs.policies() if policy is not kvrs.Custom}


def parse_policy(text: str) -> Policy:
    """Return the policy of a specification such as ``snapkv:1024`` or ``caote(h2o):0.25``.

    Parameters
    ----------
    text : str
        A policy's name in any case, the policy that it wraps in parentheses, and after each colon one field:
        first the budget, then the others in the order of the policy's own, or as ``field=value``.

    Raises
    ------
    kvrs.PlanError
        If there is no such policy or field; the message lists those that there are.
    """
    found = POLICY.fullmatch(text.strip())
    if found is None:
        raise kvrs.PlanError(f"policy is {text!r}; allowed: NAME, NAME:BUDGET or NAME(POLICY):BUDGET")
    name, inner = found["name"], found["scores"]
    policy: Any = _named("policy", policies(), name)
    own = [field.name for field in dataclasses.fields(policy)]
    if inner is not None and "scores" not in own:
        raise kvrs.PlanError(f"policy is {text!r}; allowed: {name} without parentheses")
    fields = ["budget", *(field for field in own if field not in ("budget", "scores"))]
    values = _fields("policy", text, name, found["fields"].split(":")[1:], fields)
    if inner is not None:
        values["scores"] = parse_policy(inner)
    if "budget" in values and "budget" not in own:
        budget = values.pop("budget")
        values["scores"] = _budgeted(text, values.get("scores", kvrs.SnapKV()), budget)
    made: Policy = policy(**values)
    return made


def parse_attend(text: str) -> kvrs.TopK:
    """Return the attention of a specification such as ``topk:256``.

    Raises
    ------
    kvrs.PlanError
        If it is another, or its number is not allowed.
    """
    name, *arguments = text.strip().split(":")
    _named("attend", {kvrs.TopK.name: kvrs.TopK}, name)
    values = _fields("attend", text, name, arguments, ["k"])
    if not values:
        raise kvrs.PlanError(f"attend is {text!r}; allowed: topk:K")
    return kvrs.TopK(**values)


def _budgeted(text: str, policy: Any, budget: Any) -> Any:
    """Return a policy with a budget, given to the one that it wraps if it has none of its own."""
    field = "budget" if hasattr(policy, "budget") else "scores"
    if field == "scores":
        return dataclasses.replace(policy, scores=_budgeted(text, policy.scores, budget))
    if policy.budget not in (None, budget):
        raise kvrs.PlanError(f"policy is {text!r} with budgets {policy.budget} and {budget}; allowed: one")
    return dataclasses.replace(policy, budget=budget)


def _named(kind: str, known: Mapping[str, type[T]], name: str) -> type[T]:
    if name.lower() not in known:
        raise kvrs.PlanError(f"{kind} is {name!r}; allowed: {', '.join(sorted(known))}")
    return known[name.lower()]


def _fields(kind: str, text: str, name: str, arguments: list[str], fields: list[str]) -> dict[str, Any]:
    """Return fields by name: those without one are in their order."""
    if len(arguments) > len(fields):
        raise kvrs.PlanError(
            f"{kind} is {text!r} with {len(arguments)} fields; allowed: {', '.join(fields) or 'none'}"
        )
    values: dict[str, Any] = {}
    for index, argument in enumerate(arguments):
        field, _, value = argument.rpartition("=")
        field = field or fields[index]
        if field not in fields:
            raise kvrs.PlanError(f"field of {name} is {field!r}; allowed: {', '.join(fields)}")
        if field in values:
            raise kvrs.PlanError(f"field {field!r} of {name} is given twice; allowed: once")
        values[field] = _value(value)
    return values


def parse_settings(spec: str) -> dict[str, Any]:
    """Return the settings of a specification: codecs, a policy, integers, and ``offset`` as a bool.

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
    elif key == "evict":
        settings[key] = parse_policy(value)
    elif key == "attend":
        settings[key] = parse_attend(value)
    elif key == "offset":
        if value not in SWITCH:
            raise kvrs.PlanError(f"offset is {value!r}; allowed: {', '.join(SWITCH)}")
        settings[key] = SWITCH[value]
    else:
        if not value.strip().isdigit():
            raise kvrs.PlanError(f"{key} is {value!r}; allowed: an integer from 0")
        settings[key] = int(value)


def _value(text: str) -> bool | int | float | str:
    """Return text as the truth value or the number that it spells, else as it is."""
    if text in ("true", "false"):
        return text == "true"
    kinds: Iterable[type[int] | type[float]] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return text
