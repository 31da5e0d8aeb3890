"""Top-k attention: every query keeps its largest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvrs.errors import PlanError
from kvrs.settings import Setting

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK(Setting):
    """Attention of every query over the tokens with its largest scores.

    Gupta et al., 2021, arXiv:2106.06899, section 2. Nothing is evicted: all keys are scored, on their packed
    codes; the values of the other tokens are not read. ``stats()`` counts how many tiles of 16 values were
    read, and how many plain attention would have read.

    Parameters
    ----------
    k : int
        Scores that a query keeps, per query head, of all that it sees; equal scores go to the earlier token.

    Raises
    ------
    kvrs.PlanError
        If ``k`` is no int or below 1.
    """

    name: ClassVar[str] = "topk"
    kind: ClassVar[str] = "attention"

    k: int

    def _check_field(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"TopK.{name} is {value!r}; allowed: an int, 1 or more")
