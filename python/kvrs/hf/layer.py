"""One layer of the cache, as transformers sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from transformers.cache_utils import CacheLayerMixin

from kvrs import KVError
from kvrs.hf.attention import current_step
from kvrs.hf.compat import query_length
from kvrs.hf.support import stepping

if TYPE_CHECKING:
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
    supports_early_init = False

    def __init__(self, index: int, sliding_window: int | None, owner: Any) -> None:
        super().__init__()
        self.index = index
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.columns = 0
        self.padded = 0
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
        self.padded = 0
        self.is_initialized = False

    def offload(self) -> None:
        """Do nothing: the store decides where its bytes are."""

    def prefetch(self) -> None:
        """Do nothing: the store decides where its bytes are."""

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back without a trace."""
        return not stepping(self._owner().store)

    def grow(self, columns: int, mask: torch.Tensor | None) -> None:
        """Count new columns; `mask` ``[B, columns]`` is False where a row has none."""
        if mask is not None:
            padded = (~mask).any(0).nonzero()
            self.padded = self.columns + int(padded.max()) + 1 if len(padded) else self.padded
        self.columns += columns

    def reorder_cache(self, *_: Any) -> NoReturn:
        """Raise: rows move in all layers at once."""
        _refuse("reorder_cache")

    def crop(self, *_: Any) -> NoReturn:
        """Raise: tokens are taken back in all layers at once."""
        _refuse("crop")

    def batch_repeat_interleave(self, *_: Any) -> NoReturn:
        """Raise: rows are repeated in all layers at once."""
        _refuse("batch_repeat_interleave")

    def batch_select_indices(self, *_: Any) -> NoReturn:
        """Raise: rows are selected in all layers at once."""
        _refuse("batch_select_indices")


def _refuse(call: str) -> NoReturn:
    raise KVError(
        f"{call} was called on one layer of a kvrs.hf.KVCache; allowed: KVCache.{call}, on all layers"
    )
