//! Where every bit of a code lies in a tile (`docs/layouts.md` draws it; layout version 1).
//!
//! A tile is 16 tokens of the channels of a run, cut into blocks of 16 channels. Inside a block a code has
//!
//! ```text
//!         lane          adj           field
//! keys    token         channel % 4   channel % 16 / 4
//! values  channel % 16  token % 4     token / 4
//! ```
//!
//! so that what is not summed stands in lanes, and a flush of 16 tokens writes whole bytes.

mod planes;
mod raw16;

pub use planes::{Cells, pack_cells, unpack_cells};
pub use raw16::{read_16, read_row, row_bytes_mut, write_16, write_row};

use crate::desc::{Inner, PageDesc, RunDesc, Side, TILE};

/// Bytes of one tile of a run of `channels` channels.
#[must_use]
pub fn tile_bytes(width: u32, channels: usize) -> usize {
    TILE * channels * width as usize / 8
}

/// Field and byte inside a 64-byte unit of (token, channel of the block).
fn cell(side: Side, token: usize, channel: usize) -> (usize, usize) {
    match side {
        Side::Key => (channel / 4, token * 4 + channel % 4),
        Side::Value => (token / 4, channel * 4 + token % 4),
    }
}

/// Packs the codes `[16 tokens][16 channels]` of block `block` into the tile of its run.
///
/// # Panics
/// If `width` is not 1 to 8, or the tile is shorter than `tile_bytes(width, run_channels)`.
pub fn pack_block(
    side: Side,
    width: u32,
    codes: &[u8; 256],
    run_tile: &mut [u8],
    block: usize,
    run_channels: usize,
) {
    let mut cells = [[0; 64]; 4];
    for (token, row) in codes.as_chunks::<TILE>().0.iter().enumerate() {
        for (channel, &code) in row.iter().enumerate() {
            let (field, at) = cell(side, token, channel);
            cells[field][at] = code;
        }
    }
    pack_cells(width, &cells, run_tile, block, run_channels);
}

/// Unpacks the codes `[16 tokens][16 channels]` of block `block` from the tile of its run.
///
/// # Panics
/// If `width` is not 1 to 8, or the tile is shorter than `tile_bytes(width, run_channels)`.
pub fn unpack_block(
    side: Side,
    width: u32,
    run_tile: &[u8],
    block: usize,
    run_channels: usize,
    codes: &mut [u8; 256],
) {
    let mut cells = [[0; 64]; 4];
    unpack_cells(width, run_tile, block, run_channels, &mut cells);
    for (token, row) in codes.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
        for (channel, code) in row.iter_mut().enumerate() {
            let (field, at) = cell(side, token, channel);
            *code = cells[field][at];
        }
    }
}

/// Bytes of run `run` in tile `tile` of a page.
#[must_use]
pub fn run_range(page: &PageDesc, side: Side, run: &RunDesc, tile: usize) -> std::ops::Range<usize> {
    let desc = page.side(side);
    let at = desc.codes_at as usize + tile * desc.tile_bytes as usize + run.at as usize;
    at..at + tile_bytes(run.width, run.channels as usize)
}

/// Whether single slots can move between pages: not where tokens share a scale or sparse entries.
#[must_use]
pub fn movable(page: &PageDesc) -> bool {
    let shared =
        |side: Side| page.side(side).inner == Inner::GroupChannel || page.side(side).sparse_per_tile > 0;
    !shared(Side::Key) && !shared(Side::Value)
}

/// Copies codes and scales of slot `from.1` of a page to slot `to.1` of another page of the same descriptor.
///
/// # Panics
/// If the pages are not [`movable`], a slot is outside the page, or the bytes are fewer than a page's.
pub fn copy_slot(page: &PageDesc, from: (&[u8], usize), to: (&mut [u8], usize)) {
    assert!(movable(page), "slots share scales or sparse entries");
    let (slots, (bytes, slot), (to_bytes, to_slot)) = (page.slots as usize, from, to);
    assert!(slot < slots && to_slot < slots, "slots {slot} and {to_slot} of {slots}");
    for side in [Side::Key, Side::Value] {
        let desc = page.side(side);
        for run in &desc.runs {
            let from = &bytes[run_range(page, side, run, slot / TILE)];
            let to = &mut to_bytes[run_range(page, side, run, to_slot / TILE)];
            copy_token(side, run, (from, slot % TILE), (to, to_slot % TILE));
        }
        for i in 0..desc.scales as usize {
            let at = |slot: usize| desc.scales_at as usize + 2 * (i * slots + slot);
            to_bytes[at(to_slot)..at(to_slot) + 2].copy_from_slice(&bytes[at(slot)..at(slot) + 2]);
        }
        if desc.inner == Inner::TokenBlock {
            let size = 4 * desc.n.div_ceil(desc.block) as usize;
            let at = |slot: usize| desc.inner_at as usize + slot * size;
            to_bytes[at(to_slot)..at(to_slot) + size].copy_from_slice(&bytes[at(slot)..at(slot) + size]);
        }
    }
}

