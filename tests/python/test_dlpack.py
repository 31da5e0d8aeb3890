"""Any DLPack object in, of any layout, bit-identical to a contiguous copy; results out without a copy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import kvrs
import numpy as np
import pytest
import torch
from conftest import make_store

B, H, T, D = 2, 2, 24, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def base(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (B, H, T, D)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator).to(torch.float16).to(dtype)


def stored(k: Any, v: Any, q: torch.Tensor, codec: Any = None) -> list[bytes]:
    """Return what a store holds and answers after an append of k and v."""
    store = make_store(codec or kvrs.TurboQuant(bits=4))
    seqs = store.new(B)
    store.append(0, k, v, seqs)
    out = store.attend(0, q, seqs)
    held = [part.tobytes() for seq in seqs for head in range(H) for part in store.decode(0, seq, head)]
    return [*held, out.float().numpy().tobytes()]


def query(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return base(dtype, (B, 4, 3, D))


STRIDED: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "transposed": lambda dt: base(dt, (B, T, H, D)).transpose(1, 2),
    "every_second_channel": lambda dt: base(dt, (B, H, T, 2 * D))[..., ::2],
    "tokens_from_3_on": lambda dt: base(dt, (B, H, T + 3, D))[:, :, 3:],
    "one_head_expanded": lambda dt: base(dt, (B, 1, T, D)).expand(B, H, T, D),
    "one_token_expanded": lambda dt: base(dt, (B, H, 1, D)).expand(B, H, T, D),
    "storage_offset_1": lambda dt: base(dt, (B * H * T * D + 1,))[1:].view(B, H, T, D),
    "channels_last": lambda dt: base(dt, (B, H, D, T)).transpose(2, 3),
    "rows_interleaved": lambda dt: base(dt, (B, 2, H, T, D))[:, 1],
    "inference": lambda dt: _inference(dt),
    "parameter": lambda dt: torch.nn.Parameter(base(dt), requires_grad=False),
    "subclass": lambda dt: base(dt).as_subclass(Subclass),
}


class Subclass(torch.Tensor):
    """A tensor of another class."""


def _inference(dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        return base(dtype) + 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", STRIDED)
def test_case_b36_a_strided_tensor_gives_the_bits_of_its_contiguous_copy(
    layout: str, dtype: torch.dtype
) -> None:
    k = STRIDED[layout](dtype)
    before = k.clone()
    plain = k.detach().clone(memory_format=torch.contiguous_format)
    assert stored(k, k, query(dtype)) == stored(plain, plain, query(dtype))
    assert torch.equal(k, before)


@pytest.mark.parametrize("layout", ["transposed", "every_second_channel", "storage_offset_1"])
def test_case_b36_a_strided_query_gives_the_bits_of_its_contiguous_copy(layout: str) -> None:
    wide = {
        "transposed": base(shape=(B, 3, 4, D)).transpose(1, 2),
        "every_second_channel": base(shape=(B, 4, 3, 2 * D))[..., ::2],
        "storage_offset_1": base(shape=(B * 4 * 3 * D + 1,))[1:].view(B, 4, 3, D),
    }[layout]
    assert stored(base(), base(), wide) == stored(base(), base(), wide.contiguous())


def test_case_b36_odd_strides_on_extents_of_one_mean_nothing() -> None:
    store = make_store()
    plain = base()[:1, :, :1]
    odd = plain.clone().as_strided((1, H, 1, D), (999_999_937, D, 7, 1))
    seqs = store.new(2)
    store.append(0, odd, odd, seqs[:1])
    store.append(0, plain, plain, seqs[1:])
    assert store.decode(0, seqs[0], 1)[0].tobytes() == store.decode(0, seqs[1], 1)[0].tobytes()


def unaligned() -> np.ndarray:
    raw = np.zeros(B * H * T * D * 4 + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(base().numpy().tobytes(), np.uint8)
    return raw.view(np.float32).reshape(B, H, T, D)


def read_only() -> np.ndarray:
    array = base().numpy().copy()
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "float32": lambda: base().numpy(),
    "float16": lambda: base(torch.float16).numpy(),
    "fortran_order": lambda: np.asfortranarray(base().numpy()),
    "tokens_reversed": lambda: base().numpy()[:, :, ::-1],
    "all_reversed": lambda: base().numpy()[::-1, ::-1, ::-1, ::-1],
    "unaligned": unaligned,
    "read_only": read_only,
    "broadcast": lambda: np.broadcast_to(base().numpy()[:, :1], (B, H, T, D)),
}


@pytest.mark.parametrize("layout", ARRAYS)
def test_case_b36_numpy_arrays_of_any_layout_give_the_bits_of_a_copy(layout: str) -> None:
    k = ARRAYS[layout]()
    plain = torch.from_numpy(k.copy("C"))
    assert stored(k, k, query(plain.dtype)) == stored(plain, plain, query(plain.dtype))


class Legacy:
    """A producer from before DLPack 1.0: no ``max_version``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.tensor.__dlpack__()


