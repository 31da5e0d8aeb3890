"""Joint allocation: which tokens of a prompt go, and at how many bits the others are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrs import _kvrs, settings
from kvrs.codec import Codec
from kvrs.codecs import from_spec as codec_of
from kvrs.errors import KVError, PlanError
from kvrs.shape import per_layer

__all__ = ["Joint"]


@dataclass(frozen=True)
class Joint:
    """One optimum over tokens and rates at the end of a prompt.

    Every token of the layers with full attention, apart from sinks and window, goes, is stored at a low
    rate, or at the plan's own, so that the predicted distortion of the attention output is least for the
    bytes. It is that of AATC (Laus et al., 2026, arXiv:2608.14191, section 3): the squared attention that
    the prompt's last queries pay to a token, times the squared distance of its value from the output (keys,
    and tokens that go) or from zero (values), times the square error of the rate. The heads of a layer
    share its bytes; layers have equal shares. Tokens after the prompt are stored at the plan's own rate and
    all stay; a second prompt on the same sequence is stored whole.

    Parameters
    ----------
    bytes : int or str
        Bytes of a sequence after its prompt, everything counted, like ``"64MiB"``.
    low_keys, low_values : Codec or sequence of Codec
        The low rate: one setting, or one a layer.
    window : int
        Queries at the end of a prompt whose attention counts.

    Raises
    ------
    kvrs.PlanError
        If a field is outside its range; in a plan, beside ``evict``, or if no layer has full attention.

    Examples
    --------
    >>> import kvrs
    >>> low = kvrs.TurboQuant(bits=2)
    >>> kvrs.Joint(bytes="64MiB", low_keys=low, low_values=low).bytes
    '64MiB'
    """

    bytes: int | str
    low_keys: Codec | Sequence[Codec]
    low_values: Codec | Sequence[Codec]
    window: int = 32

    def __post_init__(self) -> None:
        try:
            _kvrs.size_of("Joint.bytes", self.bytes)
        except (KVError, TypeError):
            wrong = f"Joint.bytes is {self.bytes!r}; allowed: a number of bytes above 0, or text like '64MiB'"
            raise PlanError(wrong) from None
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise PlanError(f"Joint.window is {self.window!r}; allowed: an int, 1 or more")

    def spec(self, layers: int) -> dict[str, Any]:
        """Return the setting as a plan of so many layers stores it."""
        sides = {}
        for name, value in (("keys", self.low_keys), ("values", self.low_values)):
            field = f"joint.low_{name}"
            codecs = settings.of_layers(
                field, per_layer(field, value, layers), Codec, "a codec, as kvrs.TurboQuant(bits=2)"
            )
            sides[name] = [codec.spec() for codec in codecs]
        size = _kvrs.size_of("Joint.bytes", self.bytes)
        return {"bytes": {"bytes": size}, **sides, "window": self.window}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Joint:
        """Return the setting that a plan stored."""
        keys, values = (tuple(map(codec_of, spec[side])) for side in ("keys", "values"))
        return cls(bytes=spec["bytes"]["bytes"], low_keys=keys, low_values=values, window=spec["window"])
