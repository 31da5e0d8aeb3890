"""Plans: what to keep of a model's cache, and how."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvrs import _kvrs
from kvrs.calibrated import Calibration
from kvrs.codec import Codec
from kvrs.codecs import from_spec as codec_of
from kvrs.custom import Custom
from kvrs.errors import FormatError, PlanError
from kvrs.joint import Joint
from kvrs.policies import from_spec as policy_of
from kvrs.policy import Policy
from kvrs.settings import Setting, of_layers
from kvrs.settings import from_spec as setting_of
from kvrs.shape import ModelShape, per_layer
from kvrs.stats import LayerReport, Memory
from kvrs.top_k import TopK

__all__ = ["Plan"]

Codecs = Codec | Sequence[Codec]
Policies = Policy | Sequence[Policy | None] | None
Offsets = Sequence[Any] | Literal[False] | None


@dataclass(frozen=True)
class _Settings:
    """What a plan file holds beside the constants."""

    shape: ModelShape
    keys: tuple[Codec, ...]
    values: tuple[Codec, ...]
    evict: tuple[Policy | None, ...]
    joint: dict[str, Any] | None
    attend: TopK | None
    calibration: dict[str, Any] | None
    prompt_budget: int | None
    sinks: int
    recent: int
    window_dtype: str | None
    seed: int
    name: str | None

    def to_json(self) -> str:
        return json.dumps(
            {
                "shape": self.shape.spec(),
                "keys": [codec.spec() for codec in self.keys],
                "values": [codec.spec() for codec in self.values],
                "evict": [policy and policy.spec() for policy in self.evict],
                "joint": self.joint,
                "attend": self.attend and self.attend.spec(),
                "calibration": self.calibration,
                "prompt_budget": self.prompt_budget,
                "sinks": self.sinks,
                "recent": self.recent,
                "window_dtype": self.window_dtype,
                "seed": self.seed,
                "name": self.name,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> _Settings:
        fields = json.loads(text)
        shape = ModelShape.from_spec(fields.pop("shape"))
        keys, values = (tuple(map(codec_of, fields.pop(side))) for side in ("keys", "values"))
        evict = fields.pop("evict", None) or [None] * shape.layers
        policy = tuple(spec and policy_of(spec) for spec in evict)
        attend = fields.pop("attend", None)
        top_k = attend and setting_of("attend", {TopK.name: TopK}, attend)
        for absent in ("prompt_budget", "calibration", "joint"):
            fields.setdefault(absent, None)
        return cls(shape=shape, keys=keys, values=values, evict=policy, attend=top_k, **fields)


class Plan:
    """What to keep of a model's cache, and how: immutable, validated when it is made.

    Parameters
    ----------
    shape : ModelShape
        The model's attention.
    keys, values : Codec or sequence of Codec
        How keys and values are packed: one setting, or one a layer.
    evict : Policy, sequence of (Policy or None), or None
        Which tokens stay: one policy for all layers with full attention, or one a layer. Layers with a
        sliding window keep what the window shows and take no policy.
    joint : Joint, optional
        In place of ``evict``: tokens and rates are chosen together at the end of a prompt.
    attend : TopK, optional
        Attention over the largest scores of each query only; None: over all kept tokens.
    calibration : Calibration, optional
        Data of codecs that need some (`kvrs.calibrate` makes plans with it).
    prompt_budget : int, optional
        Most tokens of an open prompt, which stay uncompressed until a policy has seen all of it; more are an
        error. None: no limit.
    sinks, recent : int
        First and newest tokens of a sequence that stay 16-bit; 0 is allowed.
    key_offset : sequence of (array ``[kv_heads, head_dim]`` or None), optional
        Pre-RoPE constant of the keys of each layer, taken out before encoding and restored exactly in the
        scores. None or False: no offset.
    value_offset : sequence of (array ``[kv_heads, value_dim]`` or None), optional
        The same for values.
    window_dtype : {"float16", "bfloat16"}, optional
        Type of uncompressed tokens. None: the input's own; float32 becomes float16.
    seed : int
        Seed of the rotations.
    name : str, optional
        Name of the model, for people; not part of the hash.

    Raises
    ------
    PlanError
        If a field is outside its range, has the wrong length, or cannot be served; the message names it.

    Examples
    --------
    >>> import kvrs
    >>> shape = kvrs.ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=64, rope=kvrs.Rope(1e4))
    >>> plan = kvrs.Plan(shape, keys=kvrs.TurboQuant(bits=4), values=kvrs.TurboQuant(bits=3))
    >>> plan.recent
    128
    """

    __slots__ = ("_settings", "native")

    native: _kvrs.Plan
    """The compiled plan."""

    def __init__(
        self,
        shape: ModelShape,
        keys: Codecs,
        values: Codecs,
        *,
        evict: Policies = None,
        joint: Joint | None = None,
        attend: TopK | None = None,
        calibration: Calibration | None = None,
        prompt_budget: int | None = None,
        sinks: int = 4,
        recent: int = 128,
        key_offset: Offsets = None,
        value_offset: Offsets = None,
        window_dtype: Any = None,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        if not isinstance(shape, ModelShape):
            raise PlanError(f"shape is {shape!r}; allowed: a kvrs.ModelShape")
        if attend is not None and not isinstance(attend, TopK):
            raise PlanError(f"attend is {attend!r}; allowed: None, or top-k attention as kvrs.TopK(k=256)")
        if joint is not None and not isinstance(joint, Joint):
            raise PlanError(f"joint is {joint!r}; allowed: None, or a kvrs.Joint")
        if calibration is not None and not isinstance(calibration, Calibration):
            raise PlanError(f"calibration is {calibration!r}; allowed: None, or a kvrs.Calibration")
        layers = shape.layers
        self._settings = _Settings(
            shape=shape,
            keys=_codecs("keys", keys, layers),
            values=_codecs("values", values, layers),
            evict=_policies(evict, shape),
            joint=None if joint is None else joint.spec(layers),
            attend=attend,
            calibration=None if calibration is None else calibration.spec(),
            prompt_budget=None if prompt_budget is None else _count("prompt_budget", prompt_budget),
            sinks=_count("sinks", sinks),
            recent=_count("recent", recent),
            window_dtype=_dtype_name(window_dtype),
            seed=_count("seed", seed, 2**64 - 1),
            name=name,
        )
        self.native = _kvrs.Plan(
            self._settings.to_json(),
            _offsets("key_offset", key_offset, layers),
            _offsets("value_offset", value_offset, layers),
            None if calibration is None else dict(calibration.arrays),
        )

    @classmethod
    def for_model(
        cls,
        model_or_config: Any,
        keys: Codecs,
        values: Codecs,
        *,
        key_offset: Offsets = None,
        value_offset: Offsets = None,
        name: str | None = None,
        **settings: Any,
    ) -> Plan:
        """Make a plan for a transformers model or configuration.

        Shape, RoPE and sliding windows are read from the configuration.

        Parameters
        ----------
        model_or_config : PreTrainedModel or PreTrainedConfig
            From a model the biases of its key and value projections are read as offsets too.
        keys, values : Codec or sequence of Codec
            As in `Plan`.
        key_offset, value_offset : sequence of arrays, False or None
            None: the model's biases, if it has any; False: no offset.
        name : str, optional
            By default the name that the configuration carries.
        **settings
            All other keywords of `Plan`.

        Raises
        ------
        PlanError
            If the model has attention that kvrs does not compute.
        """
        from kvrs.hf.shapes import offsets_from_model, shape_from_config

        config = getattr(model_or_config, "config", None)
        if config is None:
            config = model_or_config
        elif key_offset is None or value_offset is None:
            biases = offsets_from_model(model_or_config)
            key_offset = biases[0] if key_offset is None else key_offset
            value_offset = biases[1] if value_offset is None else value_offset
        name = name or getattr(config, "_name_or_path", None) or None
        settings.update(key_offset=key_offset, value_offset=value_offset, name=name)
        return cls(shape_from_config(config), keys, values, **settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises
        ------
        FormatError
            If the file cannot be read, is cut, of another version, or not a plan.
        PlanError
            If its settings are not allowed.
        """
        plan = cls.__new__(cls)
        plan.native = _kvrs.Plan.load(path)
        plan._settings = _Settings.from_json(plan.native.spec)
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one safetensors file with a JSON header.

        Raises
        ------
        FormatError
            If the file cannot be written, or the plan has a `Custom` policy, whose function no file can hold.
        """
        for layer, policy in enumerate(self.evict):
            if isinstance(policy, Custom):
                raise FormatError(
                    f"evict[{layer}] is Custom; allowed in a file: policies without a function of yours"
                )
        self.native.save(path)

    def memory(self, tokens: int = 16384, batch: int = 1) -> Memory:
        """Return the bytes that `batch` sequences of `tokens` tokens will take."""
        return self.native.memory(tokens, batch)

    def describe(self) -> list[LayerReport]:
        """Return what the plan does with the tokens of each layer."""
        return self.native.describe()

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides codes, as 64 hex digits."""
        return self.native.hash

    @property
    def shape(self) -> ModelShape:
        """The model's attention."""
        return self._settings.shape

    @property
    def keys(self) -> tuple[Codec, ...]:
        """Codec of the keys of each layer."""
        return self._settings.keys

    @property
    def values(self) -> tuple[Codec, ...]:
        """Codec of the values of each layer."""
        return self._settings.values

    @property
    def evict(self) -> tuple[Policy | None, ...]:
        """Policy of each layer; None: every token stays."""
        return self._settings.evict

    @property
    def joint(self) -> Joint | None:
        """Tokens and rates chosen together; None: not."""
        kept = self._settings.joint
        return None if kept is None else Joint.from_spec(kept)

    @property
    def attend(self) -> TopK | None:
        """Attention over the largest scores only; None: over all kept tokens."""
        return self._settings.attend

    @property
    def calibration(self) -> Calibration | None:
        """What was measured of the model; None: no codec needs it."""
        kept = self._settings.calibration
        return None if kept is None else Calibration(self.native.arrays, **kept)

    @property
    def prompt_budget(self) -> int | None:
        """Most tokens of an open prompt; None: no limit."""
        return self._settings.prompt_budget

    @property
    def sinks(self) -> int:
        """First tokens of a sequence that stay 16-bit."""
        return self._settings.sinks

    @property
    def recent(self) -> int:
        """Newest tokens of a sequence that stay 16-bit."""
        return self._settings.recent

    @property
    def window_dtype(self) -> str | None:
        """Type of uncompressed tokens; None: the input's own."""
        return self._settings.window_dtype

    @property
    def seed(self) -> int:
        """Seed of the rotations."""
        return self._settings.seed

    @property
    def name(self) -> str | None:
        """Name of the model."""
        return self._settings.name

    @property
    def key_offset(self) -> list[_kvrs.Array | None] | None:
        """Pre-RoPE constant of the keys of each layer, float32 ``[kv_heads, head_dim]``."""
        return self.native.key_offset

    @property
    def value_offset(self) -> list[_kvrs.Array | None] | None:
        """Constant of the values of each layer, float32 ``[kv_heads, value_dim]``."""
        return self.native.value_offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._settings == other._settings and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __reduce__(self) -> Any:
        raise TypeError("a Plan cannot be pickled; allowed: plan.save(path) and kvrs.Plan.load(path)")

    def __repr__(self) -> str:
        keys, values = (_short(codecs) for codecs in (self.keys, self.values))
        offsets = [o for o in ("key_offset", "value_offset") if getattr(self, o) is not None]
        extra = "".join(f", {o}=[...]" for o in offsets)
        if self.attend is not None:
            extra = f", attend={self.attend!r}{extra}"
        if any(self.evict):
            extra = f", evict={_short(self.evict)}{extra}"
        return (
            f"Plan({self.shape!r}, keys={keys}, values={values}, sinks={self.sinks}, "
            f"recent={self.recent}, seed={self.seed}{extra}) #{self.hash[:12]}"
        )


