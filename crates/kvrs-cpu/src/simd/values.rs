//! Weighted sums of the packed codes of values: 16 channels in lanes, four adjacent tokens in a lane.
//!
//! Narrow runs (levels up to 63) take levels with 64 added as unsigned bytes and weights as signed bytes, all tokens of
//! a page to a sum; what the 64 adds is taken off where the sum starts. Wide runs take signed words on both sides.

use super::Simd;
use super::codes::Codes;
use super::keys::splat;
use super::unpack::{self, Tables};

/// Some rows of weights against one run of one page.
pub(crate) struct ValueArgs<'a> {
    pub(crate) codes: Codes<'a>,
    /// Value of a digit times that of a level `[row]`.
    pub(crate) scales: &'a [f32],
    /// Added to every channel `[row]`; `None`: nothing.
    pub(crate) biases: Option<&'a [f32]>,
    /// Sums `[row][block]`, the run's first block first.
    pub(crate) sums: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
}

/// Prepared weights of narrow runs.
pub(crate) struct NarrowWeights<'a> {
    /// Levels with 64 added.
    pub(crate) tables: &'a Tables,
    /// Bytes of four tokens, none negative `[row][quad][Simd::SPREAD]`.
    pub(crate) digits: &'a [i32],
    /// What the sums start at: -64 times the digits `[row]`.
    pub(crate) starts: &'a [i32],
}

/// Prepared weights of wide runs.
pub(crate) struct WideWeights<'a> {
    /// Levels by code up to 6 bits; wider runs hold integers.
    pub(crate) table: &'a [u8; 64],
    /// Words of tokens 0 and 2, then 1 and 3, of a quad `[row][quad][2]`.
    pub(crate) digits: &'a [[[i32; 2]; 16]],
}

/// Sums of a narrow run of `W` bits, `R` rows at once.
#[inline(always)]
pub(crate) fn narrow<S: Simd, const W: usize, const R: usize>(
    s: S,
    args: &mut ValueArgs<'_>,
    weights: &NarrowWeights<'_>,
) {
    if args.codes.tiles == 15 {
        narrow_of::<S, W, R, true>(s, args, weights);
    } else {
        narrow_of::<S, W, R, false>(s, args, weights);
    }
}

/// `FULL`: all four tiles are live, and the loop over them has no branch.
#[inline(always)]
fn narrow_of<S: Simd, const W: usize, const R: usize, const FULL: bool>(
    s: S,
    args: &mut ValueArgs<'_>,
    weights: &NarrowWeights<'_>,
) {
    let (tables, codes) = (unpack::tables::<S, W>(s, weights.tables), args.codes);
    let digits = &weights.digits[..R * 16 * S::SPREAD];
    let starts: &[i32; R] = weights.starts.try_into().expect("a start per row");
    let live = [0, 1, 2, 3].map(|tile| if FULL || codes.has(tile) { codes.tile(tile) } else { &[] });
    let pairs = codes.len / (64 * W);
    for pair in 0..pairs {
        let at = 64 * W * pair;
        for half in 0..S::HALVES {
            prefetch::<S, W>(s, codes, pair, half);
            for odd in 0..2 {
                let mut acc = splat(s, starts);
                for tile in 0..4 {
                    if FULL || codes.has(tile) {
                        let index = unpack::narrow::<S, W>(s, &live[tile][at..at + 64 * W], odd, half);
                        add_tile(s, tables, index, digits, tile, &mut acc);
                    }
                }
                add_sums(s, args, totals(s, acc), 2 * pair + odd, half);
            }
        }
    }
    if !codes.len.is_multiple_of(64 * W) {
        for half in 0..S::HALVES {
            let mut acc = splat(s, starts);
            for tile in 0..4 {
                if FULL || codes.has(tile) {
                    let index = unpack::narrow_lone::<S, W>(s, &live[tile][64 * W * pairs..], half);
                    add_tile(s, tables, index, digits, tile, &mut acc);
                }
            }
            add_sums(s, args, totals(s, acc), 2 * pairs, half);
        }
    }
}

