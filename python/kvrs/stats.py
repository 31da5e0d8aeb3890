"""What stores and plans report: bytes, tokens and what each layer does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HeadSelection", "LayerReport", "LayerStats", "Memory", "PolicyStats", "Stats"]


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


@dataclass(frozen=True)
class LayerStats:
    """One layer of a store, over all sequences.

    Attributes
    ----------
    bytes_codes, bytes_scales, bytes_window : int
        Packed codes, their scales, and 16-bit rows.
    tokens_kept : int
        Tokens kept, summed over sequences and heads.
    path : str
        ``"dot"``, ``"tile"`` or ``"raw"``: how attention reads the layer.
    raw : bool
        Whether every token stays 16-bit.
    note : str or None
        Why, where a codec was asked for.
    """

    bytes_codes: int
    bytes_scales: int
    bytes_window: int
    tokens_kept: int
    path: str
    raw: bool
    note: str | None


@dataclass(frozen=True)
class PolicyStats:
    """What one policy did, over all sequences and its layers.

    Attributes
    ----------
    policy : str
        Its name.
    waiting : int
        Pairs of sequence and layer that wait for the end of a prompt.
    kept_all : int
        Pairs that kept everything, since the prompt was not longer than the budget.
    evicted : int
        Pairs from which tokens went.
    tokens_evicted : int
        Tokens that went, summed over heads.
    """

    policy: str
    waiting: int
    kept_all: int
    evicted: int
    tokens_evicted: int


@dataclass(frozen=True)
class HeadSelection:
    """What one head of a sequence keeps, and why.

    Attributes
    ----------
    layer, head : int
        The key-value head.
    policy : str or None
        Its policy; None: everything stays.
    budget : int or None
        Tokens per head, on average over layers and heads; None until it is known.
    kept, logical : int
        Tokens that it keeps, and that were appended.
    """

    layer: int
    head: int
    policy: str | None
    budget: int | None
    kept: int
    logical: int

    @classmethod
    def from_json(cls, text: str) -> HeadSelection:
        """Read what the compiled module reports."""
        return cls(**json.loads(text))


@dataclass(frozen=True, repr=False)
class Stats:
    """Bytes and tokens of a store, everything counted.

    ``bytes_total`` is the sum of codes, scales, window, tables, statistics and slack.

    Attributes
    ----------
    bytes_total : int
        Everything allocated for tokens.
    bytes_codes, bytes_scales : int
        Packed codes and their scales.
    bytes_window : int
        16-bit rows: sinks, recent tokens and raw layers.
    bytes_tables : int
        Page tables.
    bytes_statistics : int
        What policies keep.
    bytes_slack : int
        Allocated and not used: tails of pages, free pages, reserved pages.
    bytes_constants : int
        Matrices and tables of the plan, shared by all sequences; not in the total.
    bytes_parked : int
        Host memory of sequences after `KVStore.to_host`; not in the total.
    bytes_capacity : int or None
        The hard limit.
    pages_total, pages_free : int
        Pages cut from memory, and of these the free ones.
    per_layer : list of LayerStats
        One entry a layer.
    tokens_logical : int
        Tokens that were appended, summed over sequences.
    tokens_kept : int
        Tokens stored, summed over layers, heads and the sequences that are not parked.
    tokens_encoded : int
        Every encoding ever done, summed over layers and heads.
    waiting : list of str
        Policies that still wait for the end of their prompt.
    value_tiles_seen, value_tiles_read : int
        Tiles of 16 values per head that queries with top-k attention could have read, and did.
    policies : list of PolicyStats
        What each policy did.
    huge_pages : bool
        Whether memory lies on huge pages.
    path : str
        The slowest path of any layer: ``"dot"``, ``"tile"`` or ``"raw"``.
    bits_per_element : float
        8 * ``bytes_total`` over the elements of all visible tokens that are not parked.
    sequences : int
        Sequences alive.
    """

    bytes_total: int
    bytes_codes: int
    bytes_scales: int
    bytes_window: int
    bytes_tables: int
    bytes_statistics: int
    bytes_slack: int
    bytes_constants: int
    bytes_parked: int
    bytes_capacity: int | None
    pages_total: int
    pages_free: int
    per_layer: list[LayerStats]
    tokens_logical: int
    tokens_kept: int
    tokens_encoded: int
    waiting: list[str]
    value_tiles_seen: int
    value_tiles_read: int
    policies: list[PolicyStats]
    huge_pages: bool
    path: str
    bits_per_element: float
    sequences: int

    @classmethod
    def from_json(cls, text: str) -> Stats:
        """Read what the compiled module reports."""
        fields = json.loads(text)
        layers = [LayerStats(**layer) for layer in fields.pop("per_layer")]
        policies = [PolicyStats(**policy) for policy in fields.pop("policies")]
        return cls(per_layer=layers, policies=policies, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists."""
        return asdict(self)

    def __repr__(self) -> str:
        parts = ("codes", "scales", "window", "tables", "statistics", "slack")
        inner = ", ".join(f"{part} {_mib(getattr(self, 'bytes_' + part))}" for part in parts)
        limit = "" if self.bytes_capacity is None else f" of {_mib(self.bytes_capacity)}"
        parked = f"parked on the host {_mib(self.bytes_parked)}; " if self.bytes_parked else ""
        return (
            f"Stats({_mib(self.bytes_total)}{limit}: {inner}; constants {_mib(self.bytes_constants)}; "
            f"{parked}{self.sequences} sequences, {self.tokens_logical} tokens, {self.tokens_kept} kept, "
            f"{self.bits_per_element:.2f} bits per element, path {self.path})"
        )


