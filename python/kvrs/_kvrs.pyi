"""The compiled part of kvrs."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, final, type_check_only

import numpy as np

from kvrs.plan import Plan as _PlanWrapper
from kvrs.stats import HeadSelection, LayerReport, Memory, Stats

__all__ = [
    "Array",
    "KVStore",
    "Plan",
    "Snapshot",
    "__version__",
    "allocate_exact",
    "allocate_greedy",
    "allocate_waterfill",
    "check_codec",
    "check_policy",
    "check_shape",
    "codebook",
    "codecs",
    "cuda_status",
    "fit_rate",
    "gaussian_distortion",
    "get_num_threads",
    "inspect",
    "isa",
    "policies",
    "set_num_threads",
    "size_of",
]

__version__: str

@type_check_only
class _Tensor(Protocol):
    """Any DLPack object: torch.Tensor, numpy.ndarray and others, of any strides."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

_Seqs = int | Iterable[int]
_Mask = _Tensor | Sequence[Sequence[bool]]
_Positions = _Tensor | Sequence[Sequence[int]]
_Floats = _Tensor | Sequence[float]

def allocate_exact(
    weights: Sequence[float],
    channels: Sequence[int],
    floors: Sequence[int],
    budget: int,
    curve: Sequence[float] | None = None,
) -> list[int]:
    """Return the bits of each item with the least distortion under a budget, by dynamic programming.

    Parameters
    ----------
    weights : sequence of float
        Distortion of each item at 0 bits.
    channels : sequence of int
        Channels of each item: what one bit more costs.
    floors : sequence of int
        Least bits of each item.
    budget : int
        Bits a token of all items together.
    curve : sequence of float, optional
        Distortion of a channel of unit variance at 0 to 8 bits; None: `gaussian_distortion`.

    Raises
    ------
    ArgumentError
        If the budget is below the floors, a number is out of its range, or there are no items.
    """

def allocate_greedy(
    weights: Sequence[float],
    channels: Sequence[int],
    floors: Sequence[int],
    budget: int,
    curve: Sequence[float] | None = None,
) -> list[int]:
    """Return the bits of each item by marginal gain: the optimum for items of one size and a convex curve.

    Equal gains go to the lower item. Parameters and errors as for `allocate_exact`.
    """

def allocate_waterfill(
    weights: Sequence[float], channels: Sequence[int], floors: Sequence[int], budget: int
) -> list[int]:
    """Return the bits of each item by reverse water-filling: ``1/2 log2(w / level)``, rounded, by bisection.

    Parameters and errors as for `allocate_exact`.
    """

def check_codec(spec: str) -> None:
    """Check the parameters of a codec, given as JSON.

    Raises
    ------
    PlanError
        Naming the parameter, its value and what is allowed.
    """

def check_policy(spec: str) -> str:
    """Check the parameters of a policy, given as JSON; a budget may be missing.

    Returns
    -------
    str
        The policy with all of its parameters, as JSON.

    Raises
    ------
    PlanError
        Naming the parameter, its value and what is allowed.
    """

def check_shape(shape: str) -> None:
    """Check the shape of a model, given as JSON.

    Raises
    ------
    PlanError
        Naming the field, its layer, its value and what is allowed.
    """

def codebook(bits: int) -> list[float]:
    """Return the values of the gaussian codebook of a width, ascending.

    Raises
    ------
    ArgumentError
        If `bits` is not 1 to 8.
    """

def codecs() -> list[str]:
    """Return the names of the codecs of this version."""

def cuda_status() -> str:
    """Return what `kvrs.cuda.status` says, as JSON."""

def policies() -> list[str]:
    """Return the names of the policies of this version."""

def size_of(what: str, value: int | str) -> int:
    """Return a number of bytes given as an int or as text with a unit, like ``"64MiB"``.

    Raises
    ------
    ArgumentError
        If it is neither or below 1; `what` names it.
    TypeError
        If it is no int and no text.
    """

def set_num_threads(n: int) -> None:
    """Set how many threads stores use.

    Raises
    ------
    ArgumentError
        If `n` is below 1.
    """