#[inline(always)]
fn totals<S: Simd, const R: usize>(s: S, mut acc: [S::I; R]) -> [S::I; R] {
    for r in 0..R {
        acc[r] = s.narrow_total(acc[r]);
    }
    acc
}

#[inline(always)]
fn add_tile<S: Simd, const R: usize>(
    s: S,
    tables: [S::I; 4],
    index: [S::I; 4],
    digits: &[i32],
    tile: usize,
    acc: &mut [S::I; R],
) {
    for z in 0..4 {
        let levels = s.lookup16(tables[z], index[z]);
        for r in 0..R {
            let at = (16 * r + 4 * tile + z) * S::SPREAD;
            acc[r] = s.narrow_dot(acc[r], levels, s.digit(&digits[at..]));
        }
    }
}

/// Sums of a wide run of `W` bits, `R` rows at once.
#[inline(always)]
pub(crate) fn wide<S: Simd, const W: usize, const R: usize>(
    s: S,
    args: &mut ValueArgs<'_>,
    weights: &WideWeights<'_>,
) {
    let codes = args.codes;
    let digits: &[[[i32; 2]; 16]; R] = weights.digits.try_into().expect("weights of R rows");
    for block in 0..codes.len / (32 * W) {
        let (pair, odd) = (block / 2, block % 2);
        let len = (64 * W).min(codes.len - 64 * W * pair);
        for half in 0..S::HALVES {
            if odd == 0 {
                prefetch::<S, W>(s, codes, pair, half);
            }
            let mut acc = [s.splat_i(0); R];
            for tile in 0..4 {
                if !codes.has(tile) {
                    continue;
                }
                let bytes = &codes.tile(tile)[64 * W * pair..][..len];
                let codes = match (len == 64 * W, odd) {
                    (true, 0) => unpack::wide::<S, W>(s, bytes, 0, half),
                    (true, _) => unpack::wide::<S, W>(s, bytes, 1, half),
                    _ => unpack::wide_lone::<S, W>(s, bytes, half),
                };
                for z in 0..4 {
                    let levels = unpack::wide_levels::<S, W>(s, weights.table, codes[z]);
                    let (even, odd) = (s.even_words(levels), s.odd_words(levels));
                    for r in 0..R {
                        let [low, high] = digits[r][4 * tile + z];
                        acc[r] = s.wide_dot(acc[r], even, s.splat_i(low));
                        acc[r] = s.wide_dot(acc[r], odd, s.splat_i(high));
                    }
                }
            }
            add_sums(s, args, acc, block, half);
        }
    }
}

/// Asks for the part of the next page that stands for pair `pair` of all tiles, half of it at a time.
#[inline(always)]
fn prefetch<S: Simd, const W: usize>(s: S, codes: Codes<'_>, pair: usize, half: usize) {
    let tiles = 4 / S::HALVES;
    for tile in tiles * half..tiles * (half + 1) {
        codes.prefetch(s, tile, 64 * W * pair, 64 * W);
    }
}

/// `sums += total * scale + bias`.
#[inline(always)]
fn add_sums<S: Simd, const R: usize>(
    s: S,
    args: &mut ValueArgs<'_>,
    totals: [S::I; R],
    block: usize,
    half: usize,
) {
    let scales: &[f32; R] = args.scales.try_into().expect("a scale per row");
    for r in 0..R {
        let chunk = &mut args.sums[r * args.row_chunks + block];
        let mut old = s.load_f(chunk, half);
        if let Some(biases) = args.biases {
            old = s.add(old, s.splat_f(biases[r]));
        }
        s.store_f(s.mul_add(s.to_f(totals[r]), s.splat_f(scales[r]), old), chunk, half);
    }
}
