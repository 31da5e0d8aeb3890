"""What all codecs have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrs import _kvrs
from kvrs.settings import Setting

__all__ = ["Codec"]


@dataclass(frozen=True)
class Codec(Setting):
    """Base of all codecs."""

    kind: ClassVar[str] = "codec"

    def _check(self, spec: str) -> None:
        _kvrs.check_codec(spec)
