"""What calibration measures of a model: moments of its layers, their channels, and how much each matters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrs.calibrated import AATC, KVQuant
from kvrs.calibration import sensitivity
from kvrs.calibration.allocate import SideKey
from kvrs.calibration.checkpoint import Checkpoint, digest_of
from kvrs.calibration.fingerprint import fingerprint
from kvrs.calibration.layers import Layer, layers_of
from kvrs.calibration.sides import Side, channels, raw_layers, shares, sides_of
from kvrs.calibration.statistics import LayerStatistics, Moments, observe
from kvrs.calibration.transform import EIGENVALUE_FLOOR, Channels
from kvrs.calibration.widths import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    import kvrs
    from kvrs.codec import Codec

SENSITIVITY_TEXTS = 2
SENSITIVITY_TOKENS = 1024


@dataclass(frozen=True)
class Measured:
    """What a model was found to be like, and how its layers are coded.

    Attributes
    ----------
    layers : list of Layer
        Of the model.
    sides : list of Side
        That need data.
    statistics : dict of int to LayerStatistics
        Of the layers of `sides`.
    channels : dict
        Of each side that is transformed.
    sensitivities : dict
        Divergence, distortion and sensitivity of each side of AATC, if they were measured.
    tokens : int
        That the statistics are of.
    """

    layers: list[Layer]
    sides: list[Side]
    statistics: dict[int, LayerStatistics]
    channels: dict[SideKey, list[Channels]]
    sensitivities: dict[SideKey, dict[str, float]]
    tokens: int

    def rule(self, allocation: str, floors: Mapping[int, int]) -> Rule:
        """Return how bits are divided."""
        return Rule(allocation, {key: x["sensitivity"] for key, x in self.sensitivities.items()}, floors)


def measure(
    model: Any,
    rows: Sequence[torch.Tensor],
    shape: kvrs.ModelShape,
    codecs: Mapping[str, Sequence[Codec]],
    settings: Mapping[str, Any],
    *,
    sensitive: bool,
    resume: Path | None = None,
    progress: bool = False,
    eigenvalue_floor: float = EIGENVALUE_FLOOR,
    sensitivity_texts: int = SENSITIVITY_TEXTS,
    sensitivity_tokens: int = SENSITIVITY_TOKENS,
) -> Measured:
    """Return what a model is like; parameters as for `calibrate`, with one codec a layer and side."""
    layers = layers_of(shape)
    raw = raw_layers(shape, codecs["keys"], codecs["values"], settings)
    sides = sides_of(layers, codecs["keys"], codecs["values"], raw)
    moments = _moments(sides)
    texts = [row[:sensitivity_tokens] for row in rows[:sensitivity_texts]]
    asked = [side for side in sides if isinstance(side.codec, AATC)] if sensitive else []
    needs = str([(layer, m.pre_rope, m.sampled) for layer, m in sorted(moments.items())])
    checkpoint = Checkpoint(resume, _identity(model, rows, texts, settings, eigenvalue_floor), needs)
    checkpoint.restore(moments)
    missing = [side for side in asked if _name(side) not in checkpoint.measured]
    work = sum(map(len, rows[checkpoint.texts :])) + len(missing) * sum(map(len, texts))
    with _bar(work, shown=progress) as advance:
        for index in range(checkpoint.texts, len(rows)):
            observe(model, rows[index], moments)
            checkpoint.keep(index + 1, moments)
            advance(len(rows[index]))
        statistics = {layer: m.finish() for layer, m in moments.items()}
        found = channels(model, sides, statistics, eigenvalue_floor)
        exact = [sensitivity.exact_run(model, text) for text in texts] if missing else []
        for side in missing:
            (share,) = shares([side], found, {side.key: 1.0}, {})
            coder = side.coder(statistics[side.layer.index])
            fields = {name: int(settings[name]) for name in ("sinks", "recent")}
            result = sensitivity.measure(model, exact, share, coder, rotated=side.rotated, **fields)
            checkpoint.keep_measured(_name(side), result)
            advance(sum(map(len, texts)))
    sensitivities = {side.key: checkpoint.measured[_name(side)] for side in asked}
    tokens = next((s.tokens for s in statistics.values()), 0)
    return Measured(layers, sides, statistics, found, sensitivities, tokens)


def _moments(sides: Sequence[Side]) -> dict[int, Moments]:
    """Return empty sums of the layers that need them, with what their sides ask for."""
    moments = {}
    for side in sides:
        both = [other for other in sides if other.layer.index == side.layer.index]
        pre_rope = any(other.pre_rope for other in both)
        sampled = any(isinstance(other.codec, KVQuant) for other in both)
        moments[side.layer.index] = Moments(side.layer, pre_rope=pre_rope, sampled=sampled)
    return moments


def _name(side: Side) -> str:
    """Return the key of a side's sensitivity in a checkpoint."""
    return f"{side.side}.{side.layer.index} {side.method}"


def _identity(
    model: Any,
    rows: Sequence[torch.Tensor],
    texts: Sequence[torch.Tensor],
    settings: Mapping[str, Any],
    floor: float,
) -> dict[str, str]:
    return {
        "model": fingerprint(model),
        "batches": digest_of(rows),
        "sensitivity texts": digest_of(texts),
        "settings": f"sinks={settings['sinks']} recent={settings['recent']} eigenvalue_floor={floor}",
    }


def _bar(tokens: int, *, shown: bool) -> AbstractContextManager[Callable[[int], None]]:
    """Return a progress bar with the time left; none if `rich` is not installed."""
    try:
        from kvrs.eval.report import progress
    except ImportError:
        return nullcontext(lambda _done: None)
    return progress("calibrate", max(tokens, 1), quiet=not shown)
