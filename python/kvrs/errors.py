"""Exceptions and warnings: every message names the argument, its value and what is allowed."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "FormatError",
    "KVError",
    "KVWarning",
    "PlanError",
    "SequenceError",
    "ShapeError",
]


class KVError(Exception):
    """Root of all errors of kvrs; raised before anything has changed."""

    def __str__(self) -> str:
        """Return the message itself, where ``KeyError`` and ``OSError`` would rewrite it."""
        return Exception.__str__(self)


class ArgumentError(KVError, ValueError):
    """An argument has a value outside its range, or keys or values are not finite."""


class ShapeError(KVError, ValueError):
    """A tensor has the wrong rank or extents."""


class DTypeError(KVError, TypeError):
    """A tensor has an element type that cannot be used here, or is no tensor."""


class DeviceError(KVError, ValueError):
    """A tensor is on another device than the store, or the device is not served."""


class PlanError(KVError, ValueError):
    """A plan asks for something that cannot be done."""


class SequenceError(KVError, KeyError):
    """A sequence id, length or position does not fit the store."""


class CapacityError(KVError, MemoryError):
    """The store's byte capacity would be passed."""


class FormatError(KVError, OSError, ValueError):
    """A file cannot be read or written, is cut, of another version, or not what it should be."""


class KVWarning(UserWarning):
    """Something works, but probably not as well as it could."""
