"""Where every bit of a code lies in a packed page (layout version 1; pictures in `docs/layouts.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rng import KEY

TILE = 16
"""Tokens of a tile, and channels of a block."""
PACKED_SLOTS = 64
RAW_SLOTS = 16

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Planes of each width, largest first; the code's low bits lie in the first."""

_NIBBLE_ORDER = np.array([2, 0, 3, 1])

Index = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Side:
    """Keys or values of a page: runs (width, channels) in descriptor order, and scales per token."""

    runs: tuple[tuple[int, int], ...]
    scales: int = 1

    @property
    def channels(self) -> int:
        """Stored channels of all runs."""
        return sum(channels for _, channels in self.runs)

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of codes."""
        return sum(run_bytes(width, channels) for width, channels in self.runs)


@dataclass(frozen=True)
class Page:
    """One page: key tiles, value tiles, key scales, value scales."""

    key: Side
    value: Side
    slots: int = PACKED_SLOTS

    @property
    def tiles(self) -> int:
        """Tiles of a side."""
        return self.slots // TILE

    @property
    def values_at(self) -> int:
        """Byte at which the value tiles start."""
        return self.tiles * self.key.tile_bytes

    @property
    def key_scales_at(self) -> int:
        """Byte at which the key scales start."""
        return self.values_at + self.tiles * self.value.tile_bytes

    @property
    def value_scales_at(self) -> int:
        """Byte at which the value scales start."""
        return self.key_scales_at + 2 * self.slots * self.key.scales

    @property
    def page_bytes(self) -> int:
        """Bytes of the page, a multiple of 64."""
        return -(-(self.value_scales_at + 2 * self.slots * self.value.scales) // 64) * 64


def raw16_page(d: int, value_dim: int | None = None) -> Page:
    """Return the page of 16 uncompressed slots of `d` key and `value_dim` value channels."""
    return Page(Side(((16, d),), 0), Side(((16, value_dim or d),), 0), RAW_SLOTS)


def run_bytes(width: int, channels: int) -> int:
    """Return the bytes of one tile of a run."""
    return TILE * channels * width // 8


def _cells(channels: int, side: int) -> tuple[Index, Index, Index, Index]:
    """Return block, lane, adj and z ``[16, channels]`` of (token, channel)."""
    token, channel = np.meshgrid(np.arange(TILE), np.arange(channels), indexing="ij")
    block, inside = channel // TILE, channel % TILE
    if side == KEY:
        return block, token, inside % 4, inside // 4
    return block, inside, token % 4, token // 4


def _plane_place(plane: int, width: int, channels: int, side: int) -> tuple[Index, Index]:
    """Return the byte in the run's tile and the lowest bit ``[16, channels]`` of a code's part in `plane`."""
    block, lane, adj, z = _cells(channels, side)
    pair, odd = block // 2, block % 2
    lone = (2 * pair + 1) * TILE >= channels  # the last block has no partner
    in_group = np.where(lone, 1, 2)
    base = pair * 64 * width  # a pair takes 2 * 32 bytes a bit
    for earlier in PLANES[width]:
        if earlier == plane:
            break
        base = base + in_group * 32 * earlier
    if plane > 1:
        base = base + odd * 32 * plane
    cell = lane * 4 + adj
    if plane == 4:
        return base + 64 * (z // 2) + cell, 4 * (z % 2)
    if plane == 2:
        return base + cell, 2 * z
    order = _NIBBLE_ORDER[z] if width == 3 else z
    alone = base + (lane % 8) * 4 + adj
    return np.where(lone, alone, base + cell), np.where(lone, 4 * (lane // 8), 4 * odd) + order


@lru_cache(maxsize=256)
def bit_places(width: int, channels: int, side: int) -> tuple[Index, Index]:
    """Return byte in a run's tile and bit ``[16, channels, width]`` of bit i of (token, channel)."""
    byte = np.empty((TILE, channels, width), dtype=np.int64)
    bit = np.empty_like(byte)
    if width in PLANES:
        done = 0
        for plane in PLANES[width]:
            at, low = _plane_place(plane, width, channels, side)
            for i in range(plane):
                byte[:, :, done + i], bit[:, :, done + i] = at, low + i
            done += plane
        return byte, bit
    if width == 8:
        block, lane, adj, z = _cells(channels, side)
        first = block * 256 + 64 * z + lane * 4 + adj
    elif width == 16:
        first = 2 * np.arange(TILE * channels).reshape(TILE, channels)
    else:
        raise ValueError(f"width is {width}; allowed are 1 to 8 and 16")
    index = np.arange(width)
    byte[:], bit[:] = first[:, :, None] + index // 8, index % 8
    return byte, bit