def _short(settings: tuple[Setting | None, ...]) -> str:
    return repr(settings[0]) if len(set(settings)) == 1 else repr(list(settings))


def _codecs(field: str, value: Any, layers: int) -> tuple[Codec, ...]:
    allowed = "a codec, as kvrs.TurboQuant(bits=4)"
    return of_layers(field, per_layer(field, value, layers), Codec, allowed)


def _policies(value: Any, shape: ModelShape) -> tuple[Policy | None, ...]:
    """Return one policy a layer; a single one is for the layers with full attention."""
    given = per_layer("evict", value, shape.layers)
    if isinstance(value, Policy):
        full = [window is None for window in per_layer("sliding", shape.sliding, shape.layers)]
        if not any(full):
            raise PlanError(f"evict is {value!r}; allowed: None, as all layers have sliding windows")
        given = [value if evicts else None for evicts in full]
    allowed = "None or a policy, as kvrs.SnapKV(budget=1024)"
    of_layers("evict", [policy for policy in given if policy is not None], Policy, allowed)
    return tuple(given)


def _count(field: str, value: Any, most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value <= most:
        raise PlanError(f"{field} is {value!r}; allowed: an int in 0..={most}")
    return int(value)


def _offsets(field: str, value: Any, layers: int) -> list[Any] | None:
    if value is None or value is False:
        return None
    if isinstance(value, (str, bool, int, float)):
        raise PlanError(f"{field} is {value!r}; allowed: None, False, or one array a layer")
    offsets = list(value)
    if len(offsets) != layers:
        raise PlanError(f"{field} has {len(offsets)} entries; allowed: {layers}, one a layer")
    return offsets


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a dtype given as text or as torch's or numpy's object."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    return getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
