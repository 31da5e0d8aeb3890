"""The cache object that `generate` and the model see; the bytes are in a `kvrs.KVStore`."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

import kvrs
from kvrs import KVError, ShapeError
from kvrs.hf.attention import current_step
from kvrs.hf.binding import bind
from kvrs.hf.compat import query_length, text_config
from kvrs.hf.shapes import sliding_windows
from kvrs.hf.support import check_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class StoreLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of the store: passes new tokens on and counts columns.

    Parameters
    ----------
    index : int
        Index of the layer.
    sliding_window : int or None
        Its sliding window in tokens.
    owner : callable
        Returns the cache of which this is a layer.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, index: int, sliding_window: int | None, owner: Any) -> None:
        super().__init__()
        self.index = index
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.columns = 0
        self._owner = owner

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing: the store takes memory as tokens come."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values as they are; the attention function stores them."""
        step = current_step()
        if step is None or step.cache is not self._owner():
            raise KVError(
                "a kvrs.hf.KVCache was updated outside of its model; allowed: calls of the model (or its "
                "decoder) that the cache was made for"
            )
        self.is_initialized = True
        step.announce(self.index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of columns seen, padding included."""
        return self.columns

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Return (columns with the new ones, 0): the padding mask always spans all columns."""
        return self.columns + query_length(query), 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit in tokens."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget the columns; `KVCache.reset` frees the store's sequences."""
        self.columns = 0
        self.is_initialized = False

    def offload(self) -> None:
        """Do nothing: the store decides where its bytes are."""

    def prefetch(self) -> None:
        """Do nothing: the store decides where its bytes are."""

    def reorder_cache(self, *_: Any) -> NoReturn:
        """Raise: beam search is not offered."""
        _refuse("reorder_cache", "beam search")

    def crop(self, *_: Any) -> NoReturn:
        """Raise: taking tokens back is not offered."""
        _refuse("crop", "assisted and prompt-lookup decoding")

    def batch_repeat_interleave(self, *_: Any) -> NoReturn:
        """Raise: repeating rows is not offered."""
        _refuse("batch_repeat_interleave", "repeating rows")

    def batch_select_indices(self, *_: Any) -> NoReturn:
        """Raise: selecting rows is not offered."""
        _refuse("batch_select_indices", "selecting rows")


class KVCache(Cache):  # type: ignore[misc]
    """A transformers cache whose keys and values are packed in a `kvrs.KVStore`.

    The model attends on the packed bytes for as long as it is called with this cache; calls without it are
    as before. Several calls of `generate` in a row continue on one cache, as with transformers' own.

    Parameters
    ----------
    model : PreTrainedModel
        The model that will be called with the cache.
    plan : kvrs.Plan
        What to keep and how; made for a model of this shape.
    capacity : int or str or None
        Hard limit of the store in bytes (``"2GiB"``), None for none.
    store : kvrs.KVStore, optional
        Put the sequences into this store instead of a new one.

    Attributes
    ----------
    store : kvrs.KVStore
        Where the keys and values are.
    seqs : list of int
        The sequence of each row of the batch; empty before the first call.

    Raises
    ------
    kvrs.PlanError
        If the model cannot use the cache or the plan is of another shape; the message names why.

    Examples
    --------
    >>> cache = kvrs.hf.KVCache(model, kvrs.Plan.for_model(model))  # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        plan: kvrs.Plan,
        capacity: int | str | None = None,
        store: kvrs.KVStore | None = None,
    ) -> None:
        check_model(model)
        _check_plan(model, plan)
        if store is None:
            store = kvrs.KVStore(plan, device=str(model.device), capacity=capacity)
        owner = weakref.ref(self)
        windows = sliding_windows(text_config(model))
        super().__init__(layers=[StoreLayer(index, window, owner) for index, window in enumerate(windows)])
        self.store = store
        self.seqs: list[int] = []
        self._framed = False
        self.binding = bind(model)
        self.binding.acquire()
        self._release = weakref.finalize(self, _close, self.binding, store, self.seqs)
        self._release.atexit = False

    def sequences(self, rows: int) -> list[int]:
        """Return the store's sequence of each row, made at the first call.

        Parameters
        ----------
        rows : int
            Rows of this call; the same for all calls until `reset`.
        """
        if not self.seqs:
            self.seqs.extend(self.store.new(rows))
            if self._framed:
                self.store.begin_prompt(self.seqs)
        if len(self.seqs) != rows:
            raise ShapeError(f"batch has {rows} rows; allowed: {len(self.seqs)}, as in the first call")
        return self.seqs

    def begin_prompt(self) -> None:
        """Say that the next calls of the model bring one prompt; without effect if one is open.

        `generate` does so by itself. A call of the model with more than one token on an empty cache is a
        whole prompt and needs no frame.
        """
        if not self._framed and self.seqs:
            self.store.begin_prompt(self.seqs)
        self._framed = True

    def end_prompt(self) -> None:
        """End the prompt: policies choose what stays of it."""
        if self._framed and self.seqs:
            self.store.end_prompt(self.seqs)
        self._framed = False

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Frame the calls of the model that bring one prompt; after an exception the prompt stays open.

        Examples
        --------
        >>> with cache.prompt():  # doctest: +SKIP
        ...     for chunk in ids.split(512, dim=1):
        ...         model(chunk, past_key_values=cache)
        """
        self.begin_prompt()
        yield
        self.end_prompt()

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first call."""
        return len(self.seqs) or -1

    def reset(self) -> None:
        """Free all that is stored; the cache is as new."""
        super().reset()
        self._framed = False
        _free(self.store, self.seqs)

    def close(self) -> None:
        """Free all that is stored and let go of the model; the cache cannot be used any more."""
        super().reset()
        self._release()

    def __repr__(self) -> str:
        return f"KVCache(rows={len(self.seqs)}, columns={self.get_seq_length()}, store={self.store!r})"


@contextmanager
def compressed(model: Any, plan: kvrs.Plan, capacity: int | str | None = None) -> Iterator[kvrs.KVStore]:
    """Let every `generate` call of a model inside the block keep its cache in one store.

    Each call starts from empty sequences; those of the last call stay in the store, to be looked at, until
    the next call or the end of the block. A call that is given a cache of its own uses that one.

    Parameters
    ----------
    model : PreTrainedModel
        The model whose `generate` is called in the block.
    plan : kvrs.Plan
        What to keep and how.
    capacity : int or str or None
        Hard limit of the store in bytes (``"2GiB"``), None for none.

    Yields
    ------
    kvrs.KVStore
        The store.

    Raises
    ------
    kvrs.PlanError
        If the model cannot use a kvrs cache; the message names why.
    """
    binding, last = bind(model), [KVCache(model, plan, capacity)]
    store = last[0].store

    def fresh() -> KVCache:
        last.pop().close()
        last.append(KVCache(model, plan, store=store))
        return last[0]

    outer, binding.provider = binding.provider, fresh
    binding.acquire()
    try:
        yield store
    finally:
        binding.provider = outer
        binding.release()
        for cache in last:
            cache.close()


def _check_plan(model: Any, plan: kvrs.Plan) -> None:
    from kvrs.hf.shapes import shape_from_config

    wanted, planned = shape_from_config(model.config), plan.shape
    for field in ("layers", "query_heads", "kv_heads", "head_dim", "value_dim", "sliding"):
        have, want = per_layer(planned, field), per_layer(wanted, field)
        if have != want:
            raise kvrs.PlanError(
                f"plan.shape.{field} is {getattr(planned, field)!r}; allowed for this model: "
                f"{getattr(wanted, field)!r}"
            )


def per_layer(shape: kvrs.ModelShape, field: str) -> list[Any]:
    """Return one value a layer, however the shape was spelled; an absent value size is the key's."""
    values = getattr(shape, field)
    if field == "value_dim" and values is None:
        values = shape.head_dim
    return list(values) if isinstance(values, (list, tuple)) else [values] * int(shape.layers)


def _refuse(call: str, purpose: str) -> NoReturn:
    raise KVError(f"{call} ({purpose}) is not offered by kvrs caches; allowed: greedy search and sampling")


def _free(store: kvrs.KVStore, seqs: list[int]) -> None:
    while seqs:
        store.free(seqs.pop())


def _close(binding: Any, store: kvrs.KVStore, seqs: list[int]) -> None:
    binding.release()
    _free(store, seqs)
