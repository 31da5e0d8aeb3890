"""Output distortion of transform coding by layer: predicted and measured, attention-aware and not.

Bits are divided inside each layer only through its own channels (``allocation="local"``), as the prediction
knows nothing of how layers compare.
"""

from __future__ import annotations

from functools import cache as cached
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

import kvrs
from kvrs.calibration import distortion
from kvrs.calibration.coding import SideCoder
from kvrs.calibration.measure import Measured, measure
from kvrs.calibration.transform import transform_of
from kvrs.calibration.widths import widths_of
from kvrs.eval.forward import no_progress
from kvrs.eval.results import Record, digest, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

WEIGHTS = ("attention", "variance")
FIRST_QUERY = 256
WINDOW = {"sinks": 4, "recent": 128}


def evaluate(
    model: Any,
    model_name: str,
    rows: Sequence[torch.Tensor],
    ids: torch.Tensor,
    bits: Sequence[float],
    record: Record,
    *,
    resume: Path | None = None,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return the distortion of each layer for several rates and both kinds of weights.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    model_name : str
        Stands in the result and tells results of different models apart.
    rows : sequence of Tensor
        Calibration texts.
    ids : Tensor
        The text on which distortion is measured; another one.
    bits : sequence of float
        Bits per element.
    record : Record
        Where finished parts are kept and looked up.
    resume : Path, optional
        As for `kvrs.calibrate`.
    advance : callable
        Told 1 for each rate and kind of weights that is done.

    Returns
    -------
    dict
        ``rows`` with ``bits``, ``weights`` and ``layers``; a layer has ``keys`` and ``values`` (predicted
        D_K and D_V), ``measured``, ``ratio`` of predicted to measured, ``remainder``, and what `Distortion`
        has more.
    """
    common = {
        "task": "distortion",
        "model": model_name,
        "dtype": str(model.dtype),
        "calibration": digest([row.tolist() for row in rows]),
        "ids": digest(ids.tolist()),
    }
    found = []
    for weights in WEIGHTS:
        take = cached(partial(calibrated, model, rows, weights, resume))
        for rate in bits:

            def compute(rate: float = rate, take: Callable[[], Measured] = take) -> dict[str, Any]:
                return {"layers": of_rate(model, ids, take(), rate)}

            layers = record.part({**common, "weights": weights, "bits": rate}, compute)["layers"]
            found.append({"weights": weights, "bits": rate, "layers": layers})
            advance(1)
    return {
        "task": "distortion",
        "model": model_name,
        "dtype": str(model.dtype),
        "tokens": len(ids),
        "rows": found,
        "versions": versions(),
    }


def calibrated(model: Any, rows: Sequence[torch.Tensor], weights: str, resume: Path | None) -> Measured:
    """Return what a model is like, for channels weighed by attention or by variance alone."""
    shape = kvrs.ModelShape.from_config(model.config)
    codecs = [kvrs.AATC(bits=3, weights=weights)] * shape.layers
    sides = {"keys": codecs, "values": codecs}
    return measure(model, rows, shape, sides, WINDOW, sensitive=False, resume=resume)


def of_rate(model: Any, ids: torch.Tensor, measured: Measured, bits: float) -> list[dict[str, float]]:
    """Return the distortion of each layer at a number of bits per element."""
    widths = widths_of(measured.sides, measured.channels, measured.rule("local", {}), bits)
    coders, noise = {}, {}
    for side in measured.sides:
        pairs = zip(measured.channels[side.key], widths[side.key], strict=True)
        transforms = [transform_of(group, each, rotated=side.rotated) for group, each in pairs]
        plain = side.coder(measured.statistics[side.layer.index])
        coders[side.key] = SideCoder(plain.layer, plain.side, plain.mean, transforms, plain.pre_rope)
        noise[side.key] = distortion.noise_covariance(measured.channels[side.key], widths[side.key])
    found = distortion.measure(model, ids, coders, noise, **WINDOW, first=FIRST_QUERY)
    return [layer.to_dict() for layer in found]


def table(result: dict[str, Any]) -> Table:
    """Return one line a layer and rate: predicted and measured error relative to the output's energy."""
    shown = Table(title=f"output distortion, {result['model']}, {result['tokens']} tokens")
    headings = ("weights", "bits", "layer", "D_K", "D_V", "predicted", "measured", "ratio", "R / measured")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "weights" else "right")
    for row in result["rows"]:
        for layer in row["layers"]:
            names = ("keys", "values", "predicted", "measured")
            shares = [f"{layer[name] / layer['energy']:.2e}" for name in names]
            rest = layer["remainder"] / layer["measured"]
            ends = [f"{layer['ratio']:.3f}", f"{rest:+.3f}"]
            shown.add_row(row["weights"], f"{row['bits']:g}", str(layer["layer"]), *shares, *ends)
        shown.add_section()
    return shown
