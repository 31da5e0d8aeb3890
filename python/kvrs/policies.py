"""Policies: which tokens of a sequence stay. Frozen settings, checked when they are made.

A policy scores the kept tokens of each key-value head and keeps the best of them. The sinks of the plan and
``max(plan.recent, the policy's own recent tokens)`` are never dropped; equal scores go to the earlier token.

`budget`, in every policy: an int is tokens per head, a float in (0, 1] a share of the prompt, text like
``"512MiB"`` bytes per sequence, everything counted. Sinks and newest tokens are part of it. A policy that
another one takes its scores from needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from kvrs import _kvrs, settings
from kvrs.custom import Custom
from kvrs.errors import PlanError
from kvrs.policy import Budget, Policy, bytes_text

__all__ = [
    "CAOTE",
    "H2O",
    "TOVA",
    "AdaKV",
    "Entropy",
    "KNorm",
    "PyramidKV",
    "Random",
    "Scissorhands",
    "SnapKV",
    "StreamingLLM",
    "from_spec",
    "policies",
]


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the sinks and the newest ``budget - sinks`` tokens, at their own positions.

    StreamingLLM (Xiao et al., 2023, arXiv:2309.17453). Acts whenever a group leaves the window.

    Parameters
    ----------
    budget : int, float or str
        How much is kept.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; so do all policies.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.StreamingLLM(1024)
    StreamingLLM(budget=1024)
    """

    name: ClassVar[str] = "streamingllm"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the tokens with the largest sum of attention so far, and the newest half of the budget.

    H2O (Zhang et al., 2023, arXiv:2306.14048): ``score[j] = sum over queries i of p[i, j]``, with the mean of
    the query group. Renewed whenever a group leaves the window.

    Parameters
    ----------
    budget : int, float or str
        How much is kept.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.H2O(0.25)
    H2O(budget=0.25)
    """

    name: ClassVar[str] = "h2o"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Keep the tokens that were often looked at more than average; drop half of the budget when it is full.

    Scissorhands (Liu et al., 2023, arXiv:2305.17118): ``score[j] = number of the last queries i with
    p[i, j] > 1 / visible[i]``. The newest 10 tokens are not judged.

    Parameters
    ----------
    budget : int, float or str
        How much is kept at most.
    history : int
        Queries that count, an even number up to 4096.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.Scissorhands(1024)
    Scissorhands(budget=1024, history=400)
    """

    name: ClassVar[str] = "scissorhands"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None
    history: int = 400


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep what the prompt's last queries look at, pooled over neighbours.

    SnapKV (Li et al., 2024, arXiv:2404.14469), at the end of the prompt: ``score[j] = pool(sum over the last
    `window` queries i of p[i, j])``. Each query is first reduced over the heads of its group, so that one set
    is kept per key-value head. Defaults are those of the published experiments.

    Tokens that follow are all kept. When another prompt on the same sequence ends, as in the second turn of a
    conversation, the policy chooses again among everything that is left, for the same budget.

    Parameters
    ----------
    budget : int, float or str
        How much is kept, the observation window included.
    window : int
        Queries that vote; as many newest tokens stay.
    kernel : int
        Tokens that are pooled: odd, up to `window`.
    pooling : {"max", "avg"}
        How they are pooled; at an edge only those that exist count.
    reduce : {"mean", "max", "sum"}
        How the query heads of a group become one.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.SnapKV(1024)
    SnapKV(budget=1024, window=32, kernel=7, pooling='max', reduce='mean')
    """

    name: ClassVar[str] = "snapkv"

    budget: Budget | None = None
    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    reduce: str = "mean"


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep what the last query looks at.

    TOVA (Oren et al., 2024, arXiv:2401.06104): ``score[j] = p[last, j]``. Renewed whenever a group leaves the
    window.

    Parameters
    ----------
    budget : int, float or str
        How much is kept.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.TOVA("64MiB")
    TOVA(budget='64MiB')
    """

    name: ClassVar[str] = "tova"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None


@dataclass(frozen=True)
class KNorm(Policy):
    """Keep the tokens with the smallest keys; needs no queries.

    L2 norm (Devoto et al., 2024, arXiv:2406.11430): ``score[j] = -||k[j]||``. Renewed whenever a group leaves
    the window.

    Parameters
    ----------
    budget : int, float or str
        How much is kept.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.KNorm(1024)
    KNorm(budget=1024)
    """

    name: ClassVar[str] = "knorm"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None


@dataclass(frozen=True)
class CAOTE(Policy):
    """Keep the tokens without which the attention output would change most.

    CAOTE (Goel et al., 2025, arXiv:2504.14051): ``score[j] = a[j] / (1 - a[j]) * ||o - v[j]||`` with ``a``
    the other policy's scores as a distribution and ``o = sum a[j] v[j]``. It acts when that policy does.

    Parameters
    ----------
    scores : SnapKV, H2O or TOVA
        Whose attention is taken, and whose budget.
    fast : bool
        FastCAOTE: the plain mean of the values stands for ``o``.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.CAOTE(kvrs.H2O(1024))
    CAOTE(scores=H2O(budget=1024), fast=False)
    """

    name: ClassVar[str] = "caote"

    scores: Policy = field(default_factory=SnapKV)
    fast: bool = False

    def _check_field(self, name: str, value: Any) -> None:
        if name != "fast":
            super()._check_field(name, value)
        elif not isinstance(value, bool):
            raise PlanError(f"CAOTE.fast is {value!r}; allowed: True, False")


