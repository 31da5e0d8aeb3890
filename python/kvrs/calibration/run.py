"""Calibrate: from a model and some texts to a plan with its data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvrs
from kvrs.calibration.assemble import plan_of
from kvrs.calibration.fingerprint import fingerprint
from kvrs.calibration.measure import SENSITIVITY_TEXTS, SENSITIVITY_TOKENS, measure
from kvrs.calibration.size import fitted
from kvrs.calibration.statistics import rows_of
from kvrs.calibration.transform import EIGENVALUE_FLOOR
from kvrs.calibration.widths import ALLOCATIONS
from kvrs.errors import PlanError
from kvrs.shape import per_layer

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from kvrs.codec import Codec


def check_model(model: Any) -> None:
    """Refuse what is no model with a configuration."""
    if not callable(model) or getattr(model, "config", None) is None:
        raise PlanError(f"model is of type {type(model).__name__}; allowed: a transformers model")


def calibrate(
    model: Any,
    batches: Iterable[Any],
    keys: Codec | Sequence[Codec],
    values: Codec | Sequence[Codec],
    *,
    sinks: int = 4,
    recent: int = 128,
    allocation: str = "sensitivity",
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
    name: str | None = None,
    floors: Mapping[int, int] | None = None,
    eigenvalue_floor: float = EIGENVALUE_FLOOR,
    sensitivity_texts: int = SENSITIVITY_TEXTS,
    sensitivity_tokens: int = SENSITIVITY_TOKENS,
    **plan_settings: Any,
) -> kvrs.Plan:
    """Measure a model on some texts and return a plan whose codecs are fitted to it.

    Each text is read once; of it only sums stay. With the default allocation the model then reads some texts
    again, once for the keys and once for the values of each layer.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    batches : iterable of Tensor
        Token ids ``[T]`` or ``[B, T]`` without padding: some thousand tokens of what the model will read.
    keys, values : Codec or sequence of Codec
        One setting or one a layer; those that need data are `AATC`, `KVTC`, `PALU` and `KVQuant`.
    sinks, recent : int
        As in `kvrs.Plan`.
    allocation : {"sensitivity", "local"}
        How AATC compares layers: by what the model says when one of them is coarse, keys and values under one
        budget; or by their own 95th percentile, keys and values apart, as its paper does.
    resume : path, optional
        File in which finished parts are kept and looked up. It may be shared by plans that differ in bits.
    progress : bool
        Show a bar with the time left.
    name : str, optional
        Name of the model; by default that of its configuration.
    floors : mapping of int to int, optional
        Least bits of all channels of a layer (AATC).
    eigenvalue_floor : float
        Least variance of a channel relative to the largest; at 0, a covariance without full rank is an error.
    sensitivity_texts, sensitivity_tokens : int
        How many of the first texts measure sensitivities, and how many of their first tokens.
    **plan_settings
        All other keywords of `kvrs.Plan` but the offsets.

    Returns
    -------
    kvrs.Plan
        With the means as offsets, and a `kvrs.Calibration` whose report tells what was measured and decided.

    Raises
    ------
    kvrs.PlanError
        If `model` is no model, there are too few tokens, a covariance is not finite or has too small a rank,
        a budget is below what the floors take, or `resume` is of another model, other texts or settings.

    Examples
    --------
    >>> codec = kvrs.AATC(bits=2.75)
    >>> plan = kvrs.calibrate(model, batches, keys=codec, values=codec)  # doctest: +SKIP
    >>> plan.save("model.kvplan")  # doctest: +SKIP
    """
    if allocation not in ALLOCATIONS:
        raise PlanError(f"allocation is {allocation!r}; allowed: {', '.join(ALLOCATIONS)}")
    check_model(model)
    shape = kvrs.ModelShape.from_config(model.config)
    codecs = {
        "keys": per_layer("keys", keys, shape.layers),
        "values": per_layer("values", values, shape.layers),
    }
    settings = {"sinks": sinks, "recent": recent, **plan_settings}
    settings["name"] = name or getattr(model.config, "_name_or_path", None) or None
    measured = measure(
        model,
        rows_of(batches),
        shape,
        codecs,
        settings,
        sensitive=allocation == "sensitivity",
        resume=None if resume is None else Path(resume),
        progress=progress,
        eigenvalue_floor=eigenvalue_floor,
        sensitivity_texts=sensitivity_texts,
        sensitivity_tokens=sensitivity_tokens,
    )
    rule = measured.rule(allocation, floors or {})
    identity = fingerprint(model)

    def plan_with(bits: float | None) -> kvrs.Plan:
        return plan_of(shape, codecs, measured, rule, settings, identity, bits)

    return fitted(plan_with, [side.codec for side in measured.sides])
