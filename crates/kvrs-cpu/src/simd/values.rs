//! Weighted sums of the packed codes of values: 16 channels in lanes, four adjacent tokens in a lane.
//!
//! Narrow runs (levels up to 63) take levels with 64 added as unsigned bytes and weights as signed bytes, all tokens of
//! a page to a sum; what the 64 adds is taken off where the sum starts. Wide runs take signed words on both sides.

use super::Simd;
use super::codes::{PageBytes, RunAt, TILES, prefetch};
use super::keys::splat;
use super::prepare::Prepared;
use super::unpack::{self, Tables};

/// Some rows of weights against one run of the pages of a batch.
pub(crate) struct ValueArgs<'a> {
    pub(crate) pages: &'a [PageBytes<'a>],
    pub(crate) run: RunAt,
    /// What the digits stand for `[page][row]`.
    pub(crate) prepared: &'a [Prepared],
    /// A code's value is `(level + zero) * step`.
    pub(crate) step: f32,
    pub(crate) zero: f32,
    /// Sums `[row][block]`, the run's first block first.
    pub(crate) sums: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
}

/// Prepared weights of narrow runs.
pub(crate) struct NarrowWeights<'a> {
    /// Levels with 64 added.
    pub(crate) tables: &'a Tables,
    /// Bytes of four tokens, none negative `[page][row][quad][Simd::SPREAD]`.
    pub(crate) digits: &'a [i32],
    /// What the sums start at: -64 times the digits `[page][row]`.
    pub(crate) starts: &'a [i32],
}

/// Prepared weights of wide runs.
pub(crate) struct WideWeights<'a> {
    /// Levels by code up to 6 bits; wider runs hold integers.
    pub(crate) table: &'a [u8; 64],
    /// Words of tokens 0 and 2, then 1 and 3, of a quad `[page][row][quad][2]`.
    pub(crate) digits: &'a [[[i32; 2]; 16]],
}

/// Where the sums of a page go.
struct Tail<'a, const R: usize> {
    /// Value of a digit times that of a level.
    scales: [f32; R],
    /// Added to every channel, if that is not zero.
    biases: Option<[f32; R]>,
    /// `[row][block]`.
    sums: [&'a mut [[f32; 16]]; R],
}

impl<'a, const R: usize> Tail<'a, R> {
    /// For page number `page` and runs of `blocks` blocks.
    #[inline(always)]
    fn new(args: &'a mut ValueArgs<'_>, page: usize, blocks: usize) -> Self {
        let mut rows = args.sums.chunks_mut(args.row_chunks);
        let row = |_| &mut rows.next().expect("sums of R rows")[..blocks];
        let sums = std::array::from_fn(row);
        let prepared: &[Prepared; R] = &args.prepared.as_chunks().0[page];
        let (step, zero) = (args.step, args.zero);
        let biases = (zero != 0.0).then(|| prepared.map(|p| p.sum * (zero * step)));
        Self { scales: prepared.map(|p| p.digit * step), biases, sums }
    }

    /// `sums += total * scale + bias`.
    #[inline(always)]
    fn add<S: Simd>(&mut self, s: S, block: usize, half: usize, totals: [S::I; R]) {
        if let Some(biases) = self.biases {
            for r in 0..R {
                let chunk = &mut self.sums[r][block];
                s.store_f(s.add(s.load_f(chunk, half), s.splat_f(biases[r])), chunk, half);
            }
        }
        for r in 0..R {
            let chunk = &mut self.sums[r][block];
            let sum = s.mul_add(s.to_f(totals[r]), s.splat_f(self.scales[r]), s.load_f(chunk, half));
            s.store_f(sum, chunk, half);
        }
    }
}

/// Sums of a narrow run of `W` bits, `R` rows at once.
#[inline(always)]
pub(crate) fn narrow<S: Simd, const W: usize, const R: usize>(
    s: S,
    args: &mut ValueArgs<'_>,
    weights: &NarrowWeights<'_>,
) {
    let tables = unpack::tables::<S, W>(s, weights.tables);
    let digits = weights.digits.chunks_exact(R * 16 * S::SPREAD);
    let weights = digits.zip(weights.starts.as_chunks::<R>().0);
    for (p, (page, weights)) in args.pages.iter().zip(weights).enumerate() {
        args.run.prefetch_scales(s, page);
        if page.whole() {
            narrow_page::<S, W, R, true>(s, args, tables, (p, page), weights);
        } else {
            narrow_page::<S, W, R, false>(s, args, tables, (p, page), weights);
        }
    }
}

