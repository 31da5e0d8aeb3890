//! Queries and softmax weights as integer digits, one scale per run and row.
//!
//! The scale follows from the data: the largest digit fits its type, and what meets in a lane of the sums fits there
//! for every code that a page could hold. Rounding adds at most 1/2 per digit, which the limits leave room for.

use super::Simd;
use super::codes::{PageBytes, RunAt, TILES};
use super::keys::SPAN;
use crate::kernels::ROWS;

/// Below this a vector counts as this large: its reciprocal stays finite.
const TINY: f32 = 1e-30;
/// Largest sum of |digit| of a wide query: times 128 it stays below 2^31.
const WIDE_LIMIT: f32 = 16e6;

/// What a row of digits stands for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Prepared {
    /// Value of a digit.
    pub(crate) digit: f32,
    /// Sum of the exact elements.
    pub(crate) sum: f32,
}

/// A row of a run's prepared query that becomes row `row` of `rows`.
pub(crate) struct QueryArgs<'a> {
    /// Elements `[chunk]`.
    pub(crate) z: &'a [[f32; 16]],
    pub(crate) row: usize,
    pub(crate) rows: usize,
    /// `[quad][rows][Simd::SPREAD]` narrow, `[quad][2][rows]` wide.
    pub(crate) digits: &'a mut [i32],
    /// `[span][rows]`, narrow only.
    pub(crate) starts: &'a mut [i32],
}

/// The weights of up to [`ROWS`] rows on the slots of the pages of a batch.
pub(crate) struct WeightArgs<'a> {
    pub(crate) pages: &'a [PageBytes<'a>],
    /// A run that has the token scales.
    pub(crate) run: RunAt,
    /// Softmax weights `[row][chunk]`, four chunks a page, 0 where a row sees nothing.
    pub(crate) weights: &'a [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
}

impl WeightArgs<'_> {
    /// The weights of a row on page number `page`.
    #[inline(always)]
    fn row(&self, row: usize, page: usize) -> &[[f32; 16]; TILES] {
        self.weights[row * self.row_chunks + TILES * page..].first_chunk().expect("weights of a page")
    }
}

/// Signed bytes of a query.
#[inline(always)]
pub(crate) fn narrow_query<S: Simd>(s: S, args: QueryArgs<'_>) -> Prepared {
    let QueryArgs { z, row, rows, digits, starts } = args;
    let (mut largest, mut sum, mut meeting) = (s.splat_f(0.0), s.splat_f(0.0), 0.0f32);
    for span in z.chunks(SPAN / 4) {
        let mut sums = s.splat_f(0.0);
        for chunk in span {
            for half in 0..S::HALVES {
                let x = s.load_f(chunk, half);
                largest = s.max(largest, s.abs(x));
                sums = s.add(sums, s.abs(x));
                sum = s.add(sum, x);
            }
        }
        let [[low, high], _] = s.reduce_pairs([sums; 2]);
        meeting = meeting.max(low).max(high);
    }
    let most = if S::NARROW_LIMIT == i32::MAX { f32::INFINITY } else { (S::NARROW_LIMIT - 8) as f32 };
    let factor = (127.0 / s.reduce_max4([largest; 4])[0].max(TINY)).min(most / meeting.max(TINY));
    let factor_lanes = s.splat_f(factor);
    for (i, span) in z.chunks(SPAN / 4).enumerate() {
        let mut sums = s.splat_f(0.0);
        for (c, chunk) in span.iter().enumerate() {
            let (mut bytes, mut rounded) = ([0; 16], [sums; 2]);
            for half in 0..S::HALVES {
                rounded[half] = s.round(s.mul(s.load_f(chunk, half), factor_lanes));
                sums = s.add(sums, rounded[half]);
            }
            s.store_digits(rounded, &mut bytes);
            for (q, four) in bytes.as_chunks::<4>().0.iter().enumerate() {
                let at = ((SPAN * i + 4 * c + q) * rows + row) * S::SPREAD;
                digits[at..at + S::SPREAD].fill(i32::from_le_bytes(*four));
            }
        }
        let [[low, high], _] = s.reduce_pairs([sums; 2]);
        starts[i * rows + row] = s.narrow_start(minus_64(low), minus_64(high));
    }
    Prepared { digit: 1.0 / factor, sum: s.reduce_add(sum) }
}

