"""The base of policies: settings that say which tokens of a sequence stay."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from kvrs import _kvrs
from kvrs.errors import PlanError
from kvrs.settings import Setting

__all__ = ["Budget", "Policy", "bytes_text"]

Budget = int | float | str
"""Tokens per head, a share of the prompt, or bytes per sequence as text."""


@dataclass(frozen=True)
class Policy(Setting):
    """Base of all policies."""

    kind: ClassVar[str] = "policy"
    after_prompt: ClassVar[bool] = False
    """Whether it also acts after the prompt, whenever a group of tokens leaves the window."""

    def _check_field(self, name: str, value: Any) -> None:
        if name == "scores":
            if not isinstance(value, Policy):
                what = f"{type(self).__name__}.scores"
                raise PlanError(f"{what} is {value!r}; allowed: a policy, as kvrs.SnapKV(budget=1024)")
        else:
            super()._check_field(name, value)

    def _check(self, spec: str) -> None:
        checked = json.loads(_kvrs.check_policy(spec))["params"].get("budget")
        if isinstance(checked, dict):
            object.__setattr__(self, "budget", bytes_text(checked["bytes"]))


def bytes_text(count: int) -> str:
    """Return bytes in the largest unit that divides them."""
    power = max(power for power in range(4) if count % 1024**power == 0)
    return f"{count // 1024**power}{('B', 'KiB', 'MiB', 'GiB')[power]}"
