"""A KV-cache store that keeps keys and values packed and attends on the packed bytes.

A `Plan` says what to keep and how, a `KVStore` keeps it::

    plan = kvrs.Plan(shape, keys=kvrs.TurboQuant(bits=4), values=kvrs.TurboQuant(bits=4))
    store = kvrs.KVStore(plan)
    seqs = store.new()
    out = store.extend(layer, q, k, v, seqs)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvrs._kvrs import Array, KVStore, Snapshot, __version__, get_num_threads, isa, set_num_threads
from kvrs.calibrated import AATC, KVTC, PALU, Calibration, KVQuant
from kvrs.codecs import FP8, KIVI, QJL, Int8, RaBitQ, Raw16, TurboQuant, codecs
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
from kvrs.joint import Joint
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
from kvrs.sequence_file import SequenceFile, inspect
from kvrs.shape import ModelShape, Rope
from kvrs.stats import HeadSelection, LayerReport, LayerStats, Memory, PolicyStats, Stats
from kvrs.top_k import TopK

if TYPE_CHECKING:
    from kvrs import cuda as cuda
    from kvrs import hf as hf
    from kvrs.calibration import calibrate as calibrate

__all__ = [
    "AATC",
    "CAOTE",
    "FP8",
    "H2O",
    "KIVI",
    "KVTC",
    "PALU",
    "QJL",
    "TOVA",
    "AdaKV",
    "ArgumentError",
    "Array",
    "Attention",
    "Calibration",
    "CapacityError",
    "Custom",
    "DTypeError",
    "DeviceError",
    "Entropy",
    "Facts",
    "FormatError",
    "HeadSelection",
    "Int8",
    "Joint",
    "KNorm",
    "KVError",
    "KVQuant",
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
    "RaBitQ",
    "Random",
    "Raw16",
    "Rope",
    "Scissorhands",
    "SequenceError",
    "SequenceFile",
    "ShapeError",
    "SnapKV",
    "Snapshot",
    "Stats",
    "StreamingLLM",
    "TopK",
    "TurboQuant",
    "__version__",
    "codecs",
    "get_num_threads",
    "inspect",
    "isa",
    "policies",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    """Import modules on first use: `kvrs.hf` and `kvrs.calibrate` need torch and transformers."""
    if name in ("cuda", "hf", "calibration"):
        return importlib.import_module(f"kvrs.{name}")
    if name == "calibrate":
        return importlib.import_module("kvrs.calibration").calibrate
    raise AttributeError(f"module 'kvrs' has no attribute {name!r}")
