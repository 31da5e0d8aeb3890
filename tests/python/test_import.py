"""Importing kvrs is quick and needs neither torch nor a driver."""

from __future__ import annotations

import json
import subprocess
import sys

PROBE = """
import json, sys, time
start = time.perf_counter()
import kvrs
seconds = time.perf_counter() - start
libraries = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules), "cuda": "libcuda" in libraries,
                  "version": kvrs.__version__}))
"""


def probe() -> dict:
    return json.loads(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True).stdout)


def test_importing_takes_less_than_three_tenths_of_a_second() -> None:
    assert min(probe()["seconds"] for _ in range(5)) < 0.3


def test_importing_loads_neither_torch_nor_transformers_nor_a_driver() -> None:
    seen = probe()
    assert not {"torch", "transformers", "numpy"} & set(seen["modules"])
    assert not seen["cuda"]


def test_a_torch_free_program_gets_numpy_arrays_without_importing_torch() -> None:
    code = """
import sys, numpy as np, kvrs
shape = kvrs.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32)
store = kvrs.KVStore(kvrs.Plan(shape, kvrs.Raw16(), kvrs.Raw16()))
seqs = store.new()
q, k = np.ones((1, 2, 3, 32), np.float32), np.ones((1, 1, 3, 32), np.float32)
out = store.extend(0, q, k, k, seqs)
assert np.allclose(out.numpy(), 1.0) and store.decode(0, 0, 0)[0].shape == (3, 32)
assert store.kept_positions(0, 0, 0).tolist() == [0, 1, 2]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_catalogues_name_what_this_version_has() -> None:
    import kvrs

    assert {kvrs.Raw16, kvrs.TurboQuant, kvrs.RaBitQ, kvrs.QJL, kvrs.KIVI} < set(kvrs.codecs())
    assert {kvrs.Int8, kvrs.FP8, kvrs.AATC, kvrs.KVQuant, kvrs.PALU, kvrs.KVTC} < set(kvrs.codecs())
    assert len(kvrs.codecs()) == 11
    assert kvrs._kvrs.policies() == [policy.name for policy in kvrs.policies()]
    assert kvrs._kvrs.codecs() == [codec.name for codec in kvrs.codecs()]