/// Copies what the first `filled` slots of a page use to a page of zeros; other bytes stay as they are.
///
/// # Panics
/// If the page has fewer slots, or the bytes are fewer than a page's.
pub fn copy_filled(page: &PageDesc, from: &[u8], to: &mut [u8], filled: usize) {
    let slots = page.slots as usize;
    assert!(filled <= slots, "{filled} of {slots} slots");
    for side in [Side::Key, Side::Value] {
        let desc = page.side(side);
        for (run, tile) in
            desc.runs.iter().flat_map(|run| (0..filled.div_ceil(TILE)).map(move |tile| (run, tile)))
        {
            let range = run_range(page, side, run, tile);
            copy_tokens(side, run, &from[range.clone()], &mut to[range], filled - tile * TILE);
        }
        let mut copy = |at: u32, bytes: usize| {
            let range = if bytes == 0 { 0..0 } else { at as usize..at as usize + bytes };
            to[range.clone()].copy_from_slice(&from[range]);
        };
        (0..desc.scales).for_each(|i| copy(desc.scales_at + 2 * i * page.slots, 2 * filled));
        let inner = match desc.inner {
            Inner::None => 0,
            Inner::GroupChannel => filled.div_ceil(desc.block as usize) * desc.n as usize,
            Inner::TokenBlock => filled * desc.n.div_ceil(desc.block) as usize,
        };
        copy(desc.inner_at, 4 * inner);
        copy(desc.sparse_at, 4 * filled.div_ceil(TILE) * desc.sparse_per_tile as usize);
    }
}

/// Copies the first `tokens` tokens of a tile, or all of them.
fn copy_tokens(side: Side, run: &RunDesc, from: &[u8], to: &mut [u8], tokens: usize) {
    if tokens >= TILE {
        to.copy_from_slice(from);
        return;
    }
    for token in 0..tokens {
        copy_token(side, run, (from, token), (&mut *to, token));
    }
}

