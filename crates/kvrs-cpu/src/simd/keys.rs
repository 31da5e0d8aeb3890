//! Scores of query rows on the packed codes of keys: 16 tokens in lanes, four adjacent channels in a lane.
//!
//! Narrow runs (levels up to 63) take levels with 64 added as unsigned bytes and queries as signed bytes, eight quads
//! of channels to a sum; what the 64 adds is taken off where the sum starts. Wide runs take signed words on both sides.

use super::Simd;
use super::codes::Codes;
use super::unpack::{self, Tables};

/// Quads of channels whose products meet in one narrow sum: a pair of blocks.
pub(crate) const SPAN: usize = 8;

/// Some query rows against one run of one page.
pub(crate) struct KeyArgs<'a> {
    pub(crate) codes: Codes<'a>,
    /// Per-token scales `[tile]` as f16.
    pub(crate) token_scales: Option<&'a [[u8; 32]]>,
    /// Value of a digit times that of a level `[row]`.
    pub(crate) scales: &'a [f32],
    /// Added to the scaled sums `[row]`, before the token's scale; `None`: nothing.
    pub(crate) biases: Option<&'a [f32]>,
    /// Scores `[row][chunk]`, the page's first chunk first.
    pub(crate) scores: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
}

/// Prepared digits of narrow runs.
pub(crate) struct NarrowDigits<'a> {
    /// Levels with 64 added.
    pub(crate) tables: &'a Tables,
    /// Signed bytes of four channels `[quad][row][Simd::SPREAD]`.
    pub(crate) digits: &'a [i32],
    /// What the sums over a span start at: -64 times its digits `[span][row]`.
    pub(crate) starts: &'a [i32],
}

/// Prepared digits of wide runs.
pub(crate) struct WideDigits<'a> {
    /// Levels by code up to 6 bits; wider runs hold integers.
    pub(crate) table: &'a [u8; 64],
    /// Words of channels 0 and 2, then 1 and 3, of a quad `[quad][2][row]`.
    pub(crate) digits: &'a [i32],
}

/// Scores of a narrow run of `W` bits, `R` rows at once.
#[inline(always)]
pub(crate) fn narrow<S: Simd, const W: usize, const R: usize>(
    s: S,
    args: &mut KeyArgs<'_>,
    query: &NarrowDigits<'_>,
) {
    let tables = unpack::tables::<S, W>(s, query.tables);
    let codes = args.codes;
    let (digits, starts) = (query.digits, query.starts.as_chunks::<R>().0);
    let (pairs, block) = (codes.len / (64 * W), 4 * R * S::SPREAD);
    assert!(digits.len() * 32 * W == codes.len * block && starts.len() * 2 >= codes.len / (32 * W));
    for tile in 0..4 {
        if !codes.has(tile) {
            continue;
        }
        let bytes = codes.tile(tile);
        for half in 0..S::HALVES {
            let mut totals = [s.splat_i(0); R];
            for (p, (pair, digits)) in
                bytes.chunks_exact(64 * W).zip(digits.chunks_exact(2 * block)).enumerate()
            {
                let mut sums = splat(s, &starts[p]);
                for odd in 0..2 {
                    let index = unpack::narrow::<S, W>(s, pair, odd, half);
                    add_block(s, tables, index, &digits[odd * block..][..block], &mut sums);
                }
                if half == 0 {
                    codes.prefetch(s, tile, 64 * W * p, 64 * W);
                }
                add_totals(s, &mut totals, sums);
            }
            if !codes.len.is_multiple_of(64 * W) {
                let mut sums = splat(s, &starts[pairs]);
                let index = unpack::narrow_lone::<S, W>(s, &bytes[64 * W * pairs..], half);
                add_block(s, tables, index, &digits[2 * block * pairs..][..block], &mut sums);
                add_totals(s, &mut totals, sums);
            }
            add_scores(s, args, tile, half, totals);
        }
    }
}

/// Each of `x` in every lane. A closure (`array::map`) would not be inlined into the function with the features.
#[inline(always)]
pub(super) fn splat<S: Simd, const R: usize>(s: S, x: &[i32; R]) -> [S::I; R] {
    let mut lanes = [s.splat_i(0); R];
    for r in 0..R {
        lanes[r] = s.splat_i(x[r]);
    }
    lanes
}

#[inline(always)]
fn add_block<S: Simd, const R: usize>(
    s: S,
    tables: [S::I; 4],
    index: [S::I; 4],
    digits: &[i32],
    sums: &mut [S::I; R],
) {
    for z in 0..4 {
        let levels = s.lookup16(tables[z], index[z]);
        for r in 0..R {
            sums[r] = s.narrow_dot(sums[r], levels, s.digit(&digits[(z * R + r) * S::SPREAD..]));
        }
    }
}

#[inline(always)]
fn add_totals<S: Simd, const R: usize>(s: S, totals: &mut [S::I; R], sums: [S::I; R]) {
    for r in 0..R {
        totals[r] = s.add_i(totals[r], s.narrow_total(sums[r]));
    }
}

/// Scores of a wide run of `W` bits, `R` rows at once.
#[inline(always)]
pub(crate) fn wide<S: Simd, const W: usize, const R: usize>(
    s: S,
    args: &mut KeyArgs<'_>,
    query: &WideDigits<'_>,
) {
    let codes = args.codes;
    let digits = query.digits.as_chunks::<R>().0.as_chunks::<2>().0;
    assert!(digits.len() * 8 * W == codes.len);
    for tile in 0..4 {
        if !codes.has(tile) {
            continue;
        }
        let bytes = codes.tile(tile);
        for half in 0..S::HALVES {
            let mut totals = [s.splat_i(0); R];
            for (p, pair) in bytes.chunks(64 * W).enumerate() {
                let lone = pair.len() != 64 * W;
                for odd in 0..if lone { 1 } else { 2 } {
                    let block = 2 * p + odd;
                    let codes = if lone {
                        unpack::wide_lone::<S, W>(s, pair, half)
                    } else {
                        unpack::wide::<S, W>(s, pair, odd, half)
                    };
                    for z in 0..4 {
                        let levels = unpack::wide_levels::<S, W>(s, query.table, codes[z]);
                        let (even, odd) = (s.even_words(levels), s.odd_words(levels));
                        let [low, high] = &digits[4 * block + z];
                        for r in 0..R {
                            totals[r] = s.wide_dot(totals[r], even, s.splat_i(low[r]));
                            totals[r] = s.wide_dot(totals[r], odd, s.splat_i(high[r]));
                        }
                    }
                }
                if half == 0 {
                    codes.prefetch(s, tile, 64 * W * p, 64 * W);
                }
            }
            add_scores(s, args, tile, half, totals);
        }
    }
}

/// `scores += (total * scale + bias) * token_scale`.
#[inline(always)]
fn add_scores<S: Simd, const R: usize>(
    s: S,
    args: &mut KeyArgs<'_>,
    tile: usize,
    half: usize,
    totals: [S::I; R],
) {
    let scales: &[f32; R] = args.scales.try_into().expect("a scale per row");
    for r in 0..R {
        let mut x = s.mul(s.to_f(totals[r]), s.splat_f(scales[r]));
        if let Some(biases) = args.biases {
            x = s.add(x, s.splat_f(biases[r]));
        }
        let chunk = &mut args.scores[r * args.row_chunks + tile];
        let old = s.load_f(chunk, half);
        let new = match args.token_scales {
            Some(scales) => s.mul_add(x, s.load_f16(&scales[tile], half), old),
            None => s.add(x, old),
        };
        s.store_f(new, chunk, half);
    }
}