/// Signed words of a query.
#[inline(always)]
pub(crate) fn wide_query<S: Simd>(s: S, args: QueryArgs<'_>) -> Prepared {
    let QueryArgs { z, row, rows, digits, .. } = args;
    let (mut largest, mut sum, mut meeting) = (s.splat_f(0.0), s.splat_f(0.0), s.splat_f(0.0));
    for chunk in z {
        for half in 0..S::HALVES {
            let x = s.load_f(chunk, half);
            largest = s.max(largest, s.abs(x));
            meeting = s.add(meeting, s.abs(x));
            sum = s.add(sum, x);
        }
    }
    let most = WIDE_LIMIT / s.reduce_add(meeting).max(TINY);
    let factor = (32767.0 / s.reduce_max4([largest; 4])[0].max(TINY)).min(most);
    for (c, chunk) in z.iter().enumerate() {
        let mut words = [0.0; 16];
        for half in 0..S::HALVES {
            s.store_f(words_of(s, s.load_f(chunk, half), factor), &mut words, half);
        }
        for (q, four) in words.as_chunks::<4>().0.iter().enumerate() {
            let (quad, [low, high]) = (4 * c + q, word_pairs(four));
            digits[2 * quad * rows + row] = low;
            digits[(2 * quad + 1) * rows + row] = high;
        }
    }
    Prepared { digit: 1.0 / factor, sum: s.reduce_add(sum) }
}

/// `x * factor`, at most 2^15, rounded to integers: they are the low words of the result's bits.
#[inline(always)]
fn words_of<S: Simd>(s: S, x: S::F, factor: f32) -> S::F {
    // From here on a step of f32 is 1.
    const ONES: f32 = 1.5 * (1 << 23) as f32;
    s.mul_add(x, s.splat_f(factor), s.splat_f(ONES))
}

/// The low words of elements 0 and 2, then 1 and 3, in an i32.
#[inline(always)]
fn word_pairs(four: &[f32; 4]) -> [i32; 2] {
    let pair = |low: f32, high: f32| ((low.to_bits() & 0xffff) | (high.to_bits() << 16)).cast_signed();
    [pair(four[0], four[2]), pair(four[1], four[3])]
}

/// Bytes of weights times token scales `[page][row][quad][Simd::SPREAD]`, for `rows` <= [`ROWS`] rows.
///
/// A digit's value is what keeps the sum of the weights: equal weights all round the same way. Rows go through each
/// step together, as in the softmax.
#[inline(always)]
pub(crate) fn narrow_weights<S: Simd>(
    s: S,
    args: &WeightArgs<'_>,
    rows: usize,
    (digits, starts, prepared): (&mut [i32], &mut [i32], &mut [Prepared]),
) {
    let digits = digits.chunks_exact_mut(rows * 16 * S::SPREAD);
    let out = digits.zip(starts.chunks_exact_mut(rows).zip(prepared.chunks_exact_mut(rows)));
    for ((p, page), (digits, (starts, prepared))) in args.pages.iter().enumerate().zip(out) {
        let factors = factors(s, args.run, page);
        let (mut largest, mut sums) = ([s.splat_f(0.0); ROWS], [s.splat_f(0.0); ROWS]);
        for row in 0..rows {
            [largest[row], sums[row]] = measure(s, args.row(row, p), &factors);
        }
        let (sums, values) = (pairs(s, sums), digit_values(s, largest, pairs(s, sums)));
        let (mut bytes, mut kept) = ([[[0; 16]; TILES]; ROWS], [s.splat_f(0.0); ROWS]);
        for row in 0..rows {
            kept[row] = quantise(s, args.row(row, p), &factors, 1.0 / values[row], &mut bytes[row]);
        }
        for (spread, four) in
            digits.chunks_exact_mut(S::SPREAD).zip(bytes.as_flattened().as_flattened().as_chunks().0)
        {
            spread.fill(i32::from_le_bytes(*four));
        }
        let kept = pairs(s, kept);
        for row in 0..rows {
            let ([low, high], sum) = (kept[row], sums[row][0] + sums[row][1]);
            let digit = if low + high > 0.0 { sum / (low + high) } else { values[row] };
            prepared[row] = Prepared { digit, sum };
            starts[row] = s.narrow_start(minus_64(low), minus_64(high));
        }
    }
}

/// The largest weight times scale, and their sum, per lane.
#[inline(always)]
fn measure<S: Simd>(s: S, weights: &[[f32; 16]; TILES], factors: &[[f32; 16]; TILES]) -> [S::F; 2] {
    let (mut largest, mut sums) = (s.splat_f(0.0), s.splat_f(0.0));
    for tile in 0..TILES {
        for half in 0..S::HALVES {
            let x = s.mul(s.load_f(&weights[tile], half), s.load_f(&factors[tile], half));
            largest = s.max(largest, x);
            sums = s.add(sums, x);
        }
    }
    [largest, sums]
}

