"""`KVRS_ISA` lowers the instruction set of a process, changes no code, and may not ask for too much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

NAMES = ["scalar", "avx2", "avx512"]

PROBE = """
import json, kvrs
import numpy as np

def attention(q, k, v):
    k, v = (x.repeat(2, axis=1).astype(np.float64) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) / 80**0.5
    weights = np.exp(scores) * np.tri(32, 100, 68)
    return weights / weights.sum(3, keepdims=True) @ v

try:
    kvrs.isa()
except kvrs.ArgumentError as error:
    told = str(error)
else:
    told = None
shape = kvrs.ModelShape(layers=1, query_heads=4, kv_heads=2, head_dim=80)
plan = kvrs.Plan(shape, kvrs.TurboQuant(bits=4), kvrs.TurboQuant(bits=4), sinks=2, recent=8)
try:
    store = kvrs.KVStore(plan)
except kvrs.ArgumentError as error:
    print(json.dumps({"isa": told, "store": str(error)}))
else:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, heads, 100, 80), np.float32) for heads in (4, 2, 2))
    store.append(0, k, v, store.new())
    out = store.attend(0, q[:, :, -32:], [0]).numpy()
    decoded = [part.tolist() for part in map(np.asarray, store.decode(0, 0, 1))]
    exact = attention(q[:, :, -32:], k, v)
    print(json.dumps({"isa": kvrs.isa(), "out": out.tolist(), "exact": exact.tolist(), "decoded": decoded}))
"""


def probe(isa: str | None) -> Any:
    """Return what a new process says that runs with `KVRS_ISA` set to `isa`."""
    environment = {name: value for name, value in os.environ.items() if name != "KVRS_ISA"}
    environment |= {} if isa is None else {"KVRS_ISA": isa}
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def best() -> Any:
    """Return what a process says that is left to choose."""
    return probe(None)


@pytest.fixture(scope="module")
def scalar() -> Any:
    """Return what the portable code says."""
    return probe("scalar")


def absent(isa: str, best: Any) -> bool:
    return NAMES.index(isa) > NAMES.index(best["isa"])


@pytest.mark.parametrize("isa", NAMES)
def test_a_lower_instruction_set_gives_the_same_codes_and_nearly_the_same_output(
    isa: str, best: Any, scalar: Any
) -> None:
    if absent(isa, best):
        assert isa not in os.environ.get("KVRS_REQUIRE", "").split(",")
        pytest.skip(f"not run: this CPU has no {isa}")
    got = probe(isa)
    assert got["isa"] == isa
    assert got["decoded"] == scalar["decoded"]
    # The noise of integer kernels, beside what four bits cost.
    out, plain, exact = np.array(got["out"]), np.array(scalar["out"]), np.array(scalar["exact"])
    assert np.linalg.norm(out - plain) <= np.linalg.norm(plain - exact) / 7


def test_without_a_wish_the_best_is_used(best: Any) -> None:
    assert probe(best["isa"])["out"] == best["out"]


def message(wish: str, best: str) -> str:
    have, missing = NAMES[: NAMES.index(best) + 1], NAMES[NAMES.index(best) + 1 :]
    note = f" (this CPU has no {' or '.join(missing)})" if missing else ""
    return f'KVRS_ISA is "{wish}"; allowed: {", ".join(have)}{note}'


@pytest.mark.parametrize("wish", ["bogus", "AVX2", "", *NAMES])
def test_an_instruction_set_that_cannot_be_had_is_an_error_that_names_both(wish: str, best: Any) -> None:
    if wish in NAMES and not absent(wish, best):
        pytest.skip(f"not run: this CPU has {wish}")
    expected = message(wish, best["isa"])
    assert probe(wish) == {"isa": expected, "store": expected}