def fit_rate(bits: Sequence[float], distortion: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return ``alpha``, ``beta`` and the curve of a quantiser's distortion ``alpha * beta**-bits``.

    A least-squares line in the logarithm (arXiv:2605.06675); the curve is for the allocations.

    Raises
    ------
    ArgumentError
        If there are fewer than two numbers of bits, or more bits are not better.
    """

def gaussian_distortion() -> list[float]:
    """Return the distortion of a gaussian channel of unit variance at 0 to 8 bits."""

def get_num_threads() -> int:
    """Return how many threads stores use; by default the cores that this process may use."""

def inspect(path: str | os.PathLike[str]) -> str:
    """Return what a sequence file says of itself, as JSON.

    Raises
    ------
    FormatError
        If it cannot be read, is cut, of another version or no sequence.
    """

def isa() -> str:
    """Return the instruction set that stores use: ``"scalar"``, ``"avx2"`` or ``"avx512"``.

    It is the best that the CPU has; the environment variable ``KVRS_ISA``, read once, may lower it.

    Raises
    ------
    ArgumentError
        If ``KVRS_ISA`` names none of them, or one that this CPU has not; making a store raises the same.

    Examples
    --------
    >>> kvrs.isa() in ("scalar", "avx2", "avx512")
    True
    """

@final
class Array:
    """A result for queries that did not come from torch: contiguous, in host memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
    @property
    def ndim(self) -> int:
        """Number of dimensions."""
    @property
    def dtype(self) -> str:
        """``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"int64"``."""
    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a ``numpy.ndarray`` on the same memory.

        Raises
        ------
        DTypeError
            If the type is bfloat16, which numpy lacks.
        """
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Plan:
    """A validated plan: JSON for the settings, arrays for the constants."""

    def __new__(
        cls,
        spec: str,
        key_offset: Iterable[_Tensor | None] | None = None,
        value_offset: Iterable[_Tensor | None] | None = None,
        arrays: dict[str, _Tensor] | None = None,
    ) -> Plan: ...
    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises
        ------
        FormatError
            If the file cannot be read, is cut, of another version, or not a plan.
        PlanError
            If its settings are not allowed.
        """
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one safetensors file with a JSON header.

        Raises
        ------
        FormatError
            If the file cannot be written.
        """
    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides codes, as 64 hex digits."""
    @property
    def spec(self) -> str:
        """The settings as JSON."""
    @property
    def key_offset(self) -> list[Array | None] | None:
        """Pre-RoPE constant of the keys of each layer, float32 ``[kv_heads, head_dim]``."""
    @property
    def value_offset(self) -> list[Array | None] | None:
        """Constant of the values of each layer, float32 ``[kv_heads, value_dim]``."""
    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the calibration, by name."""
    def memory(self, tokens: int, batch: int) -> Memory:
        """Return the bytes that `batch` sequences of `tokens` tokens will take.

        Raises
        ------
        ArgumentError
            If a count is negative or too large to be a cache.
        """
    def describe(self) -> list[LayerReport]:
        """Return what the plan does with the tokens of each layer."""

@final
class Snapshot:
    """The tokens of a sequence at one moment, from which others start: by `KVStore.snapshot` or `match`.

    Its pages live as long as it does.
    """

    @property
    def length(self) -> int:
        """Tokens that it holds."""

@final
class KVStore:
    """Packed keys and values of many sequences, and attention on the packed bytes.

    Shapes: ``B`` rows (sequences in the call), ``T`` new tokens, ``Tq`` queries, ``Hq`` and ``Hkv`` query and
    key-value heads, ``D`` and ``Dv`` channels of a key and a value. Tensors are any DLPack object of type
    float32, float16 or bfloat16, of any strides, where the store is: in host memory or on its device. They
    are read without a copy. Masks, positions, ids and sink logits are in host memory always.

    Parameters
    ----------
    plan : Plan
        What to keep, and how.
    device : str or torch.device
        ``"cpu"``, ``"cuda:1"``, or ``"cuda"`` for the first device; `kvrs.cuda.status` says what is there.
    capacity : int, str or None
        Hard limit in bytes, or text like ``"2GiB"``; None: grows as needed.

    Raises
    ------
    DeviceError
        If the device is not served; it says what is missing.
    ArgumentError
        If the capacity is not a number of bytes.

    Notes
    -----
    A token has an index (0 .. length - 1: causality, sinks, recent tokens, sliding windows, `truncate`) and a
    position (RoPE, `kept_positions`). All methods raise before anything has changed. A store may be used from
    many threads; all work is done without the GIL. After ``os.fork()`` it raises in the child.

    Examples
    --------
    >>> import kvrs, numpy as np
    >>> shape = kvrs.ModelShape(layers=1, query_heads=4, kv_heads=2, head_dim=64)
    >>> store = kvrs.KVStore(kvrs.Plan(shape, kvrs.TurboQuant(4), kvrs.TurboQuant(4)))
    >>> seqs = store.new()
    >>> k = np.ones((1, 2, 3, 64), np.float32)
    >>> q = np.ones((1, 4, 3, 64), np.float32)
    >>> store.extend(0, q, k, k, seqs).shape
    (1, 4, 3, 64)
    >>> store.length(seqs[0])
    3
    """

    def __new__(
        cls, plan: Plan | _PlanWrapper, device: str = "cpu", capacity: int | str | None = None
    ) -> KVStore: ...
    @property
    def plan(self) -> _PlanWrapper:
        """The plan that the store was made with."""
    @property
    def device(self) -> str:
        """Where the store lies: ``"cpu"`` or ``"cuda:N"``."""
    def new(self, n: int = 1, from_: Snapshot | None = None) -> list[int]:
        """Make `n` sequences, empty or with the tokens of a snapshot.

        Parameters
        ----------
        n : int
            How many.
        from_ : Snapshot, optional
            What they start with: its pages are shared, and copied by whoever first writes into one.

        Returns
        -------
        list of int
            Ids, which are never used twice.

        Raises
        ------
        ArgumentError
            If `n` is negative, or `from_` is a snapshot of another store.
        CapacityError
            If the page tables do not fit.
        """
    def append(
        self,
        layer: int,
        k: _Tensor,
        v: _Tensor,
        seqs: _Seqs,
        mask: _Mask | None = None,
        positions: _Positions | None = None,
        q: _Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: _Floats | None = None,
    ) -> None:
        """Store new tokens; they are encoded before the call returns, unless a policy waits for its prompt.

        Parameters
        ----------
        layer : int
            Layer; each one is stepped once per token.
        k : tensor ``[B, Hkv, T, D]``
            Keys after RoPE, as models cache them.
        v : tensor ``[B, Hkv, T, Dv]``
            Values, of the same type as `k`.
        seqs : int or list of int
            One id a row.
        mask : bool tensor ``[B, T]``, optional
            False: padding, not stored; what it holds is not looked at.
        positions : int64 tensor ``[B, T]``, optional
            Consecutive from the sequence's start, which the first call gives (default 0).
        q : tensor ``[B, Hq, T, D]``, optional
            Queries of the same tokens, for policies that look at attention; others do not read them.
        scale, softcap, sink_logits
            How a policy's attention is scored, as in `attend`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            If a tensor does not fit the plan, the other tensors, or the store.
        ArgumentError
            If the layer is out of range, a key or value is not finite (naming row, head and token), or a
            policy needs queries and there are none.
        SequenceError
            If an id is unknown or given twice, positions have a gap, or an open prompt is longer than the
            plan's ``prompt_budget``.
        CapacityError
            If the capacity would be passed; can only come in the first layer of a step.
        """
    def attend(
        self,
        layer: int,
        q: _Tensor,
        seqs: _Seqs,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: _Floats | None = None,
        mask: _Mask | None = None,
        return_lse: bool = False,
        out: _Tensor | None = None,
    ) -> Any:
        """Compute attention of queries over what is stored; changes nothing.

        The r-th unmasked query of n stands at index ``length - n + r``.

        Parameters
        ----------
        layer : int
            Layer.
        q : tensor ``[B, Hq, Tq, D]``
            Queries after RoPE.
        seqs : int or list of int
            One id a row.
        causal : bool
            Whether a query sees only tokens up to its own index.
        scale : float, optional
            Factor on scores; None: ``D ** -0.5``.
        softcap : float, optional
            ``softcap * tanh(score / softcap)`` on scaled scores, before masking.
        sink_logits : float tensor ``[Hq]``, optional
            One more logit a head, without a value.
        mask : bool tensor ``[B, Tq]``, optional
            False rows give zeros.
        return_lse : bool
            Also return the log-sum-exp, float32 ``[B, Hq, Tq]``, natural logarithm.
        out : tensor ``[B, Hq, Tq, Dv]``, optional
            Where to write; of the type of `q`, in memory of its own.

        Returns
        -------
        out : torch.Tensor, Array, or the given `out`
            ``[B, Hq, Tq, Dv]`` of the type of `q`; a torch tensor for torch queries. A query that sees
            nothing gives zeros and a log-sum-exp of -inf.
        lse : torch.Tensor or Array
            If `return_lse`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            If a tensor does not fit the plan, the other tensors, or the store.
        ArgumentError
            If the layer is out of range, an option is not allowed, `out` is read-only or shares memory with
            `q`, or there are more queries than tokens with `causal`.
        SequenceError
            If an id is unknown or given twice.
        """
    def extend(
        self,
        layer: int,
        q: _Tensor,
        k: _Tensor,
        v: _Tensor,
        seqs: _Seqs,
        mask: _Mask | None = None,
        positions: _Positions | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: _Floats | None = None,
        return_lse: bool = False,
        out: _Tensor | None = None,
    ) -> Any:
        """Attend on the stored past and on the call's own tokens, then append them: what a model calls.

        The past is read as encoded, the call's own keys and values exactly; always causal.

        Parameters
        ----------
        layer : int
            Layer; each one is stepped once per token.
        q : tensor ``[B, Hq, T, D]``
            Queries after RoPE.
        k, v : tensor ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``
            Keys after RoPE and values.
        seqs : int or list of int
            One id a row.
        mask : bool tensor ``[B, T]``, optional
            False: padding, not stored; its queries give zeros.
        positions : int64 tensor ``[B, T]``, optional
            As in `append`.
        scale, softcap, sink_logits, return_lse, out
            As in `attend`.

        Returns
        -------
        out, lse
            As in `attend`.

        Raises
        ------
        KVError
            As in `append` and `attend`.
        """
    def begin_prompt(self, seqs: _Seqs) -> None:
        """Say that the next tokens of these sequences are a prompt, however many calls bring them.

        Policies that act at the end of a prompt leave its tokens uncompressed until `end_prompt`. A single
        call with more than one token on an empty sequence is a whole prompt and needs no frame.

        Raises
        ------
        SequenceError
            If an id is unknown or given twice, a prompt is open already, or layers differ in length.
        """
    def end_prompt(self, seqs: _Seqs) -> None:
        """End the prompts of these sequences: policies choose, what stays is encoded, the rest is freed.

        Raises
        ------
        SequenceError
            If an id is unknown or given twice, no prompt is open, or the layers have different lengths.
        Exception
            What the function of a `Custom` policy raises; nothing has changed then.
        """
    def selection_report(self, seq: int) -> list[HeadSelection]:
        """Return what each layer and head of a sequence keeps, of what budget and by which policy.

        Raises
        ------
        SequenceError
            If the id is unknown.
        """
    def reserve(self, seqs: _Seqs, tokens: int) -> None:
        """Reserve the worst case of `tokens` more tokens in all layers.

        Raises
        ------
        CapacityError
            If the capacity would be passed.
        SequenceError
            If an id is unknown or given twice.
        """
    def length(self, seq: int, layer: int | None = None) -> int:
        """Return the tokens of a sequence in a layer; without one, the minimum over layers.

        Raises
        ------
        SequenceError
            If the id is unknown.
        """
    def kept_positions(self, seq: int, layer: int, head: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions of the kept tokens, int64, ascending.

        Raises
        ------
        SequenceError, ArgumentError
            If the id is unknown; if layer or head is out of range.
        """
    def keep(self, seq: int, layer: int, positions: Sequence[_Tensor | Sequence[int]]) -> None:
        """Keep only the given tokens of a layer; sinks and the recent window stay.

        Parameters
        ----------
        seq : int
            Sequence.
        layer : int
            Layer.
        positions : list of int arrays
            Ascending positions to keep, one array per key-value head.

        Raises
        ------
        SequenceError, ArgumentError, ShapeError
            If the id is unknown, or a position or the number of lists does not fit.
        """
    def decode(
        self, layer: int, seq: int, head: int
    ) -> tuple[
        np.ndarray[Any, np.dtype[np.float32]],
        np.ndarray[Any, np.dtype[np.float32]],
        np.ndarray[Any, np.dtype[np.int64]],
    ]:
        """Return what is stored: keys ``[n, D]``, values ``[n, Dv]`` and positions ``[n]``.

        Raises
        ------
        SequenceError, ArgumentError
            If the id is unknown; if layer or head is out of range.
        """
    def decode_into(self, layer: int, seqs: _Seqs, k_out: _Tensor, v_out: _Tensor) -> list[int]:
        """Write what is stored into the caller's tensors, for engines that attend on their own.

        Parameters
        ----------
        layer : int
            Layer.
        seqs : int or list of int
            One id a row.
        k_out, v_out : tensor ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``
            Where to write; T at least the longest row. Rows are filled with zeros behind their tokens.

        Returns
        -------
        list of int
            Tokens written, one number a row.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError, SequenceError
            If a tensor does not fit, is read-only or shares memory with the other; if an id is unknown.
        """
    def truncate(self, seq: int, n: int) -> None:
        """Bring all layers of a sequence to its first `n` tokens: the repair after any error.

        Codes before `n` stay bit for bit; a page that is cut is closed and the next group starts at `n`.

        Raises
        ------
        SequenceError, ArgumentError
            If the id is unknown; if `n` is negative or above the length; if a sliding window has dropped
            what a query at `n` would see (more than 64 tokens back), or a policy that acts whenever a group
            leaves the window has evicted behind `n`. To 0 and to its length a sequence can always be
            truncated.
        """
    def drop_last(self, seq: int, n: int) -> None:
        """Take back the newest `n` tokens, as `truncate` to what is left.

        Raises
        ------
        SequenceError, ArgumentError
            As `truncate`.
        """
    def remove(self, seq: int, start: int, stop: int) -> None:
        """Remove the tokens with indices ``start .. stop - 1`` from all layers and heads.

        Sinks and recent tokens may go too. What is left keeps its index and position and the length stays, so
        that the next token follows as if nothing had gone, and `truncate` counts the removed tokens.

        Raises
        ------
        SequenceError, ArgumentError
            If the id is unknown; if the range does not lie inside the sequence.
        """
    def fork(self, seq: int) -> int:
        """Make a sequence with the same tokens; its pages are shared until one of the two writes into them.

        Statistics of policies are copied, and an open prompt is open in both. The two may be freed in any
        order.

        Returns
        -------
        int
            The id of the new sequence.

        Raises
        ------
        SequenceError
            If the id is unknown, or layers differ in length.
        CapacityError
            If the page tables do not fit.
        """
    def reorder(self, seqs: _Seqs, index: _Tensor | Sequence[int]) -> None:
        """Let ``seqs[i]`` hold what ``seqs[index[i]]`` held; ids stay, and no sealed page is copied.

        Parameters
        ----------
        seqs : list of int
            Sequences.
        index : list of int or int tensor
            One row a sequence; rows named twice share pages, rows not named are dropped.

        Raises
        ------
        SequenceError, ArgumentError, ShapeError
            If an id is unknown or given twice, or layers differ in length; if an index is out of range; if
            their number is not that of the sequences.
        CapacityError
            If the page tables do not fit.
        """
    def select_rows(self, seqs: _Seqs, index: _Tensor | Sequence[int]) -> list[int]:
        """Make sequences that hold what ``seqs[index[i]]`` held, and free those of `seqs`.

        Parameters
        ----------
        seqs : list of int
            Sequences.
        index : list of int or int tensor
            Rows, in any number and order.

        Returns
        -------
        list of int
            The new ids, one an index.

        Raises
        ------
        SequenceError, ArgumentError, CapacityError
            As `reorder`.
        """
    def snapshot(self, seq: int) -> Snapshot:
        """Name the tokens that a sequence has now, for ``new(from_=...)``.

        Raises
        ------
        SequenceError, CapacityError
            As `fork`.
        """
    def publish(self, seq: int, token_ids: _Tensor | Sequence[int]) -> int:
        """Publish the whole blocks of 64 tokens that a sequence begins with, for `match`.

        Published prefixes that nobody holds make way for new pages where the capacity ends, the least
        recently used first.

        Parameters
        ----------
        seq : int
            Sequence.
        token_ids : list of int or int tensor ``[n]``
            The ids of its tokens, from the first on.

        Returns
        -------
        int
            Tokens that were published, a multiple of 64.

        Raises
        ------
        SequenceError, ArgumentError, CapacityError
            If the id is unknown, a prompt is open, there are more ids than tokens, or the sequence cannot be
            truncated to the whole blocks; if the page tables do not fit.
        """
    def match(self, token_ids: _Tensor | Sequence[int]) -> tuple[Snapshot | None, int]:
        """Find the longest published prefix of some tokens.

        Parameters
        ----------
        token_ids : list of int or int tensor ``[n]``
            Token ids from the first on.

        Returns
        -------
        snapshot : Snapshot or None
            What to start from; None if nothing is published that serves.
        n : int
            Tokens that it holds, a multiple of 64.

        Raises
        ------
        CapacityError
            If the page tables of a longer prefix, cut to these tokens, do not fit.
        """
    def save(self, path: str | os.PathLike[str], seq: int, compress: str | None = None) -> None:
        """Save a sequence as one file, replacing an older one as a whole; the sequence goes on.

        Parameters
        ----------
        path : path-like
            Where to. The file is written beside it, synced and renamed: the path holds the old or the new
            file.
        seq : int
            Sequence, between two steps and outside of a prompt.
        compress : {None, "deflate"}
            Compression without loss, for files that are kept for long.

        Raises
        ------
        SequenceError, ArgumentError
            If the id is unknown, a prompt is open, or layers differ in length; for another compression.
        FormatError
            If the file cannot be written; the old one and nothing else is there then.
        """
    def load(self, path: str | os.PathLike[str]) -> int:
        """Load a sequence that a store of the same plan saved; it goes on as the saved one would have.

        Returns
        -------
        int
            Its id in this store.

        Raises
        ------
        FormatError
            If the file cannot be read, is cut, damaged, of another plan, type or version.
        CapacityError
            If its pages do not fit.
        """
    def to_host(self, seqs: _Seqs) -> None:
        """Move sequences into host memory; their pages go back to the store at once.

        Ids and lengths stay; whatever needs the pages raises until `to_device`. `save` (without compression),
        `free` and `reset` work meanwhile. Parked sequences stay as they are. On a GPU this frees device
        memory; on the CPU it makes room under the capacity, and takes ``stats().bytes_parked`` of plain
        memory.

        Parameters
        ----------
        seqs : int or list of int
            Sequences, between two steps and outside of a prompt.

        Raises
        ------
        SequenceError
            If an id is unknown or doubled, a prompt is open, or layers differ in length; none has moved then.
        CapacityError
            If the system refuses the host memory; none has moved then.
        """
    def to_device(self, seqs: _Seqs) -> None:
        """Bring sequences back from host memory: they go on bit for bit as if they had never left.

        Those that are not parked stay as they are.

        Parameters
        ----------
        seqs : int or list of int
            Sequences.

        Raises
        ------
        SequenceError
            If an id is unknown or doubled.
        CapacityError
            If their pages do not fit; all stay parked then.
        """
    def free(self, seq: int) -> None:
        """Free a sequence; its id is never used again.

        Raises
        ------
        SequenceError
            If the id is unknown.
        """
    def reset(self) -> None:
        """Free all sequences and forget all published prefixes."""
    def stats(self) -> Stats:
        """Count what the store holds."""
    def check(self) -> None:
        """Check the store's own invariants.

        Raises
        ------
        KVError
            If one is broken.
        """
