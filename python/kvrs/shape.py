"""The shape of a model's attention."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kvrs import _kvrs
from kvrs.errors import PlanError

__all__ = ["ModelShape", "Rope"]

T = TypeVar("T")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    Parameters
    ----------
    theta : float
        Base of the frequencies; without effect if `inv_freq` is given.
    dim : int, optional
        Channels that are turned, from channel 0 on; None: all.
    pairing : {"half", "interleaved"}
        Whether channel j is turned with channel j + dim / 2 or with its neighbour.
    inv_freq : sequence of float, optional
        The model's own inverse frequencies, one a pair.
    attention_factor : float
        Factor on cosine and sine (YaRN).
    """

    theta: float
    dim: int | None = None
    pairing: str = "half"
    inv_freq: tuple[float, ...] | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.inv_freq is not None:
            object.__setattr__(self, "inv_freq", _float32(*self.inv_freq))
        for field in ("theta", "attention_factor"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise PlanError(f"rope.{field} is {value!r}; allowed: a finite number above 0")
        object.__setattr__(self, "attention_factor", _float32(self.attention_factor)[0])
        if self.pairing not in ("half", "interleaved"):
            raise PlanError(f"rope.pairing is {self.pairing!r}; allowed: half, interleaved")


@dataclass(frozen=True)
class ModelShape:
    """Heads, dimensions, rotary embedding and sliding window of every layer.

    Every field but `layers` is one value for all layers, or a sequence with one a layer.

    Parameters
    ----------
    layers : int
        Number of layers.
    query_heads, kv_heads : int or sequence of int
        Heads; query head j reads key-value head ``j // (query_heads // kv_heads)``.
    head_dim : int or sequence of int
        Channels of a key.
    value_dim : int or sequence of int, optional
        Channels of a value; None: as `head_dim`.
    rope : Rope, None, or sequence of these
        Rotary embedding that keys went through; None: no rotation.
    sliding : int, None, or sequence of these
        Sliding window in tokens; None: full attention.

    Raises
    ------
    PlanError
        If a field is outside its range or a sequence has the wrong length; the message names the field.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.ModelShape(layers=2, query_heads=12, kv_heads=2, head_dim=128, sliding=[None, 512]).sliding
    (None, 512)
    """

    layers: int
    query_heads: int | tuple[int, ...]
    kv_heads: int | tuple[int, ...]
    head_dim: int | tuple[int, ...]
    value_dim: int | tuple[int, ...] | None = None
    rope: Rope | tuple[Rope | None, ...] | None = None
    sliding: int | tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("query_heads", "kv_heads", "head_dim", "value_dim", "rope", "sliding"):
            value = getattr(self, field)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, field, tuple(value))
        _check_int("layers", self.layers)
        _kvrs.check_shape(json.dumps(self.spec()))

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Read the shape from a transformers configuration.

        Raises
        ------
        PlanError
            If the configuration asks for attention that kvrs does not compute.
        """
        from kvrs.hf.shapes import shape_from_config

        return shape_from_config(config)

    @classmethod
    def from_spec(cls, spec: list[dict[str, Any]]) -> ModelShape:
        """Return the shape that `spec` described."""
        ropes = [None if layer["rope"] is None else Rope(**layer["rope"]) for layer in spec]

        def column(name: str) -> Any:
            return _shared([layer[name] for layer in spec])

        value_dim = None if all(x["value_dim"] == x["key_dim"] for x in spec) else column("value_dim")
        return cls(
            layers=len(spec),
            query_heads=column("query_heads"),
            kv_heads=column("kv_heads"),
            head_dim=column("key_dim"),
            value_dim=value_dim,
            rope=_shared(ropes),
            sliding=column("sliding"),
        )

    def spec(self) -> list[dict[str, Any]]:
        """Return one plain dictionary a layer, as a plan stores it."""
        n = self.layers
        ints = {name: per_layer(name, getattr(self, name), n) for name in ("query_heads", "kv_heads")}
        ints["key_dim"] = per_layer("head_dim", self.head_dim, n)
        ints["value_dim"] = per_layer("value_dim", self.value_dim, n)
        ropes, windows = per_layer("rope", self.rope, n), per_layer("sliding", self.sliding, n)
        layers = []
        for i in range(n):
            layer = {name: values[i] for name, values in ints.items()}
            layer["value_dim"] = layer["key_dim"] if layer["value_dim"] is None else layer["value_dim"]
            for name, value in layer.items():
                _check_int(f"{'head_dim' if name == 'key_dim' else name}[{i}]", value)
            if windows[i] is not None:
                _check_int(f"sliding[{i}]", windows[i])
            layers.append({**layer, "rope": _rope_spec(i, ropes[i]), "sliding": windows[i]})
        return layers


def per_layer(field: str, value: Any, layers: int) -> list[Any]:
    """Return one value a layer; a sequence must have as many."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * layers
    if len(value) != layers:
        raise PlanError(f"{field} has {len(value)} entries; allowed: one value, or {layers}, one a layer")
    return list(value)


def _rope_spec(layer: int, rope: Rope | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    if not isinstance(rope, Rope):
        raise PlanError(f"rope[{layer}] is {rope!r}; allowed: a kvrs.Rope or None")
    return asdict(rope)


def _float32(*numbers: float) -> tuple[float, ...]:
    """Round to float32, as plans store them."""
    return tuple(array("f", [float(number) for number in numbers]))


def _check_int(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise PlanError(f"shape.{field} is {value!r}; allowed: an int above 0")


def _shared(values: list[T]) -> T | tuple[T, ...]:
    return values[0] if all(value == values[0] for value in values) else tuple(values)