/// Sums of the lanes of each row that meet in the two halves of a lane of the kernel's sums.
#[inline(always)]
fn pairs<S: Simd>(s: S, [a, b, c, d]: [S::F; ROWS]) -> [[f32; 2]; ROWS] {
    let ([a, b], [c, d]) = (s.reduce_pairs([a, b]), s.reduce_pairs([c, d]));
    [a, b, c, d]
}

/// Values of a digit that keep the digits and their sums within their limits.
#[inline(always)]
fn digit_values<S: Simd>(s: S, largest: [S::F; ROWS], sums: [[f32; 2]; ROWS]) -> [f32; ROWS] {
    let most = if S::NARROW_LIMIT == i32::MAX { f32::INFINITY } else { (S::NARROW_LIMIT - 16) as f32 };
    let mut values = s.reduce_max4(largest);
    for row in 0..ROWS {
        let [low, high] = sums[row];
        let meeting = larger(low, high) * (1.0 / most);
        values[row] = larger(larger(values[row] * (1.0 / 127.0), meeting), TINY);
    }
    values
}

/// What a lane starts from whose digits have this sum. Scales out of a damaged file may be negative or no number; their
/// sums wrap around, as those of the kernel do.
#[inline(always)]
fn minus_64(digits: f32) -> i32 {
    (digits as i32).wrapping_mul(-64)
}

/// The larger of two numbers, without `f32::max`'s care for NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Rounds weights times scale times `factor` to bytes and returns their sums per lane.
#[inline(always)]
fn quantise<S: Simd>(
    s: S,
    weights: &[[f32; 16]; TILES],
    factors: &[[f32; 16]; TILES],
    factor: f32,
    bytes: &mut [[u8; 16]; TILES],
) -> S::F {
    let (factor, mut sums) = (s.splat_f(factor), s.splat_f(0.0));
    for tile in 0..TILES {
        let mut rounded = [sums; 2];
        for half in 0..S::HALVES {
            let x = s.mul(s.load_f(&weights[tile], half), s.load_f(&factors[tile], half));
            rounded[half] = s.round(s.mul(x, factor));
            sums = s.add(sums, rounded[half]);
        }
        s.store_digits(rounded, &mut bytes[tile]);
    }
    sums
}

/// Words of weights times token scales `[page][row]`, for `rows` rows.
#[inline(always)]
pub(crate) fn wide_weights<S: Simd>(
    s: S,
    args: &WeightArgs<'_>,
    rows: usize,
    (digits, prepared): (&mut [[[i32; 2]; 16]], &mut [Prepared]),
) {
    let out = digits.chunks_exact_mut(rows).zip(prepared.chunks_exact_mut(rows));
    for ((p, page), (digits, prepared)) in args.pages.iter().enumerate().zip(out) {
        let factors = factors(s, args.run, page);
        for row in 0..rows {
            let weights = args.row(row, p);
            let [largest, sums] = measure(s, weights, &factors);
            let factor = 32767.0 / s.reduce_max4([largest; 4])[0].max(TINY);
            prepared[row] = Prepared { digit: 1.0 / factor, sum: s.reduce_add(sums) };
            for tile in 0..TILES {
                let mut words = [0.0; 16];
                for half in 0..S::HALVES {
                    let x = s.mul(s.load_f(&weights[tile], half), s.load_f(&factors[tile], half));
                    s.store_f(words_of(s, x, factor), &mut words, half);
                }
                for (quad, four) in words.as_chunks::<4>().0.iter().enumerate() {
                    digits[row][4 * tile + quad] = word_pairs(four);
                }
            }
        }
    }
}

/// The token scales of a page, zero where no slot is live: whatever stands there must not matter.
#[inline(always)]
fn factors<S: Simd>(s: S, run: RunAt, page: &PageBytes<'_>) -> [[f32; 16]; TILES] {
    let (mut factors, scales) = ([[1.0; 16]; TILES], run.token_scales(page));
    for (tile, chunk) in factors.iter_mut().enumerate() {
        for half in 0..S::HALVES {
            let mut x = match scales {
                Some(scales) => s.load_f16(&scales[tile], half),
                None => s.splat_f(1.0),
            };
            if page.tile(tile) != u16::MAX {
                x = s.select(page.tile(tile), half, x, s.splat_f(0.0));
            }
            s.store_f(x, chunk, half);
        }
    }
    factors
}
