"""Stores on CUDA devices where there is none, and what kvrs says about it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvrs
import pytest
from kvrs import cuda

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "crates" / "kvrs-cuda" / "tests" / "fake_driver" / "libcuda.c"
PROBE = """
import json, sys, time
start = time.process_time()
import kvrs
seconds, lazy = time.process_time() - start, "kvrs.cuda" not in sys.modules
libraries = open("/proc/self/maps").read() if sys.platform == "linux" else ""
shape = kvrs.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32)
plan = kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4))
try:
    kvrs.KVStore(plan, device=DEVICE)
    text = "made"
except kvrs.KVError as error:
    text = f"{type(error).__name__}: {error}"
status = kvrs.cuda.status()
print(json.dumps({"seconds": seconds, "lazy": lazy, "loaded": "libcuda" in libraries, "error": text,
                  "status": status.to_dict(), "text": str(status), "available": kvrs.cuda.is_available()}))
"""

ON_DEVICE = """
import ctypes, json
import kvrs, numpy as np

get = ctypes.pythonapi.PyCapsule_GetPointer
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
streams = []

class There:
    # A tensor of the host that says it is on a device, where the stand-in's memory is the host's too.
    def __init__(self, array, index=0):
        self.array, self.index = array, index

    def __dlpack_device__(self):
        return 2, self.index

    def __dlpack__(self, stream=None, **_):
        streams.append(stream)
        capsule = self.array.__dlpack__()
        device = ctypes.c_int32 * 2
        device.from_address(get(capsule, b"dltensor") + 8)[:] = 2, self.index
        return capsule

def said(call, *arguments, **keywords):
    try:
        return repr(call(*arguments, **keywords))
    except kvrs.KVError as error:
        return f"{type(error).__name__}: {error}"