/// `WHOLE`: all four tiles are live.
#[inline(always)]
fn narrow_page<S: Simd, const W: usize, const R: usize, const WHOLE: bool>(
    s: S,
    args: &mut ValueArgs<'_>,
    tables: [S::I; 4],
    (p, page): (usize, &PageBytes<'_>),
    (digits, starts): (&[i32], &[i32; R]),
) {
    let run = args.run;
    let (digits, pairs) = (&digits[..16 * R * S::SPREAD], run.len / (64 * W));
    let mut tail = Tail::<R>::new(args, p, run.len / (32 * W));
    let next = [0, 1, 2, 3].map(|tile| run.next_tile(page, tile));
    let live =
        [0, 1, 2, 3].map(|tile| if WHOLE || page.tile(tile) != 0 { run.tile(page, tile) } else { &[] });
    for pair in 0..pairs {
        let at = 64 * W * pair;
        for half in 0..S::HALVES {
            for odd in 0..2 {
                let part = (2 * half + odd, 2 * S::HALVES);
                let mut acc = splat(s, starts);
                // Written out, so that each knows where its weights are.
                macro_rules! add {
                    ($($tile:literal)+) => {$(
                        prefetch::<S, W>(s, next[$tile].wrapping_add(at), part);
                        if WHOLE || page.tile($tile) != 0 {
                            let index = unpack::narrow::<S, W>(s, &live[$tile][at..at + 64 * W], odd, half);
                            add_tile(s, tables, index, digits, $tile, &mut acc);
                        }
                    )+};
                }
                add!(0 1 2 3);
                tail.add(s, 2 * pair + odd, half, totals(s, acc));
            }
        }
    }
    if !run.len.is_multiple_of(64 * W) {
        for half in 0..S::HALVES {
            let mut acc = splat(s, starts);
            for tile in 0..TILES {
                if WHOLE || page.tile(tile) != 0 {
                    let index = unpack::narrow_lone::<S, W>(s, &live[tile][64 * W * pairs..], half);
                    add_tile(s, tables, index, digits, tile, &mut acc);
                }
            }
            tail.add(s, 2 * pairs, half, totals(s, acc));
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
    let run = args.run;
    let weights_of = weights.digits.as_chunks::<R>().0;
    for (p, (page, digits)) in args.pages.iter().zip(weights_of).enumerate() {
        let mut tail = Tail::<R>::new(args, p, run.len / (32 * W));
        run.prefetch_scales(s, page);
        for block in 0..run.len / (32 * W) {
            let (pair, odd) = (block / 2, block % 2);
            let len = (64 * W).min(run.len - 64 * W * pair);
            for half in 0..S::HALVES {
                let mut acc = [s.splat_i(0); R];
                for tile in 0..TILES {
                    let next = run.next_tile(page, tile).wrapping_add(64 * W * pair);
                    prefetch::<S, W>(s, next, (2 * half + odd, 2 * S::HALVES));
                    if page.tile(tile) == 0 {
                        continue;
                    }
                    let bytes = &run.tile(page, tile)[64 * W * pair..][..len];
                    let codes = match (len == 64 * W, odd) {
                        (true, 0) => unpack::wide::<S, W>(s, bytes, 0, half),
                        (true, _) => unpack::wide::<S, W>(s, bytes, 1, half),
                        _ => unpack::wide_lone::<S, W>(s, bytes, half),
                    };
                    add_wide::<S, W, R>(s, weights.table, codes, digits, tile, &mut acc);
                }
                tail.add(s, block, half, acc);
            }
        }
    }
}

#[inline(always)]
fn add_wide<S: Simd, const W: usize, const R: usize>(
    s: S,
    table: &[u8; 64],
    codes: [S::I; 4],
    digits: &[[[i32; 2]; 16]; R],
    tile: usize,
    acc: &mut [S::I; R],
) {
    for z in 0..4 {
        let levels = unpack::wide_levels::<S, W>(s, table, codes[z]);
        let (even, odd) = (s.even_words(levels), s.odd_words(levels));
        for r in 0..R {
            let [low, high] = digits[r][4 * tile + z];
            acc[r] = s.wide_dot(acc[r], even, s.splat_i(low));
            acc[r] = s.wide_dot(acc[r], odd, s.splat_i(high));
        }
    }
}