@dataclass(frozen=True)
class Random(Policy):
    """Keep tokens at random: the baseline that every comparison needs.

    ``score[j] = hash(seed, layer, head, j)``, so that what stays does not depend on how a text was fed.

    Parameters
    ----------
    budget : int, float or str
        How much is kept.
    seed : int
        Another choice for another seed.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.Random(1024)
    Random(budget=1024, seed=0)
    """

    name: ClassVar[str] = "random"
    after_prompt: ClassVar[bool] = True

    budget: Budget | None = None
    seed: int = 0


@dataclass(frozen=True)
class PyramidKV(Policy):
    """Divide the budget among the layers in a falling line; which tokens stay is said by another policy.

    PyramidKV (Cai et al., 2024, arXiv:2406.02069), at the end of the prompt: of the tokens that are chosen by
    score, C on average, the last layer gets ``max(1, C / beta)`` and the first ``2 C`` less that. The sum is
    exactly that of a uniform budget.

    Parameters
    ----------
    budget : int, float or str
        How much a layer keeps on average.
    beta : float
        Slope: the mean over the last layer's share, 1 is uniform.
    scores : Policy
        Whose scores are taken: SnapKV, H2O, TOVA, KNorm, Random or CAOTE.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.PyramidKV(1024, scores=kvrs.H2O()).beta
    20
    """

    name: ClassVar[str] = "pyramidkv"

    budget: Budget | None = None
    beta: float = 20
    scores: Policy = field(default_factory=SnapKV)


@dataclass(frozen=True)
class AdaKV(Policy):
    """Let the heads of a layer share one budget by score, so that they keep different numbers of tokens.

    AdaKV (Feng et al., 2024, arXiv:2407.11550), at the end of the prompt: the highest scores of all heads of
    the layer together, each head at least ``floor`` of the mean.

    Parameters
    ----------
    scores : Policy
        Whose scores and budget are taken: SnapKV, H2O, TOVA or CAOTE.
    floor : float
        Share of the mean budget that each head has at least.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.AdaKV(kvrs.SnapKV(1024)).floor
    0.2
    """

    name: ClassVar[str] = "adakv"

    scores: Policy = field(default_factory=SnapKV)
    floor: float = 0.2


@dataclass(frozen=True)
class Entropy(Policy):
    """Let the heads of a layer share one budget by the entropy of their attention.

    Attention entropy (Kim and Jung, 2025, doi:10.3390/math13152366), at the end of the prompt: in proportion
    to ``-sum p log p``, so that a head that looks widely gets more; each head at least ``floor`` of the mean.

    Parameters
    ----------
    scores : Policy
        Whose scores and budget are taken: SnapKV, H2O, TOVA or CAOTE.
    floor : float
        Share of the mean budget that each head has at least.

    Examples
    --------
    >>> import kvrs
    >>> kvrs.Entropy(kvrs.SnapKV(1024)).floor
    0.2
    """

    name: ClassVar[str] = "entropy"

    scores: Policy = field(default_factory=SnapKV)
    floor: float = 0.2


_ALL: tuple[type[Policy], ...] = (
    *(StreamingLLM, H2O, Scissorhands, SnapKV, TOVA, KNorm, CAOTE, Random, Custom),
    *(PyramidKV, AdaKV, Entropy),
)
_CLASSES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}


def policies() -> list[type[Policy]]:
    """Return the policies of this version."""
    return [_CLASSES[name] for name in _kvrs.policies() if name in _CLASSES]


def from_spec(spec: Mapping[str, Any]) -> Policy:
    """Return the policy that `Policy.spec` described.

    Raises
    ------
    kvrs.PlanError
        If the name or a parameter is unknown, or the policy is `Custom`, whose function no file holds.
    """
    if spec["name"] == Custom.name:
        raise PlanError("policy is 'custom' in a plan file; allowed: policies without a function of yours")
    params = dict(spec.get("params", {}))
    if isinstance(params.get("scores"), Mapping):
        params["scores"] = from_spec(params["scores"])
    if isinstance(params.get("budget"), Mapping):
        params["budget"] = bytes_text(params["budget"]["bytes"])
    return settings.from_spec("policy", _CLASSES, {"name": spec["name"], "params": params})


def base(policy: Policy) -> Policy:
    """Return the policy at the bottom of wrappers: the one that scores."""
    inner = next((getattr(policy, x.name) for x in fields(policy) if x.name == "scores"), None)
    return policy if inner is None else base(inner)


def acts_after_prompt(policy: Policy) -> bool:
    """Return whether a policy also acts after the prompt."""
    return base(policy).after_prompt and (policy.after_prompt or isinstance(policy, CAOTE))
