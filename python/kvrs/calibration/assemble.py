"""Put a plan together out of what was measured: offsets, the arrays of its codecs, and a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kvrs
from kvrs.calibrated import KVQuant
from kvrs.calibration.codebooks import key_book, value_book
from kvrs.calibration.sides import shares
from kvrs.calibration.transform import transform_of
from kvrs.calibration.widths import mean_bits, widths_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvrs.calibration.allocate import Widths
    from kvrs.calibration.measure import Measured
    from kvrs.calibration.sides import Side
    from kvrs.calibration.statistics import LayerStatistics
    from kvrs.calibration.widths import Rule
    from kvrs.codec import Codec


def plan_of(
    shape: kvrs.ModelShape,
    codecs: Mapping[str, Sequence[Codec]],
    measured: Measured,
    rule: Rule,
    settings: Mapping[str, Any],
    identity: str,
    bits: float | None = None,
) -> kvrs.Plan:
    """Return the plan that was measured for; `bits` per element takes the place of AATC's own."""
    widths = widths_of(measured.sides, measured.channels, rule, bits)
    offsets: dict[str, list[Any]] = {"keys": [None] * shape.layers, "values": [None] * shape.layers}
    for layer, statistics in measured.statistics.items():
        offsets["keys"][layer] = statistics.key_mean.astype(np.float32)
        offsets["values"][layer] = statistics.value_mean.astype(np.float32)
    return kvrs.Plan(
        shape,
        keys=list(codecs["keys"]),
        values=list(codecs["values"]),
        key_offset=offsets["keys"],
        value_offset=offsets["values"],
        calibration=kvrs.Calibration(
            arrays_of(measured, widths), identity, report_of(measured, widths, rule)
        ),
        **settings,
    )


def arrays_of(measured: Measured, widths: Widths) -> dict[str, Any]:
    """Return the data of all codecs, float32 by name, ``{keys|values}.LAYER.GROUP.ARRAY``."""
    arrays: dict[str, Any] = {}
    for side in measured.sides:
        prefix = f"{side.side}.{side.layer.index}"
        if isinstance(side.codec, KVQuant):
            arrays |= _books(prefix, side, measured.statistics[side.layer.index])
            continue
        pairs = zip(measured.channels[side.key], widths[side.key], strict=True)
        for group, (found, bits) in enumerate(pairs):
            transform = transform_of(found, bits, rotated=side.rotated)
            for name in ("analysis", "synthesis", "widths"):
                arrays[f"{prefix}.{group}.{name}"] = getattr(transform, name)
    return arrays


def report_of(measured: Measured, widths: Widths, rule: Rule) -> dict[str, Any]:
    """Return what was measured and decided, as JSON can hold it."""
    each = shares(
        [side for side in measured.sides if side.key in measured.channels],
        measured.channels,
        {key: rule.sensitivities.get(key, 1.0) for key in measured.channels},
        {},
    )
    predicted = {
        f"{share.side}.{share.layer}": share.distortion(widths[share.layer, share.side]) for share in each
    }
    cost = [share.factor * predicted[f"{share.side}.{share.layer}"] for share in each]
    return {
        "tokens": measured.tokens,
        "allocation": rule.allocation,
        "bits": {side: {str(k): x for k, x in bits.items()} for side, bits in mean_bits(widths).items()},
        "widths": {f"{side}.{layer}": groups for (layer, side), groups in widths.items()},
        "predicted_distortion": predicted,
        "predicted_divergence": sum(cost)
        if rule.allocation == "sensitivity" and measured.sensitivities
        else None,
        "sensitivities": {f"{side}.{layer}": x for (layer, side), x in measured.sensitivities.items()},
        "floored_channels": {
            f"{side}.{layer}": sum(group.floored for group in groups)
            for (layer, side), groups in measured.channels.items()
        },
    }


def _books(prefix: str, side: Side, statistics: LayerStatistics) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    sample = statistics.key_sample if side.side == "keys" else statistics.value_sample
    bits, outliers = int(side.codec.bits), float(side.codec.outliers)
    for head, rows in enumerate(sample):
        if side.side == "keys":
            arrays[f"{prefix}.{head}.scale"], book = key_book(rows, bits, outliers)
        else:
            book = value_book(rows, bits, outliers)
        arrays[f"{prefix}.{head}.codebook"] = book
    return {name: x.astype(np.float32) for name, x in arrays.items()}
