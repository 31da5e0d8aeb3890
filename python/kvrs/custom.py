"""Policies by a function of the caller's, and what it may ask to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvrs.errors import ArgumentError, PlanError
from kvrs.policy import Budget, Policy

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Attention", "Custom", "Facts", "Needs"]


@dataclass(frozen=True)
class Attention:
    """Attention that a `Custom` policy wants to know: one number per token and key-value head.

    Parameters
    ----------
    fold : {"sum", "above", "last"}
        What is added over queries: the probability, 1 if it is above ``1 / visible``, or the last query's.
    reduce : {"mean", "max", "sum"}
        How the query heads of a group become one, before that.
    queries : int or None
        How many of the prompt's last queries count, up to 4096; None: all.
    """

    fold: str = "sum"
    reduce: str = "mean"
    queries: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("fold", ("sum", "above", "last")), ("reduce", ("mean", "max", "sum"))):
            if getattr(self, name) not in allowed:
                raise PlanError(f"Attention.{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        count = self.queries
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise PlanError(f"Attention.queries is {count!r}; allowed: None or an int in 1..=4096")

    def spec(self) -> dict[str, Any]:
        """Return it as a plan stores it."""
        queries = "all" if self.queries is None else {"last": self.queries}
        return {"fold": self.fold, "reduce": self.reduce, "queries": queries}


@dataclass(frozen=True)
class Needs:
    """What the function of a `Custom` policy wants to know, one number per kept token each.

    Parameters
    ----------
    attention : Attention, optional
        Attention that the token received.
    key_norms : bool
        Length of its key.
    distances : {"output", "mean"}, optional
        Length of the difference between its value and the attention output or the mean of the values.
    """

    attention: Attention | None = None
    key_norms: bool = False
    distances: str | None = None

    def __post_init__(self) -> None:
        if self.attention is not None and not isinstance(self.attention, Attention):
            raise PlanError(f"Needs.attention is {self.attention!r}; allowed: None or a kvrs.Attention")
        if not isinstance(self.key_norms, bool):
            raise PlanError(f"Needs.key_norms is {self.key_norms!r}; allowed: True, False")
        if self.distances not in (None, "output", "mean"):
            raise PlanError(f"Needs.distances is {self.distances!r}; allowed: None, output, mean")

    def spec(self) -> dict[str, Any]:
        """Return it as a plan stores it."""
        asked = {"attention": self.attention and self.attention.spec(), "distances": self.distances}
        return {"key_norms": self.key_norms} | {key: x for key, x in asked.items() if x is not None}


@dataclass(frozen=True)
class Facts:
    """What the function of a `Custom` policy is told of one key-value head.

    Attributes
    ----------
    layer, head : int
        Which head.
    tokens : int64 array ``[kept]``
        Index of each kept token in its sequence, ascending.
    prefix : int
        How many of them stand before the protected window; the rest stays whatever its scores are.
    attention, key_norms, distances : float32 array ``[kept]`` or None
        What `Needs` asked for.
    """

    layer: int
    head: int
    tokens: np.ndarray[Any, Any]
    prefix: int
    attention: np.ndarray[Any, Any] | None
    key_norms: np.ndarray[Any, Any] | None
    distances: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class Custom(Policy):
    """Keep the tokens that a function of yours scores highest, at the end of the prompt.

    The function is called once per layer and head, on the thread that ends the prompt. It must not use the
    store. It is no part of a plan's hash, and a plan with one cannot be saved.

    Parameters
    ----------
    score : callable
        From `Facts` to one number per token: any array or list of ``len(facts.tokens)`` floats.
    budget : int, float or str
        How much is kept.
    needs : Needs
        What the function wants to know.

    Examples
    --------
    >>> import kvrs
    >>> middle = kvrs.Custom(lambda facts: -abs(facts.tokens - facts.tokens.mean()), budget=1024)
    >>> middle.budget
    1024
    """

    name: ClassVar[str] = "custom"

    score: Callable[[Facts], Any]
    budget: Budget | None = None
    needs: Needs = Needs()

    def _check_field(self, name: str, value: Any) -> None:
        if name == "score" and not callable(value):
            raise PlanError(f"Custom.score is {value!r}; allowed: a function of kvrs.Facts")
        if name == "needs" and not isinstance(value, Needs):
            raise PlanError(f"Custom.needs is {value!r}; allowed: a kvrs.Needs")
        if name not in ("score", "needs"):
            super()._check_field(name, value)

    def call(self, *facts: Any) -> np.ndarray[Any, Any]:
        """Return the scores of one head as a float32 array; the store calls this with the fields of `Facts`.

        Raises
        ------
        kvrs.ArgumentError
            If the function returns anything but one number per token.
        """
        import numpy as np

        told = Facts(*facts)
        scores = self.score(told)
        try:
            array = np.ascontiguousarray(scores, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"score returned {scores!r}; allowed: one float per token") from error
        if array.shape != told.tokens.shape:
            raise ArgumentError(
                f"score returned an array of shape {array.shape} for layer {told.layer}, head {told.head}; "
                f"allowed: {told.tokens.shape}, one float per token"
            )
        return array
