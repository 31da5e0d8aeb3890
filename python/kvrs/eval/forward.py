"""Run a model over token ids in chunks, with its own cache or with kvrs's."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvrs.hf.compat import CACHE_ARGUMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import kvrs


@contextmanager
def exact_cache(model: Any) -> Iterator[Any]:
    """Give transformers' own cache for a model."""
    from transformers import DynamicCache

    yield DynamicCache(config=model.config)


def prompt(cache: Any) -> AbstractContextManager[None]:
    """Frame the calls that bring one prompt, for a cache that wants to know."""
    return cache.prompt() if hasattr(cache, "prompt") else nullcontext()


@contextmanager
def kvrs_cache(model: Any, plan: kvrs.Plan) -> Iterator[Any]:
    """Give a kvrs cache for a model, and free it at the end."""
    from kvrs.hf import KVCache

    cache = KVCache(model, plan)
    try:
        yield cache
    finally:
        cache.close()


def no_progress(_tokens: int) -> None:
    """Report nothing."""


def feed(
    model: Any,
    cache: Any,
    ids: Sequence[int],
    *,
    chunk: int,
    keep: int = 1,
    advance: Callable[[int], None] = no_progress,
) -> Iterator[torch.Tensor]:
    """Run token ids through a model and yield the logits of each chunk.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    cache : Cache
        Takes up the keys and values; it may hold earlier tokens.
    ids : sequence of int
        One row of tokens.
    chunk : int
        Tokens in one call of the model.
    keep : int
        How many of the last logits of each chunk to compute, 0 for all.
    advance : callable
        Told the number of tokens done after each chunk.

    Yields
    ------
    Tensor
        ``[min(keep, chunk), vocabulary]`` in float32.
    """
    for start in range(0, len(ids), chunk):
        part = torch.tensor([list(ids[start : start + chunk])], device=model.device)
        with torch.no_grad():
            output = model(part, use_cache=True, logits_to_keep=keep, **{CACHE_ARGUMENT: cache})
        advance(part.shape[1])
        yield output.logits[0].float()


@dataclass(frozen=True)
class Decoded:
    """Tokens that a model wrote greedily, and how long it took."""

    ids: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding; the first token belongs to the prompt's pass."""
        return (len(self.ids) - 1) / self.decode_seconds if self.decode_seconds else 0.0


def decode(
    model: Any,
    cache: Any,
    ids: Sequence[int],
    *,
    tokens: int,
    chunk: int,
    stop: Callable[[list[int]], bool] = lambda _ids: False,
    advance: Callable[[int], None] = no_progress,
) -> Decoded:
    """Read a prompt in chunks and continue it greedily.

    Parameters
    ----------
    model, cache
        As for `feed`.
    ids : sequence of int
        The prompt, one row of tokens.
    tokens : int
        How many to write at most.
    chunk : int
        Tokens of the prompt in one call of the model.
    stop : callable
        Given the ids written so far, whether that is enough.
    advance : callable
        Told the number of tokens done after each call.
    """
    begin = time.perf_counter()
    if not ids:
        raise ValueError("prompt has 0 tokens; allowed: 1 or more")
    with prompt(cache):
        *_, last = feed(model, cache, ids, chunk=chunk, advance=advance)
    first = int(last[-1].argmax())
    prefilled = time.perf_counter()
    written = greedy(model, cache, first, tokens=tokens, stop=stop, advance=advance)
    return Decoded(written, prefilled - begin, time.perf_counter() - prefilled)


def greedy(
    model: Any,
    cache: Any,
    first: int,
    *,
    tokens: int,
    stop: Callable[[list[int]], bool] = lambda _ids: False,
    advance: Callable[[int], None] = no_progress,
) -> list[int]:
    """Return the tokens that a model writes greedily behind what a cache holds, from a first one on.

    Parameters
    ----------
    model, cache
        As for `feed`.
    first : int
        The token that the prompt is answered with.
    tokens, stop, advance
        As for `decode`.
    """
    written = [first]
    while len(written) < tokens and not stop(written):
        (last,) = feed(model, cache, written[-1:], chunk=1, advance=advance)
        written.append(int(last[-1].argmax()))
    return written