@dataclass(frozen=True, repr=False)
class Memory:
    """Bytes that a plan will take, before anything is run.

    Attributes
    ----------
    bytes_total, bytes_codes, bytes_scales, bytes_window, bytes_tables, bytes_slack, bytes_constants : int
        As in `Stats`.
    bytes_fp16 : int
        A 16-bit cache of the same tokens; sliding layers hold their window only.
    ratio : float
        ``bytes_fp16 / bytes_total``.
    bits_per_element : float
        8 * ``bytes_total`` over the elements of all visible tokens.
    """

    bytes_total: int
    bytes_codes: int
    bytes_scales: int
    bytes_window: int
    bytes_tables: int
    bytes_slack: int
    bytes_constants: int
    bytes_fp16: int
    ratio: float
    bits_per_element: float

    @classmethod
    def from_json(cls, text: str) -> Memory:
        """Read what the compiled module reports."""
        return cls(**json.loads(text))

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return asdict(self)

    def __repr__(self) -> str:
        return (
            f"Memory({_mib(self.bytes_total)}, 16-bit cache {_mib(self.bytes_fp16)}, "
            f"ratio {self.ratio:.2f}, {self.bits_per_element:.2f} bits per element)"
        )


@dataclass(frozen=True)
class LayerReport:
    """What a plan does with the tokens of one layer.

    Attributes
    ----------
    keys, values : str
        Codecs.
    path : str
        ``"dot"``, ``"tile"`` or ``"raw"``.
    key_bits, value_bits : float
        Bits of codes per channel.
    group : int
        Tokens that are encoded together.
    sliding : int or None
        Sliding window in tokens.
    raw : bool
        Whether every token stays 16-bit.
    note : str or None
        Why, where a codec was asked for.
    evict : str or None
        The policy that evicts.
    evicts : str or None
        When it acts; what comes after the last time stays.
    """

    keys: str
    values: str
    path: str
    key_bits: float
    value_bits: float
    group: int
    sliding: int | None
    raw: bool
    note: str | None
    evict: str | None
    evicts: str | None

    @classmethod
    def from_json(cls, text: str) -> LayerReport:
        """Read what the compiled module reports."""
        return cls(**json.loads(text))