shape = kvrs.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32)
plan = kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4))
store = kvrs.KVStore(plan, device="cuda:0")
k, q = np.zeros((1, 1, 3, 32), np.float32), np.zeros((1, 2, 3, 32), np.float32)
(row,) = store.new()
cpu = kvrs.KVStore(plan)
print(json.dumps({
    "device": [store.device, repr(store).split(", ")[-1]],
    "k": said(store.append, 0, k, There(k), row),
    "v": said(store.append, 0, There(k), There(k, 1), row),
    "mask": said(store.append, 0, There(k), There(k), row, mask=There(np.ones((1, 3), bool))),
    "shape": said(store.append, 0, There(k), There(k[:, :, :2]), row),
    "out": said(store.attend, 0, There(q), row, out=q),
    "overlap": said(store.attend, 0, There(q), row, out=There(q)),
    "decoded": said(store.decode_into, 0, row, There(k), k),
    "length": store.length(row),
    "streams": sorted(set(streams)),
    "on the cpu": said(cpu.append, 0, k, There(k), cpu.new()),
    "foreign": said(store.new, from_=cpu.snapshot(cpu.new()[0])),
    "append": said(store.append, 0, There(k), There(k), row),
}))
"""


def plan() -> kvrs.Plan:
    shape = kvrs.ModelShape(layers=1, query_heads=2, kv_heads=1, head_dim=32)
    return kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4))


def elsewhere(folder: Path, device: str = "cuda:0", **settings: int) -> dict[str, Any]:
    """Return what a new process says that finds the driver of a folder."""
    return ask(PROBE.replace("DEVICE", repr(device)), folder, **settings)


def ask(code: str, folder: Path, **settings: int) -> dict[str, Any]:
    """Return what a program prints, as JSON, in a process that finds the driver of a folder."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    environment |= {name: str(value) for name, value in settings.items()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def no_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the driver's library is none, found before a real one."""
    folder = tmp_path_factory.mktemp("none")
    for name in ("libcuda.so", "libcuda.so.1"):
        (folder / name).write_text("no library")
    return folder


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a stand-in for the driver; needs a build that looks for one."""
    if not cuda.status().built:
        pytest.skip("this kvrs was built without CUDA: it looks for no driver")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler, "a C compiler is there"
    folder = tmp_path_factory.mktemp("fake")
    for name in ("libcuda.so", "libcuda.so.1"):
        command = [compiler, "-shared", "-fPIC", "-Wno-unused", str(FAKE), "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


def test_the_status_says_what_is_there_or_what_is_missing() -> None:
    status = cuda.status()
    assert status.minimum_driver == "12.0"
    assert (status.missing is None) == cuda.is_available()
    assert (status.missing is None) <= (status.built and status.driver is not None and bool(status.devices))
    assert bool(status.targets) <= status.built
    with pytest.raises(AttributeError):
        status.built = True  # type: ignore[misc]


def test_the_status_reads_as_a_table() -> None:
    device = cuda.Device(0, "NVIDIA H200", "9.0", 150_000_000_000, 132)
    status = cuda.Status(True, "NVRTC 12.8.93", ("sm_90", "compute_120"), "12.0", "12.8", (device,), None)
    assert str(status) == (
        "kernels   sm_90 compute_120 (NVRTC 12.8.93)\n"
        "driver    CUDA 12.8 (12.0 or newer)\n"
        "cuda:0    NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.7 GiB"
    )
    bare = cuda.Status(False, None, (), "12.0", None, (), "no kernels")
    assert str(bare) == "kernels   none\ndriver    none (12.0 or newer)\nmissing   no kernels"
    assert cuda.Status.from_json(json.dumps(status.to_dict())) == status


def test_a_store_on_a_device_names_what_is_missing() -> None:
    missing = cuda.status().missing
    if missing is None:
        pytest.skip("nothing is missing: this machine has a GPU that kvrs can use")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(kvrs.DeviceError) as caught:
            kvrs.KVStore(plan(), device=device)
        assert str(caught.value) == f"the store is on cuda:0; allowed: cpu; {missing}"


def test_a_build_without_cuda_says_so() -> None:
    if cuda.status().built:
        pytest.skip("this kvrs was built with CUDA")
    assert cuda.status().missing == "this kvrs was built without CUDA (cargo feature `cuda`)"


@pytest.mark.parametrize(
    "device", ["gpu", "", "cuda:", "cuda:-1", "cuda:x", "cuda:1x", "CUDA:0", "cuda:1:2", "mps", 3]
)
def test_what_is_no_device_is_named_with_what_is(device: Any) -> None:
    allowed = f"the store is on {device}; allowed: cpu, cuda or cuda:N"
    with pytest.raises(kvrs.DeviceError, match=f"^{re.escape(allowed)}$"):
        kvrs.KVStore(plan(), device=device)
    with pytest.raises(kvrs.DeviceError):
        kvrs.KVStore(plan(), device=f"cuda:{2**70}")


def test_devices_of_torch_are_read_as_their_names() -> None:
    torch = pytest.importorskip("torch")
    assert kvrs.KVStore(plan(), device=torch.device("cpu")).device == "cpu"
    assert kvrs.KVStore(plan(), device=torch.device("cpu", 0)).device == "cpu"
    with pytest.raises(kvrs.DeviceError, match=r"^the store is on cuda:63; allowed: "):
        kvrs.KVStore(plan(), device=torch.device("cuda", 63))
    with pytest.raises(kvrs.DeviceError, match=r"^the store is on mps; allowed: cpu, cuda"):
        kvrs.KVStore(plan(), device=torch.device("mps"))


def test_without_a_driver_kvrs_imports_at_once_and_the_error_comes_with_the_store(no_driver: Path) -> None:
    runs = [elsewhere(no_driver) for _ in range(5)]
    assert min(run["seconds"] for run in runs) < 0.3
    run = runs[0]
    assert run["lazy"]
    assert not run["loaded"]
    assert not run["available"]
    assert run["error"] == f"DeviceError: the store is on cuda:0; allowed: cpu; {run['status']['missing']}"


def test_without_a_driver_its_library_is_named(no_driver: Path) -> None:
    run = elsewhere(no_driver)
    if not run["status"]["built"]:
        pytest.skip("this kvrs was built without CUDA: it looks for no driver")
    if run["status"]["targets"]:
        assert run["status"]["missing"] == "no NVIDIA driver: libcuda.so.1 cannot be loaded"
    else:
        assert run["status"]["missing"].startswith("this kvrs was built without its CUDA kernels: ")
    assert "driver    none (12.0 or newer)" in run["text"]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (
            {"FAKE_INIT": 100},
            "the NVIDIA driver answers cuInit with error 100: no CUDA-capable device is detected",
        ),
        ({"FAKE_INIT": 803}, "the NVIDIA driver answers cuInit with error 803: unknown error"),
        (
            {"FAKE_VERSION": 11080},
            "the NVIDIA driver serves CUDA 11.8, kvrs needs a driver for CUDA 12.0 or newer",
        ),
        ({"FAKE_DEVICES": 0}, "the NVIDIA driver finds no device"),
    ],
)
def test_a_driver_that_does_not_serve_is_named(
    fake_driver: Path, settings: dict[str, int], missing: str
) -> None:
    run = elsewhere(fake_driver, **settings)
    if not run["status"]["targets"]:
        pytest.skip("this kvrs was built without its CUDA kernels, which is what it says first")
    assert run["status"]["missing"] == missing
    assert run["error"] == f"DeviceError: the store is on cuda:0; allowed: cpu; {missing}"


def test_the_devices_of_a_driver_are_listed_and_counted(fake_driver: Path) -> None:
    run = elsewhere(fake_driver, "cuda:2", FAKE_DEVICES=2, FAKE_CAPABILITY=86, FAKE_MEMORY=24 << 30)
    assert run["status"]["driver"] == "12.8"
    assert [device["capability"] for device in run["status"]["devices"]] == ["8.6", "8.6"]
    assert "cuda:1    Fake 1, compute capability 8.6, 4 multiprocessors, 24.0 GiB" in run["text"]
    if run["status"]["targets"]:
        assert run["available"]
        assert run["error"].endswith("cuda:2; allowed: cpu; there is no device 2, the driver finds 2")


def test_a_store_on_a_device_takes_what_lies_there_and_names_the_rest(fake_driver: Path) -> None:
    if not cuda.status().targets:
        pytest.skip("this kvrs was built without its CUDA kernels, which is what it says first")
    said = ask(ON_DEVICE, fake_driver, FAKE_MEMORY=64 << 20, FAKE_POOLS=0)
    assert said["device"] == ["cuda:0", "device=cuda:0)"]
    assert said["k"] == "DeviceError: k is on cpu; allowed: cuda:0, as the store"
    assert said["v"] == "DeviceError: v is on cuda:1; allowed: cuda:0, as the store"
    assert said["mask"] == "DeviceError: mask is on cuda:0; allowed: cpu"
    assert said["shape"] == "ShapeError: v has shape [1, 1, 2, 32]; allowed: as many tokens as k: 3"
    assert said["out"] == "DeviceError: out is on cpu; allowed: cuda:0, as the store"
    assert said["overlap"] == "ArgumentError: out is in the memory range of q; allowed: memory of its own"
    assert said["decoded"] == "DeviceError: v_out is on cpu; allowed: cuda:0, as the store"
    assert said["length"] == 0
    assert said["streams"] == [1], "the default stream, as long as torch has no device"
    assert said["on the cpu"] == "DeviceError: v is on cuda:0; allowed: cpu, as the store"
    assert "from_ is a snapshot of another store" in said["foreign"]
    assert "cuModuleGetFunction on cuda:0" in said["append"], "the stand-in has no kernels of kvrs"