class Versioned(Legacy):
    """A producer that knows only the protocol's methods."""

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.tensor.__dlpack__(**keywords)


@pytest.mark.parametrize(
    "wrap",
    [Legacy, Versioned, lambda t: t.__dlpack__(), lambda t: t.__dlpack__(max_version=(1, 0))],
    ids=["old_producer", "plain_producer", "legacy_capsule", "versioned_capsule"],
)
def test_old_producers_and_capsules_are_read_as_their_tensor(wrap: Callable[[torch.Tensor], Any]) -> None:
    assert stored(wrap(base()), wrap(base()), query()) == stored(base(), base(), query())


def test_a_used_capsule_is_refused_by_name() -> None:
    store = make_store()
    seqs = store.new(B)
    capsule = base().__dlpack__()
    store.append(0, capsule, base(), seqs)
    with pytest.raises(kvrs.ArgumentError, match=r"k is .*consumed"):
        store.append(0, capsule, base(), seqs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_without_tokens_are_taken_and_answered(dtype: torch.dtype) -> None:
    store = make_store()
    seqs = store.new(B)
    k = base(dtype, (B, H, 0, D))
    store.append(0, k, k, seqs)
    out = store.extend(0, base(dtype, (B, 4, 0, D)), k, k, seqs)
    assert out.shape == (B, 4, 0, D)
    assert out.dtype == dtype
    assert store.length(seqs[0]) == 0
    empty = np.zeros((B, 4, 0, D), np.float32)
    assert store.attend(0, empty, seqs).numpy().shape == (B, 4, 0, D)


class Elsewhere:
    """Says that it is on a GPU, and must not be asked for its data."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_keywords: Any) -> Any:
        raise AssertionError("the device must be looked at before the data is asked for")


class Failing(Legacy):
    """Refuses to export."""

    def __dlpack__(self, **_keywords: Any) -> Any:
        raise BufferError("busy right now")


REFUSED: dict[str, tuple[Callable[[], Any], type, str]] = {
    "requires_grad": (lambda: base().requires_grad_(), kvrs.ArgumentError, r"detach\(\)"),
    "result_with_grad": (lambda: base().requires_grad_() * 2, kvrs.ArgumentError, r"detach\(\)"),
    "parameter": (lambda: torch.nn.Parameter(base()), kvrs.ArgumentError, r"detach\(\)"),
    "negative_view": (lambda: torch._neg_view(base()), kvrs.ArgumentError, r"resolve_neg\(\)"),
    "meta": (lambda: base().to("meta"), kvrs.DeviceError, "meta; allowed: cpu"),
    "sparse": (lambda: base().to_sparse(), kvrs.ArgumentError, "sparse_coo; allowed: a strided"),
    "elsewhere": (Elsewhere, kvrs.DeviceError, "cuda:0; allowed: cpu"),
    "failing": (lambda: Failing(base()), kvrs.ArgumentError, "busy right now"),
    "float64": (base().double, kvrs.DTypeError, "float64; allowed: float32"),
    "int64": (base().long, kvrs.DTypeError, "int64; allowed: float32"),
    "bool": (base().bool, kvrs.DTypeError, "bool; allowed: float32"),
    "complex": (lambda: base().to(torch.complex64), kvrs.DTypeError, "complex64; allowed: float32"),
    "big_endian": (lambda: base().numpy().astype(">f4"), kvrs.ArgumentError, "byte order"),
    "odd_strides": (
        lambda: np.zeros((B, H, T, D), [("a", "u1"), ("x", "f4")])["x"],
        kvrs.ArgumentError,
        "itemsize",
    ),
    "list": (lambda: [[1.0]], kvrs.DTypeError, "list; allowed: a DLPack tensor"),
    "none": (lambda: None, kvrs.DTypeError, "NoneType; allowed: a DLPack tensor"),
    "rank_3": (lambda: base()[0], kvrs.ShapeError, r"\[2, 24, 64\]; allowed: 4 dimensions"),
    "rank_5": (lambda: base()[None], kvrs.ShapeError, "allowed: 4 dimensions"),
    "rank_0": (lambda: torch.tensor(1.0), kvrs.ShapeError, r"\[\]; allowed: 4 dimensions"),
}


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_by_argument_and_reason(kind: str, argument: str) -> None:
    make, error, text = REFUSED[kind]
    store = make_store()
    seqs = store.new(B)
    tensors = {"q": base(shape=(B, 4, T, D)), "k": base(), "v": base()} | {argument: make()}
    with pytest.raises(error, match=text) as caught:
        store.extend(0, tensors["q"], tensors["k"], tensors["v"], seqs)
    assert str(caught.value).startswith(f"{argument} ")
    assert "\n" not in str(caught.value)
    assert store.length(seqs[0]) == 0


def test_an_error_inside_a_producer_that_is_no_refusal_comes_through() -> None:
    class Interrupted(Legacy):
        def __dlpack__(self, **_keywords: Any) -> Any:
            raise KeyboardInterrupt

    store = make_store()
    with pytest.raises(KeyboardInterrupt):
        store.append(0, Interrupted(base()), base(), store.new(B))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_torch_query_gets_a_torch_tensor_of_its_type(dtype: torch.dtype) -> None:
    store = make_store()
    seqs = store.new(B)
    k = base(dtype)
    out, lse = store.extend(0, base(dtype, (B, 4, T, D)), k, k, seqs, return_lse=True)
    assert type(out) is torch.Tensor
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert type(lse) is torch.Tensor
    assert lse.dtype == torch.float32
    assert lse.shape == (B, 4, T)
    out.add_(1)


def test_a_numpy_query_gets_an_array_that_numpy_and_torch_read_without_a_copy() -> None:
    store = make_store()
    seqs = store.new(B)
    k = base().numpy()
    out = store.extend(0, base(shape=(B, 4, T, D)).numpy(), k, k, seqs)
    assert isinstance(out, kvrs.Array)
    assert (out.shape, out.dtype, out.ndim) == ((B, 4, T, D), "float32", 4)
    assert out.__dlpack_device__() == (1, 0)
    views = [out.numpy(), np.asarray(out), np.from_dlpack(out)]
    addresses = {view.__array_interface__["data"][0] for view in views}
    assert addresses == {torch.from_dlpack(out).data_ptr()}
    assert np.asarray(out, np.float64).dtype == np.float64
    assert torch.equal(torch.from_dlpack(out.__dlpack__()), torch.from_numpy(views[0]))
    assert repr(out) == f"kvrs.Array(shape=[{B}, 4, {T}, {D}], dtype=float32)"
    with pytest.raises(BufferError):
        out.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError):
        out.__dlpack__(copy=True)


def test_a_bfloat16_array_says_that_numpy_lacks_its_type() -> None:
    store = make_store()
    seqs = store.new(B)
    k = base(torch.bfloat16)
    out = store.extend(0, Versioned(base(torch.bfloat16, (B, 4, T, D))), k, k, seqs)
    assert out.dtype == "bfloat16"
    assert torch.from_dlpack(out).dtype == torch.bfloat16
    with pytest.raises(kvrs.DTypeError, match="bfloat16"):
        out.numpy()


def test_results_outlive_the_array_and_the_store() -> None:
    store = make_store()
    seqs = store.new(B)
    k = base().numpy()
    array = store.extend(0, base(shape=(B, 4, T, D)).numpy(), k, k, seqs)
    copy = array.numpy().copy()
    tensor, decoded = torch.from_dlpack(array), store.decode(0, seqs[0], 0)[0]
    del array, store
    gc.collect()
    assert np.array_equal(tensor.numpy(), copy)
    assert np.array_equal(decoded, base().numpy()[0, 0])


def outputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "contiguous": torch.full((B, 4, 3, D), 7.0, dtype=dtype),
        "transposed": torch.full((B, 3, 4, D), 7.0, dtype=dtype).transpose(1, 2),
        "inside_a_larger_one": torch.full((B, 4, 9, 2 * D), 7.0, dtype=dtype)[:, :, 2:5, ::2],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", outputs())
def test_out_is_filled_in_place_and_returned(layout: str, dtype: torch.dtype) -> None:
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(dtype), base(dtype), seqs)
    out = outputs(dtype)[layout]
    around = out._base.clone() if out._base is not None else None
    want = store.attend(0, query(dtype), seqs)
    assert store.attend(0, query(dtype), seqs, out=out) is out
    assert torch.equal(out, want)
    if layout == "inside_a_larger_one":
        changed = (out._base != around).sum()
        assert changed == (want != 7.0).sum()


def test_out_may_be_a_numpy_array_for_a_torch_query() -> None:
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(), base(), seqs)
    out = np.zeros((B, 4, 3, D), np.float32)
    assert store.attend(0, query(), seqs, out=out) is out
    assert np.array_equal(out, store.attend(0, query(), seqs).numpy())


def test_out_that_cannot_be_written_is_refused() -> None:
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(), base(), seqs)
    frozen = np.zeros((B, 4, 3, D), np.float32)
    frozen.flags.writeable = False
    q = query()
    cases = [
        (frozen, kvrs.ArgumentError, "out is read-only"),
        (torch.zeros(B, 4, 3, D, dtype=torch.float16), kvrs.DTypeError, "out has dtype float16"),
        (torch.zeros(B, 4, 2, D), kvrs.ShapeError, "out has shape"),
        (torch.zeros(B, 4, 3), kvrs.ShapeError, "out has shape"),
        (torch.zeros(B, 4, 1, D).expand(B, 4, 3, D), kvrs.ShapeError, "overlap"),
        (torch.zeros(B, 4, 3, D, requires_grad=True), kvrs.ArgumentError, "out is a tensor that requires"),
        (q, kvrs.ArgumentError, "out is in the memory range of q"),
    ]
    before = q.clone()
    for out, error, text in cases:
        with pytest.raises(error, match=text):
            store.attend(0, q, seqs, out=out)
    assert torch.equal(q, before)


def test_out_that_shares_memory_with_new_keys_is_refused_before_anything_is_stored() -> None:
    store = make_store(fields={"query_heads": 2})
    seqs = store.new(B)
    k, v = base(), base()
    for out, name in ((k, "k"), (v, "v")):
        with pytest.raises(kvrs.ArgumentError, match=f"memory range of {name}"):
            store.extend(0, base(), k, v, seqs, out=out)
    assert store.length(seqs[0]) == 0
    assert torch.equal(k, base())


MASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda m: m,
    "numpy": lambda m: m.numpy(),
    "strided": lambda m: m.t().contiguous().t(),
    "every_second": lambda m: torch.stack([m, ~m], dim=2)[..., 0],
    "reversed": lambda m: m.numpy()[:, ::-1].copy()[:, ::-1],
    "lists": lambda m: m.tolist(),
}


@pytest.mark.parametrize("layout", MASKS)
def test_masks_of_any_layout_store_the_same_tokens(layout: str) -> None:
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.6
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(), base(), seqs, mask=MASKS[layout](mask))
    for row, seq in enumerate(seqs):
        assert np.array_equal(store.decode(0, seq, 1)[0], base()[row, 1][mask[row]].numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: p,
        lambda p: p.int(),
        lambda p: p.numpy(),
        lambda p: p.tolist(),
        lambda p: torch.stack([p, p], 2)[..., 0],
    ],
    ids=["int64", "int32", "numpy", "lists", "strided"],
)
def test_positions_of_any_kind_give_the_same_positions(make: Callable[[torch.Tensor], Any]) -> None:
    positions = torch.stack([torch.arange(T) + 5, torch.arange(T) + 100])
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(), base(), seqs, positions=make(positions))
    assert [store.kept_positions(seq, 0, 0).tolist() for seq in seqs] == positions.tolist()


@pytest.mark.parametrize(
    "make",
    [lambda s: s, lambda s: s.half(), lambda s: s.bfloat16(), lambda s: s.numpy(), lambda s: s.tolist()],
    ids=["float32", "float16", "bfloat16", "numpy", "list"],
)
def test_sink_logits_of_any_kind_are_read(make: Callable[[torch.Tensor], Any]) -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    store = make_store()
    seqs = store.new(B)
    store.append(0, base(), base(), seqs)
    want = store.attend(0, query(), seqs, sink_logits=sink)
    assert torch.equal(store.attend(0, query(), seqs, sink_logits=make(sink)), want)
    assert not torch.equal(store.attend(0, query(), seqs), want)


def test_inputs_are_released_after_the_call() -> None:
    store = make_store()
    k = base()
    count = torch._C._storage_Use_Count if hasattr(torch._C, "_storage_Use_Count") else None
    if count is None:
        pytest.skip("this torch does not count the users of a storage")
    before = count(k.untyped_storage()._cdata)
    for _ in range(50):
        store.append(0, k, k, store.new(B))
    with pytest.raises(kvrs.ShapeError):
        store.append(0, k, k[:, :, 1:], store.new(B))
    assert count(k.untyped_storage()._cdata) == before
