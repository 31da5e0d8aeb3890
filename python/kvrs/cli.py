"""The ``kvrs`` command: ``kvrs eval ...``, ``calibrate``, ``memory`` and ``inspect``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrs import KVError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RATE_PLANS = (
    *("turboquant:4", "turboquant:3", "turboquant:2"),
    *("aatc:4", "aatc:3", "aatc:2.75", "aatc:2", "aatc:1.5"),
)
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
    _add_calibrate(commands.add_parser("calibrate", help="measure a model and write a plan file"))
    memory = commands.add_parser("memory", help="bytes of a plan before anything is run")
    _add_common(memory)
    memory.add_argument("--tokens", type=int, default=16384, help="tokens of a sequence (16384)")
    memory.add_argument("--batch", type=int, default=1, help="sequences (1)")
    memory.set_defaults(run=_memory)
    inspect = commands.add_parser("inspect", help="what a plan or sequence file holds, without loading pages")
    inspect.add_argument("file", type=Path, help="what Plan.save or KVStore.save wrote")
    inspect.set_defaults(run=_inspect)
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


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gemma", help="gemma, qwen or a model folder (gemma)")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _add_common(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
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
    rates = tasks.add_parser("rate-distortion", help="perplexity against bits per element of several plans")
    _add_rate_distortion(rates)
    distortion = tasks.add_parser(
        "distortion", help="output distortion of each layer, predicted and measured"
    )
    _add_distortion(distortion)
    for task in (perplexity, passkey, policies):
        _add_common(task)
    for task in (rates, distortion):
        _add_model(task)
        _add_calibration(task)
    for task in (perplexity, passkey, policies, rates, distortion):
        task.add_argument("--out", type=Path, help="JSON file of the result; finished parts in it are reused")
        _add_run(task)


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, help="file of finished parts of a calibration, to go on from")
    parser.add_argument(
        "--calibration-texts", default="", help="prose or text files (real texts of each model)"
    )
    parser.add_argument("--calibration-count", type=int, default=4, help="of the real texts (4)")
    parser.add_argument("--calibration-tokens", type=int, default=2048, help="of each text (2048)")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--keys", default="aatc:2.75", metavar="CODEC", help="as aatc:2.75 (that)")
    parser.add_argument("--values", default="aatc:2.75", metavar="CODEC", help="as aatc:2.75 (that)")
    parser.add_argument("--out", type=Path, required=True, help="the plan file, as model.kvplan")
    parser.add_argument("--picture", type=Path, help="PNG file of the bits and of how layers matter")
    parser.add_argument(
        "--allocation", choices=("sensitivity", "local"), default="sensitivity", help="how layers compare"
    )
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that stay 16-bit (4)")
    parser.add_argument("--recent", type=int, default=128, help="newest tokens that stay 16-bit (128)")
    _add_calibration(parser)
    _add_run(parser)
    parser.set_defaults(run=_calibrate)


def _add_rate_distortion(rates: argparse.ArgumentParser) -> None:
    rates.add_argument("--plans", nargs="+", default=list(RATE_PLANS), metavar="SPEC", help=SPEC_HELP)
    rates.add_argument("--tokens", type=int, default=2048, help="tokens of each text (2048)")
    rates.add_argument("--texts", default="wiki,code", help="wiki, code, prose or text files (wiki,code)")
    rates.add_argument("--allocation", choices=("sensitivity", "local"), default="sensitivity")
    rates.add_argument("--picture", type=Path, help="PNG file of the curves")
    rates.set_defaults(run=_rate_distortion)


def _add_distortion(distortion: argparse.ArgumentParser) -> None:
    distortion.add_argument("--bits", default="2,3,4", help="bits per element (2,3,4)")
    distortion.add_argument("--tokens", type=int, default=1024, help="tokens of the text (1024)")
    distortion.add_argument("--text", default="wiki", help="wiki, code, prose or a text file (wiki)")
    distortion.set_defaults(run=_distortion)


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


def _calibrate(options: argparse.Namespace) -> int:
    from kvrs.calibration import calibrate, picture
    from kvrs.eval import models, spec

    keys, values = spec.parse_codec(options.keys), spec.parse_codec(options.values)
    model, tokenizer = models.load(options.model, options.dtype, quiet=options.quiet)
    plan = calibrate(
        model,
        _calibration_texts(options, tokenizer),
        keys,
        values,
        sinks=options.sinks,
        recent=options.recent,
        allocation=options.allocation,
        resume=options.resume,
        progress=not options.quiet,
        name=options.model,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = options.out.with_name(options.out.name + ".part")
    plan.save(unfinished)
    unfinished.replace(options.out)
    if options.picture is not None and plan.calibration is not None:
        picture.draw(plan.calibration.report, f"{options.model}, plan {plan.hash[:12]}", options.picture)
    print(f"{options.out}: plan {plan.hash[:12]}, {plan.memory(tokens=8192)} at 8192 tokens")
    return 0


def _rate_distortion(options: argparse.Namespace) -> int:
    from kvrs.eval import models, rate_distortion, report, spec, texts
    from kvrs.eval.results import Record

    for line in options.plans:
        if not line.endswith(spec.PLAN_FILE_ENDING):
            spec.parse_settings(line)
    record = Record(options.out)
    model, tokenizer = models.load(options.model, options.dtype, quiet=options.quiet)
    documents = texts.documents(options.model, tokenizer, options.texts.split(","), options.tokens)
    total = 2 * len(options.plans) * sum(map(len, documents.values()))
    with report.progress("rate-distortion", total, quiet=options.quiet) as advance:
        result = rate_distortion.evaluate(
            model,
            options.model,
            options.plans,
            _calibration_texts(options, tokenizer),
            documents,
            record,
            resume=options.resume,
            allocation=options.allocation,
            advance=advance,
        )
    record.write(result)
    _print(rate_distortion.table(result))
    if options.picture is not None:
        rate_distortion.draw(result, options.picture)
    return 0


def _distortion(options: argparse.Namespace) -> int:
    import torch

    from kvrs.eval import distortion, models, report, texts
    from kvrs.eval.results import Record

    bits = [float(number) for number in options.bits.split(",")]
    if options.tokens <= distortion.FIRST_QUERY:
        raise ValueError(f"tokens is {options.tokens}; allowed: more than {distortion.FIRST_QUERY}")
    record = Record(options.out)
    model, tokenizer = models.load(options.model, options.dtype, quiet=options.quiet)
    (ids,) = texts.documents(options.model, tokenizer, [options.text], options.tokens).values()
    rows = _calibration_texts(options, tokenizer)
    total = len(distortion.WEIGHTS) * len(bits)
    with report.progress("distortion", total, quiet=options.quiet) as advance:
        result = distortion.evaluate(
            model,
            options.model,
            rows,
            torch.tensor(ids),
            bits,
            record,
            resume=options.resume,
            advance=advance,
        )
    record.write(result)
    _print(distortion.table(result))
    return 0


def _calibration_texts(options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    from kvrs.calibration.texts import calibration_texts

    return calibration_texts(
        options.model,
        tokenizer,
        options.calibration_texts.split(",") if options.calibration_texts else (),
        count=options.calibration_count,
        tokens=options.calibration_tokens,
    )


def _print(table: Any) -> None:
    from rich.console import Console

    from kvrs.eval.report import WIDTH

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(table)


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


def _inspect(options: argparse.Namespace) -> int:
    import kvrs

    try:
        print(kvrs.inspect(options.file))
    except kvrs.FormatError as error:
        if "format: found kvrs-plan" not in str(error):
            raise
        plan = kvrs.Plan.load(options.file)
        print(f"plan {plan.hash}\n{plan}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
