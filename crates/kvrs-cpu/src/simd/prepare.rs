//! Queries and softmax weights as integer digits, one scale per run and row.
//!
//! The scale follows from the data: the largest digit fits its type, and what meets in a lane of the sums fits there
//! for every code that a page could hold. Rounding adds at most 1/2 per digit, which the limits leave room for.

use super::Simd;
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

/// The weights of up to [`ROWS`] rows on the slots of a page.
pub(crate) struct WeightArgs<'a> {
    /// Softmax weights `[row][chunk]`, the page's first chunk first.
    pub(crate) weights: &'a [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
    /// Per-token scales `[tile]` as f16.
    pub(crate) token_scales: Option<&'a [[u8; 32]]>,
    /// Slots with a weight, per tile of the page: whatever the scales of the others hold does not matter.
    pub(crate) live: &'a [u16],
}

/// Weights of a page times token scales.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Scaled<F> {
    chunks: [[f32; 16]; 4],
    /// Lane-wise.
    largest: F,
    sums: F,
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
        let [low, high] = s.reduce_pairs(sums);
        meeting = meeting.max(low).max(high);
    }
    let most = if S::NARROW_LIMIT == i32::MAX { f32::INFINITY } else { (S::NARROW_LIMIT - 8) as f32 };
    let factor = (127.0 / s.reduce_max(largest).max(TINY)).min(most / meeting.max(TINY));
    let factor_lanes = s.splat_f(factor);
    for (i, span) in z.chunks(SPAN / 4).enumerate() {
        let mut sums = s.splat_f(0.0);
        for (c, chunk) in span.iter().enumerate() {
            let (mut bytes, mut rounded) = ([0; 16], [sums; 2]);
            for half in 0..S::HALVES {
                rounded[half] = s.round(s.mul(s.load_f(chunk, half), factor_lanes));
                sums = s.add(sums, rounded[half]);
            }
            s.store_chunk(rounded, &mut bytes);
            for (q, four) in bytes.as_chunks::<4>().0.iter().enumerate() {
                let at = ((SPAN * i + 4 * c + q) * rows + row) * S::SPREAD;
                digits[at..at + S::SPREAD].fill(i32::from_le_bytes(*four));
            }
        }
        let [low, high] = s.reduce_pairs(sums);
        starts[i * rows + row] = s.narrow_start(-64 * low as i32, -64 * high as i32);
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
    let factor = (32767.0 / s.reduce_max(largest).max(TINY)).min(most);
    for (quad, four) in z.as_flattened().as_chunks::<4>().0.iter().enumerate() {
        let [low, high] = word_pairs(four, factor);
        digits[2 * quad * rows + row] = low;
        digits[(2 * quad + 1) * rows + row] = high;
    }
    Prepared { digit: 1.0 / factor, sum: s.reduce_add(sum) }
}

/// Elements 0 and 2, then 1 and 3, as words of an i32.
#[inline(always)]
fn word_pairs(four: &[f32; 4], factor: f32) -> [i32; 2] {
    let digit = [
        (four[0] * factor).round_ties_even() as i32,
        (four[1] * factor).round_ties_even() as i32,
        (four[2] * factor).round_ties_even() as i32,
        (four[3] * factor).round_ties_even() as i32,
    ];
    [(digit[0] & 0xffff) | (digit[2] << 16), (digit[1] & 0xffff) | (digit[3] << 16)]
}

/// Bytes of weights times token scales `[row][quad][Simd::SPREAD]`, for each of `prepared.len()` rows.
///
/// A digit's value is what keeps the sum of the weights: equal weights all round the same way.
#[inline(always)]
pub(crate) fn narrow_weights<S: Simd>(
    s: S,
    args: &WeightArgs<'_>,
    digits: &mut [i32],
    starts: &mut [i32],
    prepared: &mut [Prepared],
) {
    let scaled = scale(s, args, prepared.len());
    let most = if S::NARROW_LIMIT == i32::MAX { f32::INFINITY } else { (S::NARROW_LIMIT - 16) as f32 };
    for (scaled, prepared) in scaled.iter().zip(&mut *prepared) {
        let [low, high] = s.reduce_pairs(scaled.sums);
        // The reciprocal of the factor is a maximum: one division less.
        let digit =
            (s.reduce_max(scaled.largest) * (1.0 / 127.0)).max(low.max(high) * (1.0 / most)).max(TINY);
        *prepared = Prepared { digit, sum: low + high };
    }
    for (row, (scaled, digits)) in scaled.iter().zip(digits.chunks_exact_mut(16 * S::SPREAD)).enumerate() {
        let factor = s.splat_f(1.0 / prepared[row].digit);
        let mut sums = s.splat_f(0.0);
        for (chunk, digits) in scaled.chunks.iter().zip(digits.chunks_exact_mut(4 * S::SPREAD)) {
            let (mut bytes, mut rounded) = ([0; 16], [sums; 2]);
            for half in 0..S::HALVES {
                rounded[half] = s.round(s.mul(s.load_f(chunk, half), factor));
                sums = s.add(sums, rounded[half]);
            }
            s.store_chunk(rounded, &mut bytes);
            for (spread, four) in digits.chunks_exact_mut(S::SPREAD).zip(bytes.as_chunks::<4>().0) {
                spread.fill(i32::from_le_bytes(*four));
            }
        }
        let [low, high] = s.reduce_pairs(sums);
        starts[row] = s.narrow_start(-64 * low as i32, -64 * high as i32);
        if low + high > 0.0 {
            prepared[row].digit = prepared[row].sum / (low + high);
        }
    }
}

/// Words of weights times token scales, for each of `digits.len()` rows.
#[inline(always)]
pub(crate) fn wide_weights<S: Simd>(
    s: S,
    args: &WeightArgs<'_>,
    digits: &mut [[[i32; 2]; 16]],
    prepared: &mut [Prepared],
) {
    let scaled = scale(s, args, digits.len());
    for ((scaled, digits), prepared) in scaled.iter().zip(digits).zip(prepared) {
        let factor = 32767.0 / s.reduce_max(scaled.largest).max(TINY);
        *prepared = Prepared { digit: 1.0 / factor, sum: s.reduce_add(scaled.sums) };
        for (digits, four) in digits.iter_mut().zip(scaled.chunks.as_flattened().as_chunks::<4>().0) {
            *digits = word_pairs(four, factor);
        }
    }
}

/// Weights of `rows` rows times scales, zero where no slot is live.
#[inline(always)]
fn scale<S: Simd>(s: S, args: &WeightArgs<'_>, rows: usize) -> [Scaled<S::F>; ROWS] {
    let zero = s.splat_f(0.0);
    let mut scaled = [Scaled { chunks: [[0.0; 16]; 4], largest: zero, sums: zero }; ROWS];
    for tile in 0..args.live.len() {
        for half in 0..S::HALVES {
            let factors = match args.token_scales {
                Some(tiles) => s.load_f16(&tiles[tile], half),
                None => s.splat_f(1.0),
            };
            for row in 0..rows {
                let (x, to) = (s.load_f(&args.weights[row * args.row_chunks + tile], half), &mut scaled[row]);
                let mut x = s.mul(x, factors);
                if args.live[tile] != u16::MAX {
                    x = s.select(args.live[tile], half, x, zero);
                }
                to.largest = s.max(to.largest, x);
                to.sums = s.add(to.sums, x);
                s.store_f(x, &mut to.chunks[tile], half);
            }
        }
    }
    scaled
}