def _check(width: int, channels: int) -> None:
    if channels <= 0 or (width != 16 and channels % TILE):
        raise ValueError(f"channels is {channels}; allowed are positive multiples of {TILE}")


def pack_run(codes: ArrayLike, width: int, side: int) -> U8:
    """Return the bytes of one tile of a run from its codes ``[16, channels]``."""
    c = np.asarray(codes, dtype=np.uint16)
    _check(width, c.shape[1])
    byte, bit = bit_places(width, c.shape[1], side)
    out = np.zeros(run_bytes(width, c.shape[1]), dtype=np.uint8)
    ones = (c[:, :, None] >> np.arange(width, dtype=np.uint16)) & 1
    np.bitwise_or.at(out, byte, (ones << bit).astype(np.uint8))
    return out


def unpack_run(data: U8, width: int, channels: int, side: int) -> NDArray[np.uint16]:
    """Return the codes ``[16, channels]`` of one tile of a run."""
    _check(width, channels)
    byte, bit = bit_places(width, channels, side)
    ones = (data[byte] >> bit.astype(np.uint8)) & 1
    weight = np.uint32(1) << np.arange(width, dtype=np.uint32)
    return np.asarray((ones * weight).sum(axis=2), dtype=np.uint16)


def pack_tile(codes: NDArray[np.integer], side_layout: Side, side: int) -> U8:
    """Return the bytes of one tile from its codes ``[16, channels]``, runs one after the other."""
    parts, start = [], 0
    for width, channels in side_layout.runs:
        parts.append(pack_run(codes[:, start : start + channels], width, side))
        start += channels
    return np.concatenate(parts)


def unpack_tile(data: U8, side_layout: Side, side: int) -> NDArray[np.uint16]:
    """Return the codes ``[16, channels]`` of one tile."""
    parts, at = [], 0
    for width, channels in side_layout.runs:
        size = run_bytes(width, channels)
        parts.append(unpack_run(data[at : at + size], width, channels, side))
        at += size
    return np.concatenate(parts, axis=1)


def _sections(page: Page) -> tuple[tuple[Side, int, int], tuple[Side, int, int]]:
    """Return (side layout, first byte of codes, first byte of scales) of keys and of values."""
    return (page.key, 0, page.key_scales_at), (page.value, page.values_at, page.value_scales_at)


def pack_page(page: Page, codes: tuple[ArrayLike, ArrayLike], scales: tuple[ArrayLike, ArrayLike]) -> U8:
    """Return the bytes of a page; every byte that no filled slot needs is 0.

    Parameters
    ----------
    page
        The layout.
    codes
        Key and value codes ``[filled, channels]``, filled at most ``page.slots``.
    scales
        Key and value scales ``[scale index, filled]`` f16.
    """
    out = np.zeros(page.page_bytes, dtype=np.uint8)
    for side, (layout, codes_at, scales_at) in enumerate(_sections(page)):
        given = np.asarray(codes[side], dtype=np.uint16)
        full = np.zeros((page.slots, layout.channels), dtype=np.uint16)
        full[: len(given)] = given
        for tile in range(page.tiles):
            at = codes_at + tile * layout.tile_bytes
            rows = full[TILE * tile : TILE * (tile + 1)]
            filled = np.clip(len(given) - TILE * tile, 0, TILE)
            if filled:
                out[at : at + layout.tile_bytes] = pack_tile(rows, layout, side)
        for index in range(layout.scales):
            bits = np.asarray(scales[side])[index].astype("<f2").view(np.uint8)
            at = scales_at + 2 * page.slots * index
            out[at : at + len(bits)] = bits
    return out


def unpack_page(page: Page, data: U8) -> tuple[list[NDArray[np.uint16]], list[NDArray[np.float16]]]:
    """Return the codes ``[slots, channels]`` and scales ``[scale index, slots]`` of keys and values."""
    codes, scales = [], []
    for side, (layout, codes_at, scales_at) in enumerate(_sections(page)):
        tiles = data[codes_at : codes_at + page.tiles * layout.tile_bytes].reshape(page.tiles, -1)
        codes.append(np.concatenate([unpack_tile(t, layout, side) for t in tiles]))
        size = 2 * page.slots * layout.scales
        scale = data[scales_at : scales_at + size].copy().view("<f2").astype(np.float16)
        scales.append(scale.reshape(layout.scales, page.slots))
    return codes, scales
