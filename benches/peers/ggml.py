"""ggml's flash attention over its own cache types, through the libraries in the folder ``$KVRS_GGML``.

Keys and values lie head by head, which is the kinder of the layouts that ggml can read, and the worker
threads live on between steps, as in an engine.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int64, c_size_t, c_uint8, c_uint32, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benches.inputs import Case
from benches.peers.builder import Builder, MissingPeerError
from benches.timing import Form

VARIABLE = "KVRS_GGML"
F32 = 0
TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
TOLERANCES = {"f16": 0.02, "q8_0": 0.02, "q4_0": 0.25}
MAX_THREADS = 512


class InitParams(Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class PoolParams(Structure):
    """``struct ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", c_bool * MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class GraphPlan(Structure):
    """``struct ggml_cplan``."""

    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", POINTER(c_uint8)),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    )


BASE = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead": (c_size_t,),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, *[c_float] * 3),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_threadpool_params_default": (PoolParams, c_int),
}
CPU = {
    "ggml_cpu_init": (None,),
    "ggml_threadpool_new": (c_void_p, POINTER(PoolParams)),
    "ggml_threadpool_free": (None, c_void_p),
    "ggml_graph_plan": (GraphPlan, c_void_p, c_int, c_void_p),
    "ggml_graph_compute": (c_int, c_void_p, POINTER(GraphPlan)),
}


@cache
def library(folder: str) -> Any:
    """Return the functions of a ggml build by name; the folder is searched with all below it."""
    functions = {}
    for name, prototypes in (("libggml-base.so", BASE), ("libggml-cpu.so", CPU)):
        found = sorted(Path(folder).rglob(name))
        if not found:
            raise MissingPeerError(f"no {name} in ${VARIABLE}")
        loaded = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        for function, (result, *arguments) in prototypes.items():
            functions[function] = getattr(loaded, function)
            functions[function].restype, functions[function].argtypes = result, arguments
    functions["ggml_cpu_init"]()
    return type("Ggml", (), {name: staticmethod(function) for name, function in functions.items()})


class Attention:
    """A graph of one flash attention over a filled cache.

    Parameters
    ----------
    lib : object
        From `library`.
    case : Case
        What to attend over.
    kind : int
        ggml's number of the cache type.
    """

    def __init__(self, lib: Any, case: Case, kind: int) -> None:
        self.lib = lib
        row_bytes = lib.ggml_row_size(kind, case.k.shape[3])
        size = 2 * case.kv_heads * case.tokens * row_bytes + 8 * case.q.numel() + (1 << 20)
        self.context = lib.ggml_init(InitParams(size, None, False))
        weakref.finalize(self, lib.ggml_free, self.context)
        q = self._tensor(F32, case.q)
        k, v = self._tensor(kind, case.k), self._tensor(kind, case.v)
        scale = case.q.shape[3] ** -0.5
        result = lib.ggml_flash_attn_ext(self.context, q, k, v, None, scale, 0.0, 0.0)
        self.graph = lib.ggml_new_graph(self.context)
        lib.ggml_build_forward_expand(self.graph, result)
        numbers = (c_float * case.q.numel()).from_address(lib.ggml_get_data(result))
        self.out = torch.frombuffer(numbers, dtype=torch.float32)
        self.plans: dict[int, tuple[GraphPlan, Any]] = {}

    def _tensor(self, kind: int, values: torch.Tensor) -> int:
        """Return a new tensor in the context that holds the values in ggml's type."""
        _, heads, rows, dim = values.shape
        tensor: int = self.lib.ggml_new_tensor_4d(self.context, kind, dim, rows, heads, 1)
        source = values.float().contiguous()
        target = self.lib.ggml_get_data(tensor)
        if kind == F32:
            ctypes.memmove(target, source.data_ptr(), source.nbytes)
        else:
            self.lib.ggml_quantize_chunk(kind, source.data_ptr(), target, 0, heads * rows, dim, None)
        return tensor

    def _plan(self, threads: int) -> tuple[GraphPlan, Any]:
        """Return the plan for some threads, its workers and its scratch memory."""
        params = self.lib.ggml_threadpool_params_default(threads)
        pool = self.lib.ggml_threadpool_new(ctypes.byref(params))
        weakref.finalize(self, self.lib.ggml_threadpool_free, pool)
        plan = self.lib.ggml_graph_plan(self.graph, threads, pool)
        work = (c_uint8 * max(plan.work_size, 1))()
        plan.work_data = ctypes.cast(work, POINTER(c_uint8))
        return plan, work

    def step(self) -> torch.Tensor:
        """Compute with as many threads as torch is set to, and return ``[Hq * D]``."""
        threads = torch.get_num_threads()
        if threads not in self.plans:
            self.plans[threads] = self._plan(threads)
        status = self.lib.ggml_graph_compute(self.graph, ctypes.byref(self.plans[threads][0]))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return self.out


def flash_attention(case: Case, kind: str) -> Form:
    """Build ggml's flash attention over a cache of type f16, q8_0 or q4_0."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise MissingPeerError(f"${VARIABLE} is not set")
    attention = Attention(library(folder), case, TYPES[kind])
    return Form("ggml", f"ggml {kind}", attention.step, tolerance=TOLERANCES[kind])


FORMS: dict[str, Builder] = {f"ggml {kind}": partial(flash_attention, kind=kind) for kind in TYPES}
