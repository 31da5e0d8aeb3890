"""Which tokens are still raw: sinks, the recent window and the group grid, by index."""

from __future__ import annotations

SLIDING_MARGIN = 64
"""Indices beyond the window that a sliding layer keeps, so that a crop of that depth is exact."""


def sealed_end(length: int, origin: int, recent: int, group: int) -> int:
    """Return the index one past the last encoded token.

    Parameters
    ----------
    length
        Tokens of the sequence.
    origin
        First index of the group grid: the sinks, or where the last truncation cut a sealed group.
    recent
        Newest tokens that stay raw.
    group
        Tokens encoded together.
    """
    return origin + group * (max(0, length - origin - recent) // group)


def raw_tokens(length: int, sinks: int, origin: int, recent: int, group: int) -> int:
    """Return how many tokens are raw: the sinks and everything from `sealed_end` on."""
    return min(length, sinks) + max(0, length - max(sinks, sealed_end(length, origin, recent, group)))


def truncated_origin(new_length: int, origin: int, sealed: int, sinks: int) -> int:
    """Return the origin after a truncation to `new_length` of a sequence sealed up to `sealed`.

    A cut inside the sealed part moves the origin to the cut, never below the sinks; a cut behind it
    leaves the grid alone.
    """
    return max(new_length, sinks) if new_length < sealed else origin


def sliding_page_is_free(last_index: int, length: int, sliding: int) -> bool:
    """Return whether a sliding layer may free the page whose last token has `last_index`."""
    return last_index < length - sliding - SLIDING_MARGIN


def sliding_layer_stays_raw(sliding: int, recent: int, group: int) -> bool:
    """Return whether a sliding layer is too short for any token to be encoded."""
    return sliding <= recent + group
