"""A KV-cache store that keeps keys and values packed and attends on the packed bytes.

A `Plan` says what to keep and how, a `KVStore` keeps it::

    plan = kvrs.Plan(shape, keys=kvrs.TurboQuant(bits=4), values=kvrs.TurboQuant(bits=4))
    store = kvrs.KVStore(plan)
    seqs = store.new()
    out = store.extend(layer, q, k, v, seqs)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrs._kvrs import Array, KVStore, __version__, get_num_threads, isa, policies, set_num_threads
from kvrs.codecs import Raw16, TurboQuant, codecs
from kvrs.errors import (
    ArgumentError,
    CapacityError,
    DeviceError,
    DTypeError,
    FormatError,
    KVError,
    KVWarning,
    PlanError,
    SequenceError,
    ShapeError,
)
from kvrs.plan import Plan
from kvrs.shape import ModelShape, Rope
from kvrs.stats import LayerReport, LayerStats, Memory, Stats

if TYPE_CHECKING:
    from kvrs import hf as hf

__all__ = [
    "ArgumentError",
    "Array",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "FormatError",
    "KVError",
    "KVStore",
    "KVWarning",
    "LayerReport",
    "LayerStats",
    "Memory",
    "ModelShape",
    "Plan",
    "PlanError",
    "Raw16",
    "Rope",
    "SequenceError",
    "ShapeError",
    "Stats",
    "TurboQuant",
    "__version__",
    "codecs",
    "get_num_threads",
    "isa",
    "policies",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    """Import `kvrs.hf` on first use: it needs torch and transformers."""
    if name == "hf":
        import importlib

        return importlib.import_module("kvrs.hf")
    raise AttributeError(f"module 'kvrs' has no attribute {name!r}")
