"""The sides of a plan that need data: what each codec asks for, and its channels once they are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrs.calibrated import AATC, KVTC, PALU, KVQuant
from kvrs.calibration.allocate import Share, SideKey
from kvrs.calibration.coding import SideCoder
from kvrs.calibration.layers import check_runs
from kvrs.calibration.transform import output_moments, side_channels
from kvrs.codecs import TurboQuant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import kvrs
    from kvrs.calibration.layers import Layer
    from kvrs.calibration.statistics import LayerStatistics
    from kvrs.calibration.transform import Channels
    from kvrs.codec import Codec

TRANSFORMS = (AATC, KVTC, PALU)


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer, with a codec that needs data.

    Attributes
    ----------
    layer : Layer
        Its heads.
    side : str
        ``"keys"`` or ``"values"``.
    codec : Codec
        What the plan asks for.
    """

    layer: Layer
    side: str
    codec: Any

    @property
    def key(self) -> SideKey:
        """Layer and side."""
        return self.layer.index, self.side

    @property
    def pre_rope(self) -> bool:
        """Whether keys are coded without their rotation."""
        variant = getattr(self.codec, "variant", None)
        return variant == "pre_rope" or isinstance(self.codec, (KVTC, PALU))

    @property
    def attention(self) -> bool:
        """Whether channels are weighed by what attention makes of them."""
        return getattr(self.codec, "weights", None) == "attention"

    @property
    def rotated(self) -> bool:
        """Whether channels of equal width are turned among themselves."""
        return bool(getattr(self.codec, "run_rotation", True))

    @property
    def method(self) -> str:
        """What the channels and their sensitivity depend on, beside the model and the texts."""
        return f"pre_rope={self.pre_rope} attention={self.attention} rotated={self.rotated}"

    def coder(self, statistics: LayerStatistics) -> SideCoder:
        """Return the side's coder without transforms."""
        mean = statistics.key_mean if self.side == "keys" else statistics.value_mean
        return SideCoder(self.layer, self.side, mean, [], self.pre_rope)


def sides_of(
    layers: Sequence[Layer], keys: Sequence[Codec], values: Sequence[Codec], raw: Sequence[bool]
) -> list[Side]:
    """Return the sides that need data, by layer, keys first.

    Parameters
    ----------
    layers : sequence of Layer
        Of the model.
    keys, values : sequence of Codec
        One a layer.
    raw : sequence of bool
        Layers that the plan keeps as they are.

    Raises
    ------
    kvrs.PlanError
        If a head size is not of whole runs of channels.
    """
    found = []
    for layer, key, value in zip(layers, keys, values, strict=True):
        for side, codec in (("keys", key), ("values", value)):
            if raw[layer.index] or not isinstance(codec, (*TRANSFORMS, KVQuant)):
                continue
            if isinstance(codec, TRANSFORMS):
                check_runs(layer, side)
            found.append(Side(layer, side, codec))
    return found


def raw_layers(
    shape: kvrs.ModelShape, keys: Sequence[Codec], values: Sequence[Codec], settings: Mapping[str, Any]
) -> list[bool]:
    """Return which layers a plan keeps as they are: those whose sliding window its recent tokens cover."""
    import kvrs

    def without_data(codecs: Sequence[Codec]) -> list[Codec]:
        return [
            TurboQuant(bits=4) if isinstance(codec, (*TRANSFORMS, KVQuant)) else codec for codec in codecs
        ]

    fields = {name: settings[name] for name in ("sinks", "recent") if name in settings}
    plan = kvrs.Plan(shape, without_data(keys), without_data(values), **fields)
    return [report.raw for report in plan.describe()]


def channels(
    model: Any, sides: Sequence[Side], statistics: Mapping[int, LayerStatistics], floor: float
) -> dict[SideKey, list[Channels]]:
    """Return the channels of each head group of each side that is transformed."""
    found = {}
    for side in sides:
        if isinstance(side.codec, TRANSFORMS):
            found[side.key] = side_channels(
                statistics[side.layer.index],
                side.layer,
                side.side,
                output_moments(model, side.layer),
                pre_rope=side.pre_rope,
                attention=side.attention,
                floor=floor,
            )
    return found


def shares(
    sides: Sequence[Side],
    found: Mapping[SideKey, list[Channels]],
    factors: Mapping[SideKey, float],
    floors: Mapping[int, int],
) -> list[Share]:
    """Return what sides put into an allocation."""
    return [
        Share(
            side.layer.index, side.side, found[side.key], factors[side.key], floors.get(side.layer.index, 0)
        )
        for side in sides
    ]
