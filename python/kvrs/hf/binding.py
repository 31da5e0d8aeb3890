"""Switch a model to the "kvrs" attention for exactly as long as it runs with a kvrs cache.

Hooks on the model look for a kvrs cache among the arguments of each call. Where there is one they set the
attention implementation of the model's configuration before the call and set it back after, whatever
happens in between. A model with hooks answers calls without a kvrs cache as it always did. The
configuration belongs to the model, so calls of *one* model from several threads must not overlap.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kvrs import KVError
from kvrs.hf.attention import ACTIVE, IMPLEMENTATION
from kvrs.hf.compat import CACHE_ARGUMENT, text_config
from kvrs.hf.step import Step
from kvrs.hf.support import check_generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrs.hf.cache import KVCache

_BINDINGS: weakref.WeakKeyDictionary[Any, Binding] = weakref.WeakKeyDictionary()
PREPARE = "_prepare_cache_for_generation"
PREFILLS = ("_prefill", "_prefill_chunking")
"""Methods of `generate` that read a whole prompt, in one call of the model or in several."""


class Binding:
    """Hooks on one model; they are there while any of its kvrs caches is alive."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._users = 0
        self._saved: list[tuple[Any, str | None, Any]] = []
        self._handles: list[Any] = []
        self.provider: Callable[[], KVCache] | None = None

    def acquire(self) -> None:
        """Install the hooks if this is the first user."""
        self._users += 1
        model = self._model()
        if self._users == 1 and model is not None:
            self._install(model)

    def release(self) -> None:
        """Take the hooks away with the last user."""
        self._users -= 1
        if self._users == 0:
            self._uninstall()

    def _install(self, model: Any) -> None:
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        for module in {id(part): part for part in (model, decoder)}.values():
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._handles += [before, after]
        if hasattr(model, PREPARE):
            setattr(model, PREPARE, _Prepare(self, model))
        for name in PREFILLS:
            if hasattr(model, name):
                setattr(model, name, _Prefill(name, model))

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self._model()
        for name in (PREPARE, *PREFILLS):
            if model is not None and name in vars(model):
                delattr(model, name)

    def _before(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = find_cache(args, kwargs)
        if cache is None:
            self._saved.append((None, None, None))
            return
        model = self._model()
        if cache.binding is not self or model is None:
            self._saved.append((None, None, None))
            raise KVError(
                f"{CACHE_ARGUMENT} is a kvrs.hf.KVCache of another model; allowed: one made for this model"
            )
        config = text_config(model)
        nested = bool(ACTIVE.steps) and ACTIVE.steps[-1].cache is cache
        self._saved.append((config, config._attn_implementation, None if nested else cache))
        config._attn_implementation_internal = IMPLEMENTATION
        if not nested:
            ACTIVE.steps.append(Step(cache))

    def _after(self, _module: Any, _args: Any, _kwargs: dict[str, Any], output: Any) -> None:
        config, implementation, cache = self._saved.pop()
        if config is None:
            return
        config._attn_implementation_internal = implementation
        if cache is not None:
            step = ACTIVE.steps.pop()
            if output is not None:
                step.finish()


class _Prepare:
    """Stand before `generate`'s own preparation of its cache: refuse early, and hand in a cache."""

    def __init__(self, binding: Binding, model: Any) -> None:
        self._binding = weakref.ref(binding)
        self._model = weakref.ref(model)

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        binding, model = self._binding(), self._model()
        if binding is None or model is None:
            raise KVError("model is gone; allowed: generate on a model that is alive")
        cache: Any = model_kwargs.get(CACHE_ARGUMENT)
        if cache is None and binding.provider is not None:
            cache = model_kwargs[CACHE_ARGUMENT] = binding.provider()
        if is_kvrs(cache):
            mode = args[0] if args else kwargs.get("generation_mode")
            check_generation(generation_config, mode, cache.store)
        prepare = getattr(type(model), PREPARE)
        return prepare(model, generation_config, model_kwargs, *args, **kwargs)


class _Prefill:
    """Stand before a method of `generate` that reads the prompt, and frame what it does."""

    def __init__(self, name: str, model: Any) -> None:
        self._name = name
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise KVError("model is gone; allowed: generate on a model that is alive")
        read = getattr(type(model), self._name)
        given = next((part for part in (*args, *kwargs.values()) if isinstance(part, dict)), {})
        cache = find_cache((), given)
        if cache is None:
            return read(model, *args, **kwargs)
        with cache.prompt():
            return read(model, *args, **kwargs)


def bind(model: Any) -> Binding:
    """Return the model's binding, one for all of its caches; `Binding.acquire` puts it to work."""
    if model not in _BINDINGS:
        _BINDINGS[model] = Binding(model)
    return _BINDINGS[model]


def find_cache(args: Any, kwargs: dict[str, Any]) -> KVCache | None:
    """Return the kvrs cache among the arguments of a model call, None if there is none."""
    return next((item for item in (*kwargs.values(), *args) if is_kvrs(item)), None)


def is_kvrs(item: Any) -> bool:
    """Return whether an argument is a kvrs cache."""
    from kvrs.hf.cache import KVCache

    return isinstance(item, KVCache)
