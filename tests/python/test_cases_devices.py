"""Faults that users of compressed KV caches reported elsewhere: tensors that lie on different devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvrs
import numpy as np
import pytest
import torch
from conftest import contents, make_store, tensors

TQ4 = kvrs.TurboQuant(4)
DEVICES = {2: "cuda", 3: "cuda_host", 10: "rocm", 13: "cuda_managed"}
"""Numbers of DLPack and the names in messages."""


class OnDevice:
    """Says that it lies on a device, and must not be asked for its data."""

    def __init__(self, kind: int, index: int) -> None:
        self.device = (kind, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_keywords: Any) -> Any:
        raise AssertionError("devices are compared before any data is asked for")


def arguments(rng: np.random.Generator) -> dict[str, Any]:
    q, k, v = (tensors(rng, 2, 5, heads) for heads in (4, 2, 2))
    return {"q": q, "k": k, "v": v, "mask": np.ones((2, 5), bool), "out": np.zeros((2, 4, 5, 64), np.float32)}


@pytest.fixture
def filled(rng: np.random.Generator) -> tuple[kvrs.KVStore, list[int]]:
    """Return a store on the CPU whose two rows hold 40 tokens."""
    store = make_store(TQ4)
    seqs, k = store.new(2), tensors(rng, 2, 40)
    for layer in range(2):
        store.append(layer, k, k, seqs)
    return store, seqs


CALLS: dict[str, Callable[[kvrs.KVStore, list[int], dict[str, Any]], Any]] = {
    "append": lambda s, seqs, a: s.append(0, a["k"], a["v"], seqs, mask=a["mask"], q=a["q"]),
    "attend": lambda s, seqs, a: s.attend(0, a["q"], seqs, mask=a["mask"], out=a["out"]),
    "extend": lambda s, seqs, a: s.extend(0, a["q"], a["k"], a["v"], seqs, mask=a["mask"], out=a["out"]),
}
TAKEN = {"append": "k v mask q", "attend": "q mask out", "extend": "q k v mask out"}


@pytest.mark.parametrize("place", [(2, 0), (2, 1), (10, 0)], ids=str)
@pytest.mark.parametrize(
    ("call", "argument"), [(call, argument) for call in CALLS for argument in TAKEN[call].split()]
)
def test_case_b34_one_tensor_on_another_device_raises_by_name_before_anything_changes(
    call: str, argument: str, place: tuple[int, int], filled: Any, rng: np.random.Generator
) -> None:
    store, seqs = filled
    before = contents(store, seqs)
    given = arguments(rng) | {argument: OnDevice(*place)}
    with pytest.raises(kvrs.DeviceError) as caught:
        CALLS[call](store, seqs, given)
    assert str(caught.value).startswith(f"{argument} ")
    assert f"{DEVICES[place[0]]}:{place[1]}; allowed: cpu" in str(caught.value), "both devices are named"
    assert contents(store, seqs) == before
    assert not given["out"].any() if argument != "out" else True
    CALLS[call](store, seqs, arguments(rng))


def test_case_b34_decoding_into_another_device_is_refused(filled: Any) -> None:
    store, seqs = filled
    k = np.zeros((2, 2, 40, 64), np.float16)
    for given in ((OnDevice(2, 0), k), (k, OnDevice(2, 0))):
        with pytest.raises(kvrs.DeviceError, match="cuda:0; allowed: cpu"):
            store.decode_into(0, seqs, *given)
    assert not k.any()


def test_case_b34_torch_tensors_without_memory_are_refused(filled: Any, rng: np.random.Generator) -> None:
    store, seqs = filled
    k = torch.from_numpy(tensors(rng, 2, 5))
    before = contents(store, seqs)
    with pytest.raises(kvrs.DeviceError, match=r"^v .*meta; allowed: cpu"):
        store.append(0, k, k.to("meta"), seqs)
    assert contents(store, seqs) == before


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@needs_cuda
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_case_b34_tensors_on_the_cpu_and_on_a_gpu_name_both(
    argument: str, filled: Any, rng: np.random.Generator
) -> None:
    store, seqs = filled
    before = contents(store, seqs)
    given = {name: torch.from_numpy(x) for name, x in arguments(rng).items() if name in "qkv"}
    given[argument] = given[argument].cuda()
    with pytest.raises(kvrs.DeviceError, match=rf"^{argument} .*cuda:0; allowed: cpu"):
        store.extend(0, given["q"], given["k"], given["v"], seqs)
    assert contents(store, seqs) == before
    on_gpu = kvrs.KVStore(store.plan, device="cuda:0")
    rows = on_gpu.new(2)
    mixed = {name: x.cpu() if name == argument else x.cuda() for name, x in given.items()}
    with pytest.raises(kvrs.DeviceError, match=rf"^{argument} .*cpu; allowed: cuda:0"):
        on_gpu.extend(0, mixed["q"], mixed["k"], mixed["v"], rows)
    assert on_gpu.length(rows[0]) == 0


@needs_two
def test_case_b34_a_store_on_the_second_gpu_leaves_the_first_the_current_one(
    tmp_path: Any, rng: np.random.Generator
) -> None:
    """Two equal stores on two devices give equal bits."""
    plan = make_store(TQ4).plan
    store, same = kvrs.KVStore(plan, device="cuda:1"), kvrs.KVStore(plan, device="cuda:0")
    rows, here = store.new(2), same.new(2)
    torch.cuda.set_device(0)
    for _ in range(3):
        given = {name: torch.from_numpy(x) for name, x in arguments(rng).items() if name in "qkv"}
        for layer in range(2):
            there = {name: x.to("cuda:1") for name, x in given.items()}
            out = store.extend(layer, there["q"], there["k"], there["v"], rows)
            want = same.extend(layer, *(given[name].to("cuda:0") for name in "qkv"), here)
            assert out.device == torch.device("cuda:1")
            assert torch.cuda.current_device() == 0
            assert torch.equal(out.cpu(), want.cpu())
    store.save(tmp_path / "one", rows[0])
    del store
    assert torch.cuda.current_device() == 0
