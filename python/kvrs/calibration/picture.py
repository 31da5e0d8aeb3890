"""Draw what a calibration decided: the bits of each layer's channels, and how much each layer matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIDES = ("keys", "values")
MOST_BITS = 8


def bit_map(report: Mapping[str, Any], side: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the bits of each run of channels, ``[layers, runs]``, NaN where a layer has no such run.

    Parameters
    ----------
    report : mapping
        Of a plan's calibration.
    side : str
        ``"keys"`` or ``"values"``.
    """
    rows = {
        int(name.removeprefix(f"{side}.")): [bits for group in groups for bits in group]
        for name, groups in report["widths"].items()
        if name.startswith(f"{side}.")
    }
    layers = 1 + max((int(name.split(".")[1]) for name in report["widths"]), default=-1)
    shown = np.full((layers, max(map(len, rows.values()), default=0)), np.nan)
    for layer, bits in rows.items():
        shown[layer, : len(bits)] = bits
    return shown


def draw(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the bit maps of keys and values as PNG, and the sensitivities below if there are any.

    Parameters
    ----------
    report : mapping
        Of a plan's calibration.
    title : str
        Stands above.
    path : Path
        Where the picture goes.
    """
    from matplotlib.figure import Figure

    measured = report["sensitivities"]
    rows = 2 if measured else 1
    figure = Figure(figsize=(9, 4.0 + 2.6 * (rows - 1)), dpi=110, layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False)
    images = []
    for panel, side in zip(axes[0], SIDES, strict=True):
        shown = bit_map(report, side)
        images.append(panel.imshow(shown, aspect="auto", interpolation="nearest", vmin=0, vmax=MOST_BITS))
        mean = np.mean(list(report["bits"][side].values())) if report["bits"][side] else float("nan")
        panel.set_title(f"{side}: {mean:.2f} bits per element", fontsize=9)
        panel.set_xlabel("run of 16 channels", fontsize=8)
        panel.set_ylabel("layer", fontsize=8)
    figure.colorbar(images[0], ax=axes[0], label="bits")
    if measured:
        _draw_sensitivities(axes[1], measured)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_sensitivities(panels: Any, measured: Mapping[str, Mapping[str, float]]) -> None:
    """Draw, by layer, the divergence at 2 bits, and what one unit of distortion costs."""
    fields = {"divergence": "divergence at 2 bits, nats", "sensitivity": "divergence per unit of distortion"}
    for panel, (field, label) in zip(panels, fields.items(), strict=True):
        for side in SIDES:
            found = {
                int(name.split(".")[1]): x[field] for name, x in measured.items() if name.startswith(side)
            }
            layers = sorted(found)
            panel.plot(layers, [max(found[layer], 1e-12) for layer in layers], marker="o", ms=3, label=side)
        panel.set_yscale("log")
        panel.set_xlabel("layer", fontsize=8)
        panel.locator_params(axis="x", integer=True)
        panel.set_title(label, fontsize=9)
        panel.legend(fontsize=8)
