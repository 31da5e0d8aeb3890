"""The ``kvrs`` command: ``kvrs eval perplexity``, ``kvrs eval passkey`` and ``kvrs memory``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrs import KVError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SPEC_HELP = (
    "CODEC for keys and values (turboquant:4, raw16), or settings divided by commas: "
    "keys=CODEC,values=CODEC,evict=POLICY,sinks=N,recent=N,prompt_budget=N,seed=N,offset=on|off with POLICY "
    "like snapkv:1024, snapkv:0.25 or caote(h2o):512; or a .kvplan file"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``kvrs`` command and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the command's name; from the command line if not given.
    """
    parser = argparse.ArgumentParser(prog="kvrs", description="Compressed KV caches: evaluate and plan.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_tasks(commands.add_parser("eval", help="evaluate a plan on a real model"))
    memory = commands.add_parser("memory", help="bytes of a plan before anything is run")
    _add_common(memory)
    memory.add_argument("--tokens", type=int, default=16384, help="tokens of a sequence (16384)")
    memory.add_argument("--batch", type=int, default=1, help="sequences (1)")
    memory.set_defaults(run=_memory)
    return _run(parser, arguments)


def evaluate_command(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m kvrs.eval`` and return its exit status; arguments as for `main`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvrs.eval", description="Evaluate a plan on a real model, beside the exact cache."
    )
    _add_tasks(parser)
    return _run(parser, arguments)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Parse and run; errors that the caller can cause end in one line and status 2."""
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (KVError, ValueError, OSError, RuntimeError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gemma", help="gemma, qwen or a model folder (gemma)")
    parser.add_argument("--plan", default="turboquant:4", metavar="SPEC", help=SPEC_HELP)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(dest="task", required=True)
    perplexity = tasks.add_parser("perplexity", help="teacher-forced perplexity, as in decoding")
    perplexity.add_argument("--tokens", type=int, default=1024, help="tokens of each text (1024)")
    perplexity.add_argument(
        "--texts", default="wiki,code", help="wiki, code, prose or text files (wiki,code)"
    )
    perplexity.set_defaults(run=_perplexity)
    passkey = tasks.add_parser("passkey", help="find a number hidden in a long text")
    passkey.add_argument("--length", type=int, default=4096, help="tokens of the prompt (4096)")
    passkey.add_argument("--depths", type=int, default=10, help="numbers, hidden at as many depths (10)")
    passkey.set_defaults(run=_passkey)
    policies = tasks.add_parser("policies", help="compare eviction policies at one budget")
    _add_policies(policies)
    for task in (perplexity, passkey, policies):
        _add_common(task)
        task.add_argument("--out", type=Path, help="JSON file of the result; finished parts in it are reused")
        task.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
        task.add_argument("--quiet", action="store_true", help="no progress")


def _add_policies(policies: argparse.ArgumentParser) -> None:
    policies.add_argument("--budget", default="0.25", help="of every policy: 512, 0.25 or 8MiB (0.25)")
    policies.add_argument("--policies", default="", help="names like snapkv,caote(h2o) (all of them)")
    policies.add_argument("--prompt", type=int, default=1792, help="tokens of each prompt (1792)")
    policies.add_argument("--continuation", type=int, default=256, help="tokens after it (256)")
    policies.add_argument("--texts", default="wiki,code", help="wiki, code, prose or text files (wiki,code)")
    policies.add_argument("--threshold", type=float, default=0.01, help="of important attention (0.01)")
    policies.add_argument("--length", type=int, default=2048, help="tokens of a passkey prompt (2048)")
    policies.add_argument("--depths", type=int, default=0, help="passkeys, hidden at as many depths (0)")
    policies.set_defaults(run=_policies)


def _prepare(options: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Return model, tokenizer, plan and record; the specification is checked before the model is fetched."""
    from kvrs.eval import models, spec
    from kvrs.eval.results import Record

    if not options.plan.endswith(spec.PLAN_FILE_ENDING):
        spec.parse_settings(options.plan)
    record = Record(options.out)
    model, tokenizer = models.load(options.model, options.dtype, quiet=options.quiet)
    return model, tokenizer, spec.plan_from_spec(options.plan, model), record


def _perplexity(options: argparse.Namespace) -> int:
    from kvrs.eval import perplexity, report, texts

    model, tokenizer, plan, record = _prepare(options)
    documents = texts.documents(options.model, tokenizer, options.texts.split(","), options.tokens)
    total = 2 * sum(map(len, documents.values()))
    with report.progress("perplexity", total, quiet=options.quiet) as advance:
        result = perplexity.evaluate(model, options.model, plan, documents, record, advance)
    return _finish(options, record, result)


def _passkey(options: argparse.Namespace) -> int:
    from kvrs.eval import passkey, report

    if options.depths < 1:
        raise ValueError(f"depths is {options.depths}; allowed: 1 or more")
    model, tokenizer, plan, record = _prepare(options)
    total = 2 * options.depths * options.length
    with report.progress("passkey", total, quiet=options.quiet) as advance:
        result = passkey.evaluate(
            model,
            tokenizer,
            options.model,
            plan,
            record,
            length=options.length,
            count=options.depths,
            advance=advance,
        )
    return _finish(options, record, result)


def _policies(options: argparse.Namespace) -> int:
    from kvrs.eval import policies, report, spec, texts

    if "evict" in spec.parse_settings(options.plan):
        raise ValueError(f"plan is {options.plan!r}; allowed: one without evict, which --policies gives")
    names = options.policies.split(",") if options.policies else (*policies.BASELINES, *policies.METHODS)
    found = policies.specifications(names, options.budget)
    if options.prompt < 1 or options.continuation < 2:
        raise ValueError(
            f"prompt is {options.prompt}, continuation {options.continuation}; allowed: from 1 and from 2"
        )
    model, tokenizer, _, record = _prepare(options)
    tokens = options.prompt + options.continuation
    documents = texts.documents(options.model, tokenizer, options.texts.split(","), tokens)
    total = len(found) * (len(documents) + options.depths)
    with report.progress("policies", total, quiet=options.quiet) as advance:
        result = policies.evaluate(
            model,
            tokenizer,
            options.model,
            options.plan,
            found,
            documents,
            record,
            prompt=options.prompt,
            threshold=options.threshold,
            length=options.length,
            depths=options.depths,
            advance=advance,
        )
    return _finish(options, record, result)


def _finish(options: argparse.Namespace, record: Any, result: dict[str, Any]) -> int:
    from kvrs.eval import report

    result["plan"]["spec"] = options.plan
    record.write(result)
    report.show(result)
    return 0


def _memory(options: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from kvrs.eval import models, spec

    config = AutoConfig.from_pretrained(models.fetch(options.model))
    plan = spec.plan_from_spec(options.plan, config)
    print(plan.memory(tokens=options.tokens, batch=options.batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
