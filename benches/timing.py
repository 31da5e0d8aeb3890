"""Time several forms of the same work side by side, so that the noise of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

PAUSE_SECONDS = 0.005
"""Before each slice: another library's idle threads stop spinning in that time."""


def _nothing() -> None:
    """Restore nothing."""


@dataclass(frozen=True)
class Form:
    """One way to do the work.

    Attributes
    ----------
    family, name : str
        Whose it is, and what it is called in tables.
    step : callable
        Does the work once; what it returns is checked before the timing, not during it.
    restore : callable
        Brings back the state before the step, untimed.
    tolerance : float
        Largest relative error that the step's answer may have; a larger one is a broken form.
    facts : dict
        What else is known of it, for the record.
    """

    family: str
    name: str
    step: Callable[[], Any]
    restore: Callable[[], object] = _nothing
    tolerance: float = 0.02
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Times:
    """Milliseconds of the calls of one form.

    Attributes
    ----------
    ms : list of float
        One number a call.
    cut : bool
        Whether the first call took so long that there was no other.
    """

    ms: list[float]
    cut: bool = False

    @property
    def median(self) -> float:
        """Median in milliseconds."""
        return statistics.median(self.ms)

    def summary(self) -> dict[str, Any]:
        """Return median, quartiles and number of calls as JSON can hold them."""
        quarters = statistics.quantiles(self.ms, n=4) if len(self.ms) > 1 else self.ms * 3
        return {
            "median_ms": self.median,
            "quartiles_ms": [quarters[0], quarters[2]],
            "calls": len(self.ms),
            "cut": self.cut,
        }


def once(form: Form) -> float:
    """Return the milliseconds of one call, and restore the state before it."""
    start = time.perf_counter_ns()
    form.step()
    elapsed = (time.perf_counter_ns() - start) / 1e6
    form.restore()
    return elapsed


def _slice(form: Form, seconds: float) -> list[float]:
    """Return the times of calls during some seconds; the first call warms caches up, unless it fills them."""
    time.sleep(PAUSE_SECONDS)
    end = time.perf_counter() + seconds
    first = once(form)
    if time.perf_counter() >= end:
        return [first]
    ms = [once(form)]
    while time.perf_counter() < end:
        ms.append(once(form))
    return ms


def measure(forms: Sequence[Form], seconds: float, rounds: int = 5, limit: float = 1.0) -> dict[str, Times]:
    """Return the times of all forms by name: one slice of each in turn, several rounds of that.

    Parameters
    ----------
    forms : sequence of Form
        Their names differ.
    seconds : float
        For each form, over all rounds.
    rounds : int
        How often each form has its turn.
    limit : float
        A form whose first call takes more seconds is not called again.
    """
    times = {}
    for form in forms:
        first = once(form)
        cut = first > limit * 1e3
        times[form.name] = Times([first] if cut else [], cut)
    for _ in range(rounds):
        for form in forms:
            if not times[form.name].cut:
                times[form.name].ms.extend(_slice(form, seconds / rounds))
    return times
