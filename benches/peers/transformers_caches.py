"""transformers' caches as a model calls them: take one token, hand out all keys and values, attend."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benches.inputs import Case
from benches.peers.builder import Builder, MissingPeerError
from benches.timing import Form

BITS = 4
INSTALLED_AS = {"quanto": "optimum-quanto", "hqq": "hqq"}


def dynamic_cache(case: Case) -> Form:
    """Build the default cache, which concatenates at every token."""
    from transformers import DynamicCache

    return _form("DynamicCache bf16", DynamicCache(), case)


def quantized_cache(case: Case, backend: str) -> Form:
    """Build the quantised cache, which decodes everything at every token.

    ``fp8`` comes with transformers; ``quanto`` and ``hqq`` are packages of their own, here with 4 bits.
    """
    from transformers import LlamaConfig

    cache = make_quantized(LlamaConfig(num_hidden_layers=1), backend)
    try:
        form = _form(_name(backend), cache, case, tolerance=0.1 if backend == "fp8" else 0.35)
        form.step()
    except RuntimeError as error:
        raise MissingPeerError(f"does not run here: {str(error).splitlines()[0]}") from error
    form.restore()
    return form


def make_quantized(config: Any, backend: str) -> Any:
    """Return transformers' quantised cache for a model.

    Parameters
    ----------
    config : PreTrainedConfig
        Of the model.
    backend : str
        ``"fp8"``, or ``"quanto"`` or ``"hqq"`` with 4 bits.

    Raises
    ------
    MissingPeerError
        If the backend is not installed, or the cache refuses the model.
    """
    from transformers import QuantizedCache

    try:
        return QuantizedCache(backend, config, **({} if backend == "fp8" else {"nbits": BITS}))
    except ImportError:
        raise MissingPeerError(f"{INSTALLED_AS[backend]} is not installed") from None
    except ValueError as error:
        if "full attention" in str(error):
            raise MissingPeerError("refuses models with sliding layers") from None
        if "Unknown quantization backend" in str(error):
            raise MissingPeerError("not in this version of transformers") from None
        raise


def _form(name: str, cache: Any, case: Case, tolerance: float = 0.02) -> Form:
    """Return the step that puts the last token into a cache which holds all others."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(num_key_value_groups=case.query_heads // case.kv_heads, is_causal=True)
    with torch.no_grad():
        cache.update(case.k[:, :, :-1], case.v[:, :, :-1], 0)
    new_k, new_v = (x[:, :, -1:].clone() for x in (case.k, case.v))
    layer = cache.layers[0]
    before = dict(vars(layer))

    def step() -> torch.Tensor:
        keys, values = cache.update(new_k, new_v, 0)
        return sdpa_attention_forward(module, case.q, keys, values, None)[0]

    return Form("transformers", name, step, partial(vars(layer).update, before), tolerance)


def _name(backend: str) -> str:
    return f"QuantizedCache {backend}" + ("" if backend == "fp8" else f" {BITS} bits")


FORMS: dict[str, Builder] = {
    "DynamicCache bf16": dynamic_cache,
    **{_name(backend): partial(quantized_cache, backend=backend) for backend in ("fp8", "quanto", "hqq")},
}
