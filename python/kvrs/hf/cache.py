"""The cache object that `generate` and the model see; the bytes are in a `kvrs.KVStore`."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import Cache

import kvrs
from kvrs import ArgumentError, SequenceError, ShapeError
from kvrs.hf.binding import bind
from kvrs.hf.compat import text_config
from kvrs.hf.layer import StoreLayer
from kvrs.hf.shapes import sliding_windows
from kvrs.hf.support import check_model

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let row i hold what row ``beam_idx[i]`` held, as beam search does after each step; copies no page.

        Parameters
        ----------
        beam_idx : int tensor ``[B]`` or list of int
            A row for each row.
        """
        if self.seqs:
            self.store.reorder(self.seqs, _rows(beam_idx))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices` of the batch, in this order; a row may be named more than once.

        Parameters
        ----------
        indices : int tensor ``[rows]`` or list of int
            Rows.
        """
        if self.seqs:
            self.seqs[:] = self.store.select_rows(self.seqs, _rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times; the copies share their pages.

        Parameters
        ----------
        repeats : int
            At least 1.
        """
        if repeats < 1:
            raise ArgumentError(f"repeats is {repeats}; allowed: an int from 1 on")
        self.batch_select_indices([row for row in range(len(self.seqs)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest ``-tokens_to_remove`` tokens of every row back, as assisted decoding does.

        Parameters
        ----------
        tokens_to_remove : int
            0 or below.

        Raises
        ------
        kvrs.ArgumentError
            If it is above 0.
        kvrs.SequenceError
            If some row has padding among these columns, or if the store cannot take them back
            (`kvrs.KVStore.truncate`). Nothing has changed then.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(f"tokens_to_remove is {tokens_to_remove}; allowed: 0 or below")
        columns, count = self.get_seq_length(), -tokens_to_remove
        if not count or not columns:
            return
        padded = max(layer.padded for layer in self.layers)
        if count > columns or (count < columns and columns - count < padded):
            least = f"{padded - columns}..=0 or {-columns}" if padded else f"{-columns}..=0"
            raise SequenceError(
                f"tokens_to_remove is {tokens_to_remove}; allowed: {least}, of {columns} columns, the first "
                f"{padded} of which have padding"
            )
        self._take_back(None if count == columns else count)
        for layer in self.layers:
            layer.columns = columns - count
            layer.padded = min(layer.padded, layer.columns)

    def _take_back(self, count: int | None) -> None:
        """Drop the last tokens of all rows or of none; None: all tokens."""
        if count is None:
            for sequence in self.seqs:
                self.store.truncate(sequence, 0)
            return
        if len(self.seqs) == 1:
            self.store.drop_last(self.seqs[0], count)
            return
        forks: list[int] = []
        try:
            for sequence in self.seqs:
                forks.append(self.store.fork(sequence))
                self.store.drop_last(forks[-1], count)
        except kvrs.KVError:
            _free(self.store, forks)
            raise
        old = self.seqs[:]
        self.seqs[:] = forks
        _free(self.store, old)

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
    if plan.calibration is not None:
        from kvrs import calibration

        calibration.check(model, plan)


def per_layer(shape: kvrs.ModelShape, field: str) -> list[Any]:
    """Return one value a layer, however the shape was spelled; an absent value size is the key's."""
    values = getattr(shape, field)
    if field == "value_dim" and values is None:
        values = shape.head_dim
    return list(values) if isinstance(values, (list, tuple)) else [values] * int(shape.layers)


def _rows(indices: Any) -> list[int]:
    """Return row numbers as ints, from a tensor or a list."""
    return list(indices.tolist() if hasattr(indices, "tolist") else indices)


def _free(store: kvrs.KVStore, seqs: list[int]) -> None:
    while seqs:
        store.free(seqs.pop())


def _close(binding: Any, store: kvrs.KVStore, seqs: list[int]) -> None:
    binding.release()
    _free(store, seqs)