fn copy_token(side: Side, run: &RunDesc, (from, token): (&[u8], usize), to: (&mut [u8], usize)) {
    let (channels, (to, to_token)) = (run.channels as usize, to);
    if run.width == 16 {
        let row = 2 * channels;
        to[to_token * row..][..row].copy_from_slice(&from[token * row..][..row]);
        return;
    }
    for block in 0..channels / TILE {
        let (mut source, mut target) = ([[0; 64]; 4], [[0; 64]; 4]);
        unpack_cells(run.width, from, block, channels, &mut source);
        unpack_cells(run.width, to, block, channels, &mut target);
        for channel in 0..TILE {
            let ((field, at), (to_field, to_at)) =
                (cell(side, token, channel), cell(side, to_token, channel));
            target[to_field][to_at] = source[field][at];
        }
        pack_cells(run.width, &target, to, block, channels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tile(width: u32, blocks: &[[u8; 256]], side: Side) -> Vec<u8> {
        let channels = 16 * blocks.len();
        let mut bytes = vec![0xA5; tile_bytes(width, channels)];
        for (b, codes) in blocks.iter().enumerate() {
            pack_block(side, width, codes, &mut bytes, b, channels);
        }
        bytes
    }

    proptest! {
        #[test]
        fn packed_codes_come_back_and_use_every_byte(
            width in 1u32..=8,
            seed in proptest::collection::vec(any::<u8>(), 5 * 256),
            blocks in 1usize..=5,
            key: bool,
        ) {
            let side = if key { Side::Key } else { Side::Value };
            let mask = (1u16 << width) as u8;
            let codes: Vec<[u8; 256]> = (0..blocks)
                .map(|b| std::array::from_fn(|i| seed[b * 256 + i] & mask.wrapping_sub(1)))
                .collect();
            let bytes = tile(width, &codes, side);
            for (b, expected) in codes.iter().enumerate() {
                let mut got = [0; 256];
                unpack_block(side, width, &bytes, b, 16 * blocks, &mut got);
                prop_assert_eq!(&got, expected);
            }
            let zero = tile(width, &vec![[0; 256]; blocks], side);
            prop_assert!(zero.iter().all(|&b| b == 0));
        }
    }

    /// The place of each code by the definition, written apart from the code under test.
    fn plane_4_place(side: Side, token: usize, channel: usize) -> (usize, u32) {
        let (lane, adj, z) = match side {
            Side::Key => (token, channel % 4, channel / 4),
            Side::Value => (channel, token % 4, token / 4),
        };
        (64 * (z / 2) + lane * 4 + adj, 4 * (z as u32 % 2))
    }

    #[test]
    fn four_bits_of_one_code_lie_where_the_definition_says() {
        for side in [Side::Key, Side::Value] {
            for (token, channel) in [(0, 0), (3, 5), (15, 15), (7, 12), (8, 3)] {
                let mut codes = [0; 256];
                codes[token * 16 + channel] = 15;
                let bytes = tile(4, &[[0; 256], codes], side);
                let (byte, bit) = plane_4_place(side, token, channel);
                let mut expected = vec![0; 256];
                expected[128 + byte] = 15 << bit;
                assert_eq!(bytes, expected);
            }
        }
    }

    #[test]
    fn the_third_bit_of_width_3_is_ordered_2_0_3_1() {
        for (z, bit) in [(0, 2), (1, 0), (2, 3), (3, 1)] {
            let mut codes = [0; 256];
            codes[4 * z] = 4; // token 0, channel 4 z
            let bytes = tile(3, &[[0; 256], codes], Side::Key);
            let set: Vec<_> = (0..192).filter(|&i| bytes[i] != 0).map(|i| (i, bytes[i])).collect();
            assert_eq!(set, [(128, 1 << (4 + bit))]);
            let lone = tile(3, &[codes], Side::Key);
            let set: Vec<_> = (0..96).filter(|&i| lone[i] != 0).map(|i| (i, lone[i])).collect();
            assert_eq!(set, [(64, 1 << bit)]);
        }
    }

    #[test]
    fn a_copy_of_the_filled_slots_of_a_tile_has_their_codes_and_zeros_behind() {
        for (side, width) in [(Side::Key, 3), (Side::Value, 4), (Side::Key, 16)] {
            let (elem, arith) = (crate::desc::Elem::Int, crate::desc::Arith::F32);
            let run = RunDesc {
                width,
                elem,
                arith,
                scale: 0,
                channels: 32,
                vec_at: 0,
                at: 0,
                lut_at: 0,
                step: 1.0,
                zero: 0.0,
            };
            let from: Vec<u8> = (0..tile_bytes(width, 32)).map(|i| (i * 37 + 11) as u8).collect();
            for tokens in [0, 1, 7, 15, 16, 40] {
                let (mut to, mut again) = (vec![0; from.len()], from.clone());
                copy_tokens(side, &run, &from, &mut to, tokens);
                for token in 0..TILE {
                    let (mut one, mut other) = (vec![0; from.len()], vec![0; from.len()]);
                    copy_token(side, &run, (&from, token), (&mut one, token));
                    copy_token(side, &run, (&to, token), (&mut other, token));
                    let expected = if token < tokens { one } else { vec![0; from.len()] };
                    assert_eq!(other, expected, "{side:?}, {width} bits, token {token} of {tokens}");
                }
                copy_tokens(side, &run, &to, &mut again, tokens);
                assert_eq!(again, from, "what is behind stays");
            }
        }
    }

    #[test]
    fn a_lone_block_keeps_lanes_from_8_in_the_high_nibble_of_its_last_plane() {
        let mut codes = [0; 256];
        codes[9 * 16 + 6] = 1; // token 9, channel 6: lane 9, adj 2, field 1
        let bytes = tile(1, &[codes], Side::Key);
        assert_eq!((bytes.len(), bytes[4 + 2]), (32, 1 << 5));
    }
}
