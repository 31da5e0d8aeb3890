//! Codes of 16 tokens into the planes of a run's tile (`kvrs_codec::layout` says where every bit lies).

use super::Simd;
use super::encode::SimdEncode;

/// Codes of a block as `[field][lane * 4 + adj]`, each field a cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Cells(pub(crate) [[u8; 64]; 4]);

impl Cells {
    pub(crate) const ZERO: Self = Self([[0; 64]; 4]);
}

/// Packs the codes of all blocks of a run of `width` bits.
///
/// # Panics
/// If the tile is shorter than the run's, or `width` is not 1 to 8.
#[inline(always)]
pub(crate) fn pack_run<S: SimdEncode>(s: S, width: u32, blocks: &[Cells], tile: &mut [u8]) {
    match width {
        1 => planes::<S, 0, 0, 1>(s, blocks, tile),
        2 => planes::<S, 0, 2, 0>(s, blocks, tile),
        3 => planes::<S, 0, 2, 1>(s, blocks, tile),
        4 => planes::<S, 4, 0, 0>(s, blocks, tile),
        5 => planes::<S, 4, 0, 1>(s, blocks, tile),
        6 => planes::<S, 4, 2, 0>(s, blocks, tile),
        7 => planes::<S, 4, 2, 1>(s, blocks, tile),
        8 => {
            let tile = tile.as_chunks_mut::<256>().0.iter_mut();
            tile.zip(blocks).for_each(|(tile, cells)| tile.copy_from_slice(cells.0.as_flattened()));
        }
        _ => unreachable!("planes hold 1 to 8 bits"),
    }
}

/// The planes `FOUR`, `TWO` and `ONE`, each 0 where the width lacks it, pair of blocks by pair.
#[inline(always)]
fn planes<S: SimdEncode, const FOUR: usize, const TWO: usize, const ONE: usize>(
    s: S,
    blocks: &[Cells],
    tile: &mut [u8],
) {
    let width = FOUR + TWO + ONE;
    for (pair, tile) in blocks.chunks(2).zip(tile.chunks_mut(64 * width)) {
        let (four, rest) = tile.split_at_mut(32 * FOUR * pair.len());
        let (two, one) = rest.split_at_mut(32 * TWO * pair.len());
        if FOUR > 0 {
            for (cells, out) in pair.iter().zip(four.as_chunks_mut::<64>().0.as_chunks_mut::<2>().0) {
                plane_4(s, cells, width == 4, out);
            }
        }
        if TWO > 0 {
            for (cells, out) in pair.iter().zip(two.as_chunks_mut::<64>().0) {
                plane_2::<S, FOUR>(s, cells, out);
            }
        }
        match (ONE, pair) {
            (0, _) => {}
            (_, [a, b]) => {
                plane_1::<S, FOUR, TWO>(s, [a, b], one.first_chunk_mut().expect("64 bytes a pair"));
            }
            (_, lone) => {
                plane_1_lone::<S, FOUR, TWO>(s, &lone[0], one.first_chunk_mut().expect("32 bytes a block"));
            }
        }
    }
}

/// Bits `low..` of field `z`, masked.
#[inline(always)]
fn field<S: Simd, const FOUR: usize, const TWO: usize>(s: S, unit: &[u8; 64], half: usize, mask: u8) -> S::I {
    let x = s.load(unit, half);
    let x = match FOUR + TWO {
        0 => x,
        2 => s.shift_right::<2>(x),
        4 => s.shift_right::<4>(x),
        _ => s.shift_right::<6>(x),
    };
    s.and(x, s.splat_bytes(mask))
}

#[inline(always)]
fn plane_4<S: SimdEncode>(s: S, cells: &Cells, whole: bool, out: &mut [[u8; 64]; 2]) {
    for (fields, out) in cells.0.as_chunks::<2>().0.iter().zip(out) {
        for half in 0..S::HALVES {
            let (mut low, mut high) = (s.load(&fields[0], half), s.load(&fields[1], half));
            if !whole {
                let mask = s.splat_bytes(15);
                (low, high) = (s.and(low, mask), s.and(high, mask));
            }
            s.store(s.or(low, s.shift_left::<4>(high)), out, half);
        }
    }
}

#[inline(always)]
fn plane_2<S: SimdEncode, const FOUR: usize>(s: S, cells: &Cells, out: &mut [u8; 64]) {
    for half in 0..S::HALVES {
        let [a, b, c, d] = [0, 1, 2, 3];
        let get = |z: usize| field::<S, FOUR, 0>(s, &cells.0[z], half, 3);
        let low = s.or(get(a), s.shift_left::<2>(get(b)));
        let high = s.or(s.shift_left::<4>(get(c)), s.shift_left::<6>(get(d)));
        s.store(s.or(low, high), out, half);
    }
}

/// One bit of each field as nibbles.
#[inline(always)]
fn nibbles<S: SimdEncode, const FOUR: usize, const TWO: usize>(s: S, cells: &Cells, half: usize) -> S::I {
    // With width 3 the bit lands in the half of the nibble that plane 2 leaves free.
    let [a, b, c, d] = if FOUR + TWO == 2 { [1, 3, 0, 2] } else { [0, 1, 2, 3] };
    let get = |z: usize| field::<S, FOUR, TWO>(s, &cells.0[z], half, 1);
    let low = s.or(get(a), s.shift_left::<1>(get(b)));
    s.or(low, s.or(s.shift_left::<2>(get(c)), s.shift_left::<3>(get(d))))
}

#[inline(always)]
fn plane_1<S: SimdEncode, const FOUR: usize, const TWO: usize>(s: S, pair: [&Cells; 2], out: &mut [u8; 64]) {
    for half in 0..S::HALVES {
        let low = nibbles::<S, FOUR, TWO>(s, pair[0], half);
        let high = nibbles::<S, FOUR, TWO>(s, pair[1], half);
        s.store(s.or(low, s.shift_left::<4>(high)), out, half);
    }
}

#[inline(always)]
fn plane_1_lone<S: SimdEncode, const FOUR: usize, const TWO: usize>(s: S, cells: &Cells, out: &mut [u8; 32]) {
    let mut unit = [0; 64];
    for half in 0..S::HALVES {
        s.store(nibbles::<S, FOUR, TWO>(s, cells, half), &mut unit, half);
    }
    let (low, high) = unit.split_at(32);
    out.iter_mut().zip(low.iter().zip(high)).for_each(|(out, (low, high))| *out = low | high << 4);
}
