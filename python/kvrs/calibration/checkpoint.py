"""A file of finished parts of a calibration, so that a killed one goes on where it was."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrs.errors import FormatError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvrs.calibration.statistics import Moments


class Checkpoint:
    """Sums of moments and measured sensitivities on disk, replaced in one step after each part.

    Parameters
    ----------
    path : Path or None
        The file; None keeps nothing.
    identity : dict
        All that the parts depend on, by the name that a message may use.
    needs : str
        What is summed of which layers; sums of something else are begun anew, and sensitivities stay.

    Raises
    ------
    kvrs.FormatError
        If the file is not a checkpoint.
    kvrs.PlanError
        If the file is of another model, other texts or settings; the message names what differs.
    """

    def __init__(self, path: Path | None, identity: dict[str, str], needs: str = "") -> None:
        self.path = path
        self.identity, self.needs = identity, needs
        self.texts = 0
        """Texts that the sums hold."""
        self.measured: dict[str, dict[str, float]] = {}
        self.sums: dict[str, torch.Tensor] = {}
        if path is not None and path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["calibration"])
                if header.get("needs") == self.needs:
                    self.texts = int(header["texts"])
                    self.sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.measured, identity = dict(header["measured"]), dict(header["identity"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"resume is {path}: not a checkpoint ({error!r}); allowed: a new file, or one that "
                "calibrate wrote"
            ) from None
        for name, value in self.identity.items():
            if identity.get(name) != value:
                raise PlanError(
                    f"resume is {path}, of another {name}; allowed: the file of this {name}, or a new one"
                )

    def restore(self, moments: dict[int, Moments]) -> None:
        """Give each layer the sums of the texts that are done."""
        for layer, layer_moments in moments.items():
            prefix = f"{layer}/"
            sums = {name.removeprefix(prefix): x for name, x in self.sums.items() if name.startswith(prefix)}
            if sums:
                layer_moments.tokens = int(sums.pop("tokens"))
                layer_moments.sums = sums

    def keep(self, texts: int, moments: dict[int, Moments]) -> None:
        """Write the sums of the texts so far."""
        self.texts = texts
        self.sums = {f"{layer}/{name}": x for layer, m in moments.items() for name, x in m.sums.items()}
        self.sums |= {f"{layer}/tokens": torch.tensor(m.tokens) for layer, m in moments.items()}
        self._write()

    def keep_measured(self, key: str, result: dict[str, float]) -> None:
        """Write one more sensitivity."""
        self.measured[key] = result
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        header = {
            "identity": self.identity,
            "needs": self.needs,
            "texts": self.texts,
            "measured": self.measured,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".part")
        arrays = {name: x.contiguous() for name, x in self.sums.items()}
        save_file(arrays, unfinished, metadata={"calibration": json.dumps(header)})
        unfinished.replace(self.path)


def digest_of(rows: Sequence[torch.Tensor]) -> str:
    """Return a short name of some texts, the same for the same ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little") + row.to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]
