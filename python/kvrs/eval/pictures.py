"""Draw what policies keep of a real text: ``python -m kvrs.eval.pictures --model gemma|qwen --out FOLDER``.

One picture a policy: a row for each layer and key-value head with full attention, a column for a few tokens,
the darker the more of them stay. The text is read once; every policy chooses from the same queries and keys.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import kvrs
    from kvrs.eval.capture import LayerTokens

COLUMNS = 448
PLAN = "raw16"

Array = np.ndarray[Any, Any]


def chosen(model: Any, plan: kvrs.Plan, layers: Sequence[LayerTokens]) -> tuple[Array, list[str]]:
    """Return which tokens of a prompt each head keeps, bool ``[heads, tokens]``, and the heads' names."""
    from kvrs.eval import capture, selection
    from kvrs.eval.forward import kvrs_cache

    tokens = layers[0].k.shape[1]
    rows, names = [], []
    with kvrs_cache(model, plan) as cache:
        capture.fill(cache, layers)
        for index, layer in enumerate(plan.shape.spec()):
            if layer["sliding"] is not None:
                continue
            kept = selection.kept_of_prompt(cache.store, cache.seqs[0], index, tokens)
            for head, indices in enumerate(kept):
                rows.append(np.isin(np.arange(tokens), indices))
                names.append(f"{index}.{head}")
    return np.array(rows), names


def shares(kept: Array, columns: int = COLUMNS) -> Array:
    """Return the kept share of each stretch of tokens, ``[heads, columns]``."""
    edges = np.linspace(0, kept.shape[1], min(columns, kept.shape[1]) + 1).astype(int)
    return np.add.reduceat(kept.astype(np.float64), edges[:-1], axis=1) / np.diff(edges)


def draw(kept: Array, names: list[str], title: str, path: Path) -> None:
    """Write one picture as PNG."""
    from matplotlib.figure import Figure

    heads, tokens = kept.shape
    figure = Figure(figsize=(8, 0.9 + min(0.22 * heads, 3.2)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        shares(kept),
        aspect="auto",
        interpolation="nearest",
        cmap="Greys",
        vmin=0,
        vmax=1,
        extent=(0.0, float(tokens), heads - 0.5, -0.5),
    )
    step = -(-heads // 14)
    axes.set_yticks(range(0, heads, step), names[::step], fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("layer.head", fontsize=8)
    axes.set_title(f"{title}: {kept.sum(axis=1).mean():.0f} of {tokens} tokens a head", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def file_name(policy: str) -> str:
    """Return the name of a policy's picture."""
    return "".join(character if character.isalnum() else "-" for character in policy).strip("-") + ".png"


def run(model_name: str, folder: Path, *, tokens: int, text: str, budget: str) -> None:
    """Draw all policies for one text.

    Parameters
    ----------
    model_name : str
        ``"gemma"`` or ``"qwen"``.
    folder : Path
        Where the pictures go.
    tokens : int
        Tokens of the text.
    text : str
        ``"wiki"``, ``"code"`` or ``"prose"``.
    budget : str
        Of every policy.
    """
    from kvrs.eval import capture, models, policies, spec, texts

    model, tokenizer = models.load(model_name, quiet=True)
    (ids,) = texts.documents(model_name, tokenizer, [text], tokens).values()
    layers = capture.capture(model, ids).layers
    names = (*policies.BASELINES, *policies.METHODS)
    for name, policy in policies.specifications(names, budget).items():
        if policy is not None:
            plan = spec.plan_from_spec(f"{PLAN},evict={policy}", model)
            draw(*chosen(model, plan, layers), policy, folder / file_name(name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the pictures and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Options; from the command line if not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m kvrs.eval.pictures", description="What policies keep of a real text."
    )
    parser.add_argument("--model", choices=("gemma", "qwen"), default="gemma")
    parser.add_argument("--out", type=Path, default=Path("docs/policies"), help="folder (docs/policies)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text (1024)")
    parser.add_argument("--text", default="code", help="wiki, code, prose or a text file (code)")
    parser.add_argument("--budget", default="0.25", help="of every policy (0.25)")
    options = parser.parse_args(arguments)
    run(options.model, options.out, tokens=options.tokens, text=options.text, budget=options.budget)
    return 0


if __name__ == "__main__":
    sys.exit(main())
