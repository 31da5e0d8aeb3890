"""A KV-cache store that keeps keys and values packed and attends on the packed bytes.

A `Plan` says what to keep and how, a `KVStore` keeps it::

    plan = kvrs.Plan(shape, keys=kvrs.TurboQuant(bits=4), values=kvrs.TurboQuant(bits=4))
    store = kvrs.KVStore(plan)
    seqs = store.new()
    out = store.extend(layer, q, k, v, seqs)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrs._kvrs import Array, KVStore, __version__, get_num_threads, isa, set_num_threads
from kvrs.codecs import Raw16, TurboQuant, codecs
from kvrs.custom import Attention, Custom, Facts, Needs
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
from kvrs.policies import (
    CAOTE,
    H2O,
    TOVA,
    AdaKV,
    Entropy,
    KNorm,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
    policies,
)
from kvrs.shape import ModelShape, Rope
from kvrs.stats import HeadSelection, LayerReport, LayerStats, Memory, PolicyStats, Stats
from kvrs.top_k import TopK

if TYPE_CHECKING:
    from kvrs import hf as hf

__all__ = [
    "CAOTE",
    "H2O",
    "TOVA",
    "AdaKV",
    "ArgumentError",
    "Array",
    "Attention",
    "CapacityError",
    "Custom",
    "DTypeError",
    "DeviceError",
    "Entropy",
    "Facts",
    "FormatError",
    "HeadSelection",
    "KNorm",
    "KVError",
    "KVStore",
    "KVWarning",
    "LayerReport",
    "LayerStats",
    "Memory",
    "ModelShape",
    "Needs",
    "Plan",
    "PlanError",
    "PolicyStats",
    "PyramidKV",
    "Random",
    "Raw16",
    "Rope",
    "Scissorhands",
    "SequenceError",
    "ShapeError",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "TopK",
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
