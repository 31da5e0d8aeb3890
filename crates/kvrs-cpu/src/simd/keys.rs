//! Scores of query rows on the packed codes of keys: 16 tokens in lanes, four adjacent channels in a lane.
//!
//! Narrow runs (levels up to 63) take levels with 64 added as unsigned bytes and queries as signed bytes, eight quads
//! of channels to a sum; what the 64 adds is taken off where the sum starts. Wide runs take signed words on both sides.

use super::Simd;
use super::codes::{PageBytes, RunAt, TILES, prefetch};
use super::unpack::{self, Tables};

/// Quads of channels whose products meet in one narrow sum: a pair of blocks.
pub(crate) const SPAN: usize = 8;

/// Some query rows against one run of the pages of a batch.
pub(crate) struct KeyArgs<'a> {
    pub(crate) pages: &'a [PageBytes<'a>],
    pub(crate) run: RunAt,
    /// Value of a digit times that of a level `[row]`.
    pub(crate) scales: &'a [f32],
    /// Added to the scaled sums `[row]`, before the token's scale.
    pub(crate) biases: &'a [f32],
    /// Whether the scores hold nothing yet.
    pub(crate) fresh: bool,
    /// Scores `[row][chunk]`, four chunks a page.
    pub(crate) scores: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
}

/// The tail of a tile: scales, biases and where the scores go.
struct Tail<'a, const R: usize> {
    scales: &'a [f32; R],
    biases: &'a [f32; R],
    fresh: bool,
    /// `[row][page][tile]`.
    scores: [&'a mut [[[f32; 16]; TILES]]; R],
}

impl<'a, const R: usize> Tail<'a, R> {
    #[inline(always)]
    fn new(args: &'a mut KeyArgs<'_>) -> Self {
        let (pages, mut rows) = (args.pages.len(), args.scores.chunks_mut(args.row_chunks));
        let row = |_| &mut rows.next().expect("scores of R rows").as_chunks_mut().0[..pages];
        Self {
            scales: args.scales.try_into().expect("a scale per row"),
            biases: args.biases.try_into().expect("a bias per row"),
            fresh: args.fresh,
            scores: std::array::from_fn(row),
        }
    }

    /// `scores = or += (total * scale + bias) * factor`.
    #[inline(always)]
    fn add<S: Simd>(&mut self, s: S, at: (usize, usize, usize), factor: S::F, totals: [S::I; R]) {
        let (page, tile, half) = at;
        let mut x = [factor; R];
        for r in 0..R {
            let sum = s.mul_add(s.to_f(totals[r]), s.splat_f(self.scales[r]), s.splat_f(self.biases[r]));
            x[r] = s.mul(sum, factor);
        }
        if self.fresh {
            for r in 0..R {
                s.store_f(x[r], &mut self.scores[r][page][tile], half);
            }
        } else {
            for r in 0..R {
                let chunk = &mut self.scores[r][page][tile];
                s.store_f(s.add(s.load_f(chunk, half), x[r]), chunk, half);
            }
        }
    }
}

/// Half `half` of the scales of a tile; ones if there are none.
#[inline(always)]
fn factor<S: Simd>(s: S, scales: Option<&[[u8; 32]; TILES]>, tile: usize, half: usize) -> S::F {
    match scales {
        Some(scales) => s.load_f16(&scales[tile], half),
        None => s.splat_f(1.0),
    }
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
    let (pages, run) = (args.pages, args.run);
    let starts = query.starts.as_chunks::<R>().0;
    let block = 4 * R * S::SPREAD;
    assert!(query.digits.len() * 32 * W == run.len * block && starts.len() == run.len.div_ceil(64 * W));
    let mut tail = Tail::<R>::new(args);
    for (p, page) in pages.iter().enumerate() {
        let scales = run.token_scales(page);
        run.prefetch_scales(s, page);
        for tile in 0..TILES {
            if page.tile(tile) == 0 {
                continue;
            }
            let (bytes, next) = (run.tile(page, tile), run.next_tile(page, tile));
            for half in 0..S::HALVES {
                let mut totals = [s.splat_i(0); R];
                let spans = bytes.chunks_exact(64 * W).zip(query.digits.chunks_exact(2 * block)).zip(starts);
                for (i, ((pair, digits), starts)) in spans.enumerate() {
                    let mut sums = splat(s, starts);
                    for odd in 0..2 {
                        let index = unpack::narrow::<S, W>(s, pair, odd, half);
                        add_block(s, tables, index, &digits[odd * block..][..block], &mut sums);
                    }
                    prefetch::<S, W>(s, next.wrapping_add(64 * W * i), (half, S::HALVES));
                    add_totals(s, &mut totals, sums);
                }
                if !run.len.is_multiple_of(64 * W) {
                    let pairs = run.len / (64 * W);
                    let mut sums = splat(s, &starts[pairs]);
                    let index = unpack::narrow_lone::<S, W>(s, &bytes[64 * W * pairs..], half);
                    add_block(s, tables, index, &query.digits[2 * block * pairs..][..block], &mut sums);
                    add_totals(s, &mut totals, sums);
                }
                tail.add(s, (p, tile, half), factor(s, scales, tile, half), totals);
            }
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
    let (pages, run) = (args.pages, args.run);
    let digits = query.digits.as_chunks::<R>().0.as_chunks::<2>().0;
    assert!(digits.len() * 8 * W == run.len);
    let mut tail = Tail::<R>::new(args);
    for (p, page) in pages.iter().enumerate() {
        let scales = run.token_scales(page);
        run.prefetch_scales(s, page);
        for tile in 0..TILES {
            if page.tile(tile) == 0 {
                continue;
            }
            let (bytes, next) = (run.tile(page, tile), run.next_tile(page, tile));
            for half in 0..S::HALVES {
                let mut totals = [s.splat_i(0); R];
                for (i, pair) in bytes.chunks(64 * W).enumerate() {
                    let blocks = pair.len() / (32 * W);
                    for odd in 0..blocks {
                        let codes = if blocks == 1 {
                            unpack::wide_lone::<S, W>(s, pair, half)
                        } else {
                            unpack::wide::<S, W>(s, pair, odd, half)
                        };
                        add_wide::<S, W, R>(
                            s,
                            query.table,
                            codes,
                            &digits[4 * (2 * i + odd)..][..4],
                            &mut totals,
                        );
                    }
                    prefetch::<S, W>(s, next.wrapping_add(64 * W * i), (half, S::HALVES));
                }
                tail.add(s, (p, tile, half), factor(s, scales, tile, half), totals);
            }
        }
    }
}

#[inline(always)]
fn add_wide<S: Simd, const W: usize, const R: usize>(
    s: S,
    table: &[u8; 64],
    codes: [S::I; 4],
    digits: &[[[i32; R]; 2]],
    totals: &mut [S::I; R],
) {
    for z in 0..4 {
        let levels = unpack::wide_levels::<S, W>(s, table, codes[z]);
        let (even, odd) = (s.even_words(levels), s.odd_words(levels));
        let [low, high] = &digits[z];
        for r in 0..R {
            totals[r] = s.wide_dot(totals[r], even, s.splat_i(low[r]));
            totals[r] = s.wide_dot(totals[r], odd, s.splat_i(high[r]));
        }
    }
}
