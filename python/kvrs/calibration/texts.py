"""The texts that `kvrs calibrate` reads if none are given: real ones, none of which any evaluation reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvrs.eval import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("wiki", "code")
TEXTS = 4
TOKENS = 2048


def calibration_texts(
    model: str, tokenizer: Any, names: Sequence[str] = (), *, count: int = TEXTS, tokens: int = TOKENS
) -> list[torch.Tensor]:
    """Return rows of token ids.

    Parameters
    ----------
    model : str
        ``"gemma"``, ``"qwen"`` or the path of a model folder.
    tokenizer : PreTrainedTokenizer
        The model's.
    names : sequence of str
        ``"prose"`` or paths of text files; by default windows of Wikipedia and of code in turn, which are
        there for Gemma and Qwen.
    count : int
        How many of the windows.
    tokens : int
        How many of each.

    Raises
    ------
    ValueError
        If a text is unknown or too short, or there are no windows for the model.
    """
    if names:
        return [torch.tensor(ids) for ids in texts.documents(model, tokenizer, names, tokens).values()]
    windows = [(kind, document) for document in texts.CALIBRATION_DOCUMENTS for kind in KINDS]
    if not 1 <= count <= len(windows):
        raise ValueError(f"count is {count}; allowed: 1 to {len(windows)}")
    return [torch.tensor(texts.window(model, kind, tokens, document)) for kind, document in windows[:count]]
