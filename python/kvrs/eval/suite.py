"""Run the evaluations whose results are published: ``python -m kvrs.eval.suite --model gemma|qwen|all``.

Each writes one JSON file, and a file that is there is continued, so the suite can be stopped at any time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PERPLEXITY_TOKENS = 1024
PROMPT_TOKENS, CONTINUATION_TOKENS = 1792, 256
POLICY_DEPTHS = 3


@dataclass(frozen=True)
class Suite:
    """What is run on one model: plans for perplexity and passkey, the size of passkey trials, a budget."""

    perplexity: tuple[str, ...]
    passkey: tuple[str, ...]
    length: int
    depths: int
    policies: str | None = None
    """Budget of the comparison of policies."""


SUITES = {
    "gemma": Suite(
        ("turboquant:4", "turboquant:3"),
        (
            "turboquant:4",
            "raw16,evict=snapkv:1024",
            "turboquant:4,evict=snapkv:512",
            "raw16,evict=streamingllm:1024",
        ),
        length=4096,
        depths=10,
        policies="0.25",
    ),
    "qwen": Suite(
        ("turboquant:4", "turboquant:3", "turboquant:2", "turboquant:4,offset=off"),
        ("turboquant:4", "turboquant:4,evict=snapkv:512"),
        length=2048,
        depths=3,
    ),
}


def file_name(model: str, task: str, spec: str) -> str:
    """Return the name of a result's file."""
    plain = "".join(character if character.isalnum() else "-" for character in spec)
    return f"{model}-{task}-{plain}.json"


def run(model_name: str, folder: Path, *, quiet: bool = False) -> None:
    """Run one model's suite, printing each table as it is done.

    Parameters
    ----------
    model_name : str
        ``"gemma"`` or ``"qwen"``.
    folder : Path
        Where the JSON files go.
    quiet : bool
        Show no progress.
    """
    from kvrs.eval import generation, models
    from kvrs.eval.results import Record

    suite = SUITES[model_name]
    model, tokenizer = models.load(model_name, quiet=quiet)
    record = Record(folder / file_name(model_name, "generation", "raw16"))
    _file(record, generation.evaluate(model, model_name, record))
    for spec in suite.perplexity:
        _perplexity(model, tokenizer, model_name, spec, folder, quiet)
    for spec in suite.passkey:
        _passkey(model, tokenizer, model_name, spec, folder, quiet)
    if suite.policies is not None:
        _policies(model, tokenizer, model_name, suite.policies, folder, quiet)


def _perplexity(model: Any, tokenizer: Any, name: str, spec: str, folder: Path, quiet: bool) -> None:
    from kvrs.eval import perplexity, report, texts
    from kvrs.eval.results import Record
    from kvrs.eval.spec import plan_from_spec

    documents = texts.documents(name, tokenizer, ("wiki", "code"), PERPLEXITY_TOKENS)
    record = Record(folder / file_name(name, "perplexity", spec))
    for other in sorted(folder.glob(f"{name}-perplexity-*.json")):
        record.borrow(Record(other), {"task": "perplexity", "plan": None})
    plan = plan_from_spec(spec, model)
    with report.progress(f"{name} {spec}", 2 * sum(map(len, documents.values())), quiet=quiet) as advance:
        result = perplexity.evaluate(model, name, plan, documents, record, advance)
    result["plan"]["spec"] = spec
    _file(record, result)


def _passkey(model: Any, tokenizer: Any, name: str, spec: str, folder: Path, quiet: bool) -> None:
    from kvrs.eval import passkey, report
    from kvrs.eval.results import Record
    from kvrs.eval.spec import plan_from_spec

    suite = SUITES[name]
    record = Record(folder / file_name(name, "passkey", spec))
    for other in sorted(folder.glob(f"{name}-passkey-*.json")):
        record.borrow(Record(other), {"task": "passkey", "plan": None})
    plan = plan_from_spec(spec, model)
    with report.progress(f"{name} passkey", 2 * suite.depths * suite.length, quiet=quiet) as advance:
        result = passkey.evaluate(
            model,
            tokenizer,
            name,
            plan,
            record,
            length=suite.length,
            count=suite.depths,
            advance=advance,
        )
    result["plan"]["spec"] = spec
    _file(record, result)


def _policies(model: Any, tokenizer: Any, name: str, budget: str, folder: Path, quiet: bool) -> None:
    from kvrs.eval import policies, report, texts
    from kvrs.eval.results import Record

    found = policies.specifications((*policies.BASELINES, *policies.METHODS), budget)
    documents = texts.documents(name, tokenizer, ("wiki", "code"), PROMPT_TOKENS + CONTINUATION_TOKENS)
    record = Record(folder / file_name(name, "policies", budget))
    total = len(found) * (len(documents) + POLICY_DEPTHS)
    with report.progress(f"{name} policies", total, quiet=quiet) as advance:
        result = policies.evaluate(
            model,
            tokenizer,
            name,
            "raw16",
            found,
            documents,
            record,
            prompt=PROMPT_TOKENS,
            depths=POLICY_DEPTHS,
            advance=advance,
        )
    result["plan"]["spec"] = "raw16"
    _file(record, result)


def _file(record: Any, result: dict[str, Any]) -> None:
    from kvrs.eval import report

    record.write(result)
    report.show(result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Options; from the command line if not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvrs.eval.suite", description="The published evaluations."
    )
    parser.add_argument("--model", choices=(*SUITES, "all"), default="gemma")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder (docs/results)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    for model in SUITES if options.model == "all" else (options.model,):
        run(model, options.out, quiet=options.quiet)
    return 0


if __name__ == "__main__":
    sys.exit(main())
