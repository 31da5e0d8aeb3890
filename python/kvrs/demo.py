"""The main job from end to end: ``python -m kvrs.demo``.

Fetch a real model, read a real text of 4096 tokens with a hidden number into a `kvrs.KVStore`, answer from
it, and print what that costs beside the exact cache in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import kvrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LENGTH_TOKENS = 4096
PERPLEXITY_TOKENS = 1024
ANSWER_TOKENS = 32
DEPTH = 0.35
BYTE_ROWS = ("codes", "scales", "window", "tables", "statistics", "slack")


def run(
    model_name: str,
    spec: str,
    *,
    length: int = LENGTH_TOKENS,
    tokens: int = PERPLEXITY_TOKENS,
    written: int = ANSWER_TOKENS,
    quiet: bool = False,
) -> dict[str, Any]:
    """Return what the exact cache and kvrs's need and can do on the same model and texts.

    Parameters
    ----------
    model_name : str
        ``"gemma"``, ``"qwen"`` or the path of a model folder.
    spec : str
        The plan, see `kvrs.eval.spec`.
    length : int
        Tokens of the text with the hidden number.
    tokens : int
        Tokens of the text for the perplexity.
    written : int
        Tokens to write after the long text, for the answer and the speed.
    quiet : bool
        Show no progress.

    Returns
    -------
    dict
        ``exact`` and ``kvrs`` with ``bytes``, ``perplexity``, ``found``, ``answer``, ``tokens_per_second``
        and ``prefill_seconds``; ``ratio`` of the bytes and of the perplexities; ``model``, ``plan``,
        ``length``, ``number``.
    """
    from kvrs.eval import models, passkey, report, texts
    from kvrs.eval import spec as specs

    model, tokenizer = models.load(model_name, quiet=quiet)
    plan = specs.plan_from_spec(spec, model)
    case = passkey.trial(model_name, tokenizer, length, DEPTH)
    kind = "wiki" if model_name in models.SOURCES else "prose"
    ids = texts.documents(model_name, tokenizer, [kind], tokens)[kind]
    total = 2 * (length + written - 1 + tokens)
    _warm_up(model, case.ids)
    with report.progress(f"demo, {model_name}", total, quiet=quiet) as advance:
        exact = _side(model, tokenizer, case, ids, None, written, advance)
        ours = _side(model, tokenizer, case, ids, plan, written, advance)
    return {
        "exact": exact,
        "kvrs": ours,
        "ratio": {
            "bytes": ours["bytes"]["total"] / exact["bytes"]["total"],
            "perplexity": ours["perplexity"] / exact["perplexity"],
        },
        "model": model_name,
        "plan": {"spec": spec, "hash": plan.hash},
        "length": length,
        "perplexity_tokens": tokens,
        "number": case.number,
    }


def _warm_up(model: Any, ids: list[int]) -> None:
    """Run one chunk through the model, so that the side that is timed first does not pay for it."""
    from kvrs.eval.forward import exact_cache, feed
    from kvrs.eval.passkey import PREFILL_CHUNK

    with exact_cache(model) as cache:
        list(feed(model, cache, ids[:PREFILL_CHUNK], chunk=PREFILL_CHUNK))


def _side(
    model: Any,
    tokenizer: Any,
    case: Any,
    ids: list[int],
    plan: kvrs.Plan | None,
    written: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return what one cache needs and can do; exact if `plan` is None."""
    from kvrs.eval import passkey, perplexity
    from kvrs.eval.forward import decode, exact_cache, kvrs_cache
    from kvrs.eval.results import exact_bytes, store_bytes

    with exact_cache(model) if plan is None else kvrs_cache(model, plan) as cache:
        done = decode(model, cache, case.ids, tokens=written, chunk=passkey.PREFILL_CHUNK, advance=advance)
        kept = len(case.ids) + len(done.ids) - 1
        size = {"total": exact_bytes(model.config, kept)} if plan is None else store_bytes(cache.store)
    text = tokenizer.decode(done.ids[: passkey.ANSWER_TOKENS])
    return {
        "bytes": size,
        "perplexity": perplexity.measure(model, ids, plan, advance=advance)["perplexity"],
        "found": passkey.is_found(case.number, text),
        "answer": text,
        "tokens_per_second": done.tokens_per_second,
        "prefill_seconds": done.prefill_seconds,
    }


def show(result: dict[str, Any]) -> None:
    """Print the one table of the demonstration."""
    from rich.console import Console
    from rich.table import Table

    from kvrs.eval.report import mib

    exact, ours, ratio = result["exact"], result["kvrs"], result["ratio"]
    table = Table(
        title=f"{result['model']}: {result['length']} tokens of text, pass key {result['number']}",
        caption=f"plan {result['plan']['spec']} ({result['plan']['hash'][:12]})",
    )
    for heading in ("", "16-bit cache", "kvrs", "ratio"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "cache, MiB", mib(exact["bytes"]["total"]), mib(ours["bytes"]["total"]), f"{ratio['bytes']:.3f}"
    )
    for name in BYTE_ROWS:
        table.add_row(f"  {name}", "", mib(ours["bytes"][name]), "")
    table.add_row("constants beside it, MiB", "", mib(ours["bytes"]["constants"]), "")
    table.add_row(
        f"perplexity, {result['perplexity_tokens']} tokens",
        f"{exact['perplexity']:.3f}",
        f"{ours['perplexity']:.3f}",
        f"{ratio['perplexity']:.4f}",
    )
    table.add_row(
        "pass key", *("found" if side["found"] else repr(side["answer"]) for side in (exact, ours)), ""
    )
    for label, field in (("decode, tokens/s", "tokens_per_second"), ("prefill, s", "prefill_seconds")):
        share = ours[field] / exact[field] if exact[field] else float("nan")
        table.add_row(label, f"{exact[field]:.2f}", f"{ours[field]:.2f}", f"{share:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Options; from the command line if not given.
    """
    parser = argparse.ArgumentParser(prog="python -m kvrs.demo", description=__doc__.split("\n\n")[1])
    parser.add_argument("--model", default="gemma", help="gemma, qwen or a model folder (gemma)")
    parser.add_argument("--plan", default="turboquant:4", help="as in python -m kvrs.eval (turboquant:4)")
    parser.add_argument("--length", type=int, default=LENGTH_TOKENS, help="tokens of the long text")
    parser.add_argument("--tokens", type=int, default=PERPLEXITY_TOKENS, help="tokens for the perplexity")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    options = parser.parse_args(arguments)
    try:
        result = run(options.model, options.plan, length=options.length, tokens=options.tokens)
    except (kvrs.KVError, ValueError, OSError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1)) if options.json else show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
