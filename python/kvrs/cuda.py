"""What this build of kvrs can do with the GPUs of this machine, or why nothing.

::

    >>> print(kvrs.cuda.status())                                           # doctest: +SKIP
    kernels   sm_80 sm_89 sm_90 sm_100 sm_120 compute_120 (NVRTC 12.8.93)
    driver    CUDA 12.8 (12.0 or newer)
    cuda:0    NVIDIA H200, compute capability 9.0, 132 multiprocessors, 139.8 GiB
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvrs import _kvrs

__all__ = ["Device", "Status", "is_available", "status"]


@dataclass(frozen=True)
class Device:
    """A device that the driver lists.

    Attributes
    ----------
    index : int
        Its number, as in ``"cuda:0"``.
    name : str
        What the driver calls it.
    capability : str
        Its compute capability, as ``"9.0"``.
    memory : int
        Its memory in bytes.
    multiprocessors : int
        How many it has.
    """

    index: int
    name: str
    capability: str
    memory: int
    multiprocessors: int

    def __str__(self) -> str:
        return (
            f"{self.name}, compute capability {self.capability}, {self.multiprocessors} multiprocessors, "
            f"{self.memory / 2**30:.1f} GiB"
        )


@dataclass(frozen=True)
class Status:
    """What is compiled in, which driver and devices were found, or why not.

    Attributes
    ----------
    built : bool
        Whether this is a build with the feature ``cuda``.
    compiler : str or None
        What its kernels were compiled with.
    targets : tuple of str
        What they were compiled for: ``"sm_80"``, or ``"compute_120"`` where the driver compiles for newer
        devices.
    minimum_driver : str
        The version of CUDA that a driver must serve at least.
    driver : str or None
        The version that the driver serves; None: there is none.
    devices : tuple of Device
        The devices that it lists.
    missing : str or None
        The first thing that is missing for a store on any device; None: nothing is.
    """

    built: bool
    compiler: str | None
    targets: tuple[str, ...]
    minimum_driver: str
    driver: str | None
    devices: tuple[Device, ...]
    missing: str | None

    @classmethod
    def from_json(cls, text: str) -> Status:
        """Read what the compiled module reports."""
        fields = json.loads(text)
        devices = tuple(Device(**device) for device in fields.pop("devices"))
        return cls(targets=tuple(fields.pop("targets")), devices=devices, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists."""
        return asdict(self)

    def __str__(self) -> str:
        kernels = f"{' '.join(self.targets)} ({self.compiler})" if self.targets else "none"
        driver = "none" if self.driver is None else f"CUDA {self.driver}"
        lines = [("kernels", kernels), ("driver", f"{driver} ({self.minimum_driver} or newer)")]
        lines += [(f"cuda:{device.index}", str(device)) for device in self.devices]
        if self.missing is not None:
            lines.append(("missing", self.missing))
        return "\n".join(f"{name:9} {text}" for name, text in lines)


def status() -> Status:
    """Look at the build, the driver and its devices.

    It works everywhere, also where there is no driver.

    Examples
    --------
    >>> kvrs.cuda.status().minimum_driver
    '12.0'
    """
    return Status.from_json(_kvrs.cuda_status())


def is_available() -> bool:
    """Return whether a store can be made on a device here; `status` says what is missing if not."""
    return status().missing is None
