"""NVIDIA's compiler and readers of compiled code, from pinned wheels: no toolkit, no driver, no GPU needed.

The compiler is of CUDA 12.8: its code loads on every driver of the CUDA 12 family and on later ones. The
readers exist as wheels for CUDA 13 only and read older code as well.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels_cu"
BUILD = ROOT / "build" / "cuda"
WHEELS = BUILD / "wheels"

COMPILER = (
    "nvidia-cuda-nvrtc-cu12==12.8.93",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cuda-cccl-cu12==12.8.90",
)
READERS = ("nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37")


def fetch(requirements: tuple[str, ...], target: Path = WHEELS) -> Path:
    """Unpack pinned wheels into a folder of their own, unless they are there already.

    All of them at once: the installer replaces the folder that wheels of one family share.

    Parameters
    ----------
    requirements : tuple of str
        `COMPILER` or `READERS`.
    target : Path
        For these wheels alone. Never an environment that torch uses: these wheels would replace its runtime.

    Returns
    -------
    Path
        The folder ``nvidia`` that they share.

    Raises
    ------
    SystemExit
        If they cannot be fetched.
    """
    if not all(_present(requirement, target) for requirement in requirements):
        print("fetching", *requirements, flush=True)
        target.mkdir(parents=True, exist_ok=True)
        command = [*_installer(), "--quiet", "--target", str(target), "--no-deps", *requirements]
        if subprocess.run(command).returncode:
            sys.exit(f"{', '.join(requirements)} could not be fetched; they are on the Python package index")
    return target / "nvidia"


def _present(requirement: str, target: Path) -> bool:
    name, _, version = requirement.partition("==")
    return (target / f"{name.replace('-', '_')}-{version}.dist-info").is_dir()


def _installer() -> list[str]:
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--upgrade"]
