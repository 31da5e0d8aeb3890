"""AATC by bytes: the most bits whose plan fits a size, everything counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvrs import _kvrs
from kvrs.calibrated import AATC
from kvrs.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import kvrs

TOKENS = 8192
"""Length of the sequence whose bytes are given."""
STEPS = 10
"""Halvings of the range of bits: to 1/128 of a bit per element."""
MOST_BITS = 8.0


def fitted(plan_with: Callable[[float | None], kvrs.Plan], codecs: Sequence[Any]) -> kvrs.Plan:
    """Return the plan with the bits that its codecs ask for, or the most that fit their bytes.

    Parameters
    ----------
    plan_with : callable
        Makes the plan with so many bits per element, None: the codecs' own.
    codecs : sequence of Codec
        Those of the plan that need data.

    Raises
    ------
    kvrs.PlanError
        If sizes differ, stand beside bits, or are below the least that the plan takes.
    """
    aatc = [codec for codec in codecs if isinstance(codec, AATC)]
    sizes = {None if codec.bytes is None else _kvrs.size_of("AATC.bytes", codec.bytes) for codec in aatc}
    if sizes <= {None}:
        return plan_with(None)
    if len(sizes) > 1:
        shown = sorted({str(codec.bytes) for codec in aatc})
        raise PlanError(
            f"AATC.bytes is {', '.join(shown)}; allowed: one size for keys and values of all layers, that "
            f"of the whole sequence of {TOKENS} tokens"
        )
    (size,) = sizes
    assert size is not None
    return _largest(plan_with, size)


def _largest(plan_with: Callable[[float | None], kvrs.Plan], size: int) -> kvrs.Plan:
    low, high = 0.0, MOST_BITS
    best, least, refused = None, None, None
    for _ in range(STEPS):
        middle = (low + high) / 2
        try:
            plan = plan_with(middle)
        except PlanError as error:  # below the floors
            low, refused = middle, error
            continue
        least = plan.memory(tokens=TOKENS).bytes_total
        if least <= size:
            low, best = middle, plan
        else:
            high = middle
    if best is None and least is None and refused is not None:
        raise refused
    if best is None:
        raise PlanError(
            f"AATC.bytes is {size} for a sequence of {TOKENS} tokens; allowed: about {least} or more"
        )
    return best
