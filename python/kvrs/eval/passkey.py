"""Passkey retrieval: a five-digit number hidden at some depth of a long text, asked for at the end.

The needle stands in prose of the Encyclopaedia Britannica. A number is found if the greedy answer
contains it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvrs.eval.forward import Decoded, decode, exact_cache, kvrs_cache, no_progress
from kvrs.eval.results import Record, exact_bytes, store_bytes, versions
from kvrs.eval.texts import encode, filler, first_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import kvrs

PREFILL_CHUNK = 512
ANSWER_TOKENS = 10
TASK = "There is important information hidden inside a long text. Find it and memorize it.\n\n"
QUESTION = "\n\nWhat is the pass key?"
BEGUN_ANSWER = " The pass key is"
CHAT_HEAD = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
CHAT_TAIL = " Answer with the number only.<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Trial:
    """One hidden number: the share of the text before it, and the token ids to read."""

    depth: float
    number: int
    ids: list[int]


def trial(model_name: str, tokenizer: Any, length: int, depth: float, seed: int = 0) -> Trial:
    """Return a text of a given length with a number hidden in it.

    Parameters
    ----------
    model_name : str
        ``"qwen"`` is asked as a chat; every other model continues the text.
    tokenizer : PreTrainedTokenizer
        The model's.
    length : int
        Tokens of the whole prompt.
    depth : float
        Where the number stands: 0 at the begin of the prose, 1 at its end.
    seed : int
        Chooses the number, with length and depth.

    Raises
    ------
    ValueError
        If the length leaves no room or the depth is outside of [0, 1].
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; allowed: 0 to 1")
    number = random.Random(f"{seed}/{length}/{depth:.6f}").randrange(10_000, 100_000)
    chat = model_name == "qwen"
    head = [*first_ids(model_name, tokenizer), *encode(tokenizer, (CHAT_HEAD if chat else "") + TASK)]
    needle = encode(tokenizer, f"\n\nThe pass key is {number}. Remember it. {number} is the pass key.\n\n")
    tail = encode(tokenizer, QUESTION + (CHAT_TAIL if chat else BEGUN_ANSWER))
    room = length - len(head) - len(needle) - len(tail)
    prose = encode(tokenizer, filler()[: 8 * length])
    if not 0 < room <= len(prose):
        longest = len(prose) + length - room
        raise ValueError(f"length is {length}; allowed: {length - room + 1} to {longest} tokens")
    before = round(room * depth)
    return Trial(depth, number, [*head, *prose[:before], *needle, *prose[before:room], *tail])


def depths(count: int) -> list[float]:
    """Return the middles of `count` equal parts of the text."""
    return [(index + 0.5) / count for index in range(count)]


def answer(
    model: Any,
    tokenizer: Any,
    cache: Any,
    ids: Sequence[int],
    *,
    tokens: int = ANSWER_TOKENS,
    advance: Callable[[int], None] = no_progress,
) -> tuple[str, Decoded]:
    """Return a model's greedy answer as text, and how it went; it stops after five digits."""
    stop = stop_rule(model, tokenizer)
    done = decode(model, cache, ids, tokens=tokens, chunk=PREFILL_CHUNK, stop=stop, advance=advance)
    return tokenizer.decode(done.ids), done


def stop_rule(model: Any, tokenizer: Any) -> Callable[[list[int]], bool]:
    """Return whether written tokens are enough of an answer: five digits, or the end of the text."""
    ends = {tokenizer.eos_token_id, *_as_list(model.generation_config.eos_token_id)}

    def enough(written: list[int]) -> bool:
        digits = sum(character.isdigit() for character in tokenizer.decode(written))
        return written[-1] in ends or digits >= len("12345")

    return enough


def is_found(number: int, text: str) -> bool:
    """Return whether an answer has the number, whatever spaces or commas divide its digits."""
    return str(number) in text.replace(" ", "").replace(",", "")


def measure(
    model: Any,
    tokenizer: Any,
    case: Trial,
    plan: kvrs.Plan | None,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return whether one number is found, the answer, bytes and seconds; exact if `plan` is None."""
    with exact_cache(model) if plan is None else kvrs_cache(model, plan) as cache:
        text, done = answer(model, tokenizer, cache, case.ids, advance=advance)
        tokens = len(case.ids) + len(done.ids) - 1
        size = {"total": exact_bytes(model.config, tokens)} if plan is None else store_bytes(cache.store)
    return {
        "depth": case.depth,
        "number": case.number,
        "answer": text,
        "found": is_found(case.number, text),
        "bytes": size,
        "seconds": round(done.prefill_seconds + done.decode_seconds, 3),
    }


def evaluate(
    model: Any,
    tokenizer: Any,
    model_name: str,
    plan: kvrs.Plan,
    record: Record,
    *,
    length: int = 4096,
    count: int = 10,
    advance: Callable[[int], None] = no_progress,
) -> dict[str, Any]:
    """Return how many hidden numbers a model finds with each cache.

    Parameters
    ----------
    model, tokenizer
        In evaluation mode.
    model_name : str
        Chooses the template, stands in the result and tells results of different models apart.
    plan : kvrs.Plan
        How kvrs keeps the cache.
    record : Record
        Where finished trials are kept and looked up.
    length : int
        Tokens of a prompt.
    count : int
        Depths, evenly spread; one number at each.
    advance : callable
        Told the number of tokens done.

    Returns
    -------
    dict
        ``exact`` and ``kvrs`` with ``accuracy``, ``seconds``, ``bytes`` (largest) and ``trials``; ``ratio``
        of the accuracies; ``plan``, ``model``, ``length`` and ``versions``.
    """
    sides: dict[str, list[dict[str, Any]]] = {"exact": [], "kvrs": []}
    for depth in depths(count):
        case = trial(model_name, tokenizer, length, depth)
        for side, side_plan in (("exact", None), ("kvrs", plan)):
            key = {
                "task": "passkey",
                "model": model_name,
                "dtype": str(model.dtype),
                "length": length,
                "depth": depth,
                "plan": None if side_plan is None else side_plan.hash,
            }
            compute = partial(measure, model, tokenizer, case, side_plan, advance)
            sides[side].append(record.part(key, compute))
    exact, ours = _summary(sides["exact"]), _summary(sides["kvrs"])
    return {
        "task": "passkey",
        "exact": exact,
        "kvrs": ours,
        "ratio": ours["accuracy"] / exact["accuracy"] if exact["accuracy"] else None,
        "model": model_name,
        "dtype": str(model.dtype),
        "length": length,
        "plan": {"hash": plan.hash},
        "versions": versions(),
    }


def _summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    largest = max(trials, key=lambda result: result["bytes"]["total"])
    return {
        "accuracy": sum(result["found"] for result in trials) / len(trials),
        "seconds": round(sum(result["seconds"] for result in trials), 3),
        "bytes": largest["bytes"],
        "trials": trials,
    }


def _as_list(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [ids]
