"""A JSON file of results that grows part by part, so that an interrupted evaluation goes on."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BYTE_FIELDS = ("total", "codes", "scales", "window", "tables", "statistics", "slack", "constants")


class Record:
    """Finished parts of an evaluation under their keys, on disk after each one.

    Parameters
    ----------
    path : Path or None
        The file; None keeps parts in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.parts: dict[str, Any] = {}
        if path is not None and path.is_file():
            self.parts = _parts(path)

    def part(self, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a part's result: the one on file if its key is there, else a new one, then filed.

        Parameters
        ----------
        key : dict
            All that the result depends on.
        compute : callable
            Makes the result, of what JSON can hold.
        """
        name = digest(key)
        if name not in self.parts:
            self.parts[name] = {"key": key, "result": compute()}
            self.write({})
        result: dict[str, Any] = self.parts[name]["result"]
        return result

    def borrow(self, other: Record, selection: dict[str, Any]) -> None:
        """Take over the parts of another record whose key agrees with all of `selection`."""
        for name, part in other.parts.items():
            if all(part["key"].get(field) == value for field, value in selection.items()):
                self.parts.setdefault(name, part)

    def write(self, summary: dict[str, Any]) -> None:
        """Write the summary and all parts, replacing the file in one step."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text(json.dumps({**summary, "parts": self.parts}, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


def _parts(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        parts: dict[str, Any] = content["parts"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"out is {path}: not a result file ({error!r}); allowed: a new file or one of kvrs.eval"
        ) from None
    return parts


def digest(key: Any) -> str:
    """Return a short name of any JSON value, the same for equal values."""
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def store_bytes(store: Any) -> dict[str, int]:
    """Return the byte counts of a store's `stats()` by name; ``constants`` are not part of ``total``."""
    stats = store.stats()
    return {name: int(getattr(stats, f"bytes_{name}")) for name in BYTE_FIELDS}


def exact_bytes(config: Any, tokens: int) -> int:
    """Return the bytes of a 16-bit cache that keeps no more of a sliding layer than its window.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's configuration.
    tokens : int
        Length of the one sequence.
    """
    from kvrs.hf.cache import per_layer
    from kvrs.hf.shapes import shape_from_config

    shape = shape_from_config(config)
    fields = (per_layer(shape, name) for name in ("kv_heads", "head_dim", "value_dim", "sliding"))
    return sum(
        2 * heads * (key + value) * min(tokens, window or tokens)
        for heads, key, value, window in zip(*fields, strict=True)
    )


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("kvrs", "torch", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
