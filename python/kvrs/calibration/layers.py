"""What calibration has to know of each layer of a model: heads, channels and rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrs.errors import PlanError

if TYPE_CHECKING:
    import kvrs

RUN = 16
"""Channels that share a width."""


@dataclass(frozen=True)
class Layer:
    """One layer's attention.

    Attributes
    ----------
    index : int
        Which layer.
    query_heads, kv_heads, key_dim, value_dim : int
        Heads and channels.
    rope : kvrs.Rope or None
        Of the keys.
    """

    index: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope: kvrs.Rope | None

    def dim(self, side: str) -> int:
        """Return the channels of one head's keys or values."""
        return self.key_dim if side == "keys" else self.value_dim


def layers_of(shape: kvrs.ModelShape) -> list[Layer]:
    """Return the layers of a model's shape."""
    import kvrs

    return [
        Layer(
            index=index,
            query_heads=fields["query_heads"],
            kv_heads=fields["kv_heads"],
            key_dim=fields["key_dim"],
            value_dim=fields["value_dim"],
            rope=None if fields["rope"] is None else kvrs.Rope(**fields["rope"]),
        )
        for index, fields in enumerate(shape.spec())
    ]


def check_runs(layer: Layer, side: str) -> None:
    """Refuse channels that are not whole runs.

    Raises
    ------
    kvrs.PlanError
        Naming the layer and its head size.
    """
    if layer.dim(side) % RUN:
        field = "head_dim" if side == "keys" else "value_dim"
        raise PlanError(
            f"shape.{field}[{layer.index}] is {layer.dim(side)}; allowed for transform coding: "
            f"multiples of {RUN}"
        )


def attention_module(model: Any, layer: int) -> Any:
    """Return the self-attention module of a layer.

    Raises
    ------
    kvrs.PlanError
        If the model has none where it is looked for.
    """
    from kvrs.hf.support import attention_modules

    modules = attention_modules(model)
    if layer >= len(modules):
        raise PlanError(
            f"model {type(model).__name__} has {len(modules)} attention modules; allowed: one a layer"
        )
    return modules[layer]
