//! The online softmax of a block of rows over a batch of scores, in f32.
//!
//! Rows go through each step together: the horizontal maxima and sums of one hide behind those of the others.

use super::Simd;
use crate::kernels::ROWS;
use crate::softmax::Logits;
use core::f32::consts::LOG2_E;

/// Up to [`ROWS`] rows of scores and which of them count.
pub(crate) struct SoftmaxArgs<'a> {
    /// Scores `[row][chunk]` on entry, weights relative to the new maximum on return.
    pub(crate) scores: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
    /// Bits of the slots of each chunk, per row: as many chunks are read. Scores of the other slots do not matter,
    /// their weights become 0.
    pub(crate) masks: [&'a [u16]; ROWS],
    pub(crate) logits: Logits,
    /// Largest logit so far, then with these, times log2 e `[row]`.
    pub(crate) max: &'a mut [f32],
    /// Sum of weights so far, then with these, relative to the new maximum `[row]`.
    pub(crate) sum: &'a mut [f32],
    /// Weighted sums so far, then relative to the new maximum `[row][chunk]`.
    pub(crate) acc: &'a mut [[f32; 16]],
}

/// Turns scores into weights, and what was summed over earlier weights to their new scale.
#[inline(always)]
pub(crate) fn step<S: Simd>(s: S, args: SoftmaxArgs<'_>) {
    let SoftmaxArgs { scores, row_chunks, masks, logits, max, sum, acc } = args;
    let (rows, acc_chunks, chunks) = (max.len(), acc.len() / max.len(), masks[0].len());
    assert!(rows <= ROWS && sum.len() == rows && scores.len() >= (rows - 1) * row_chunks + chunks);
    // Scores become powers of two; a factor that is not positive would turn the largest into the smallest.
    let ready = logits.softcap.is_none() && logits.scale > 0.0;
    let factor = if ready { logits.scale * LOG2_E } else { LOG2_E };
    let whole = whole(masks, rows);
    let mut largest = [s.splat_f(f32::NEG_INFINITY); ROWS];
    for row in 0..rows {
        let scores = &mut scores[row * row_chunks..][..chunks];
        if !ready {
            apply(s, scores, logits);
        }
        largest[row] = if whole[row] {
            largest_of::<S, true>(s, scores, masks[row])
        } else {
            largest_of::<S, false>(s, scores, masks[row])
        };
    }
    let largest = s.reduce_max4(largest);
    for row in 0..rows {
        let new = largest[row] * factor;
        if new > max[row] {
            let factor = (max[row] - new).exp2();
            max[row] = new;
            sum[row] *= factor;
            multiply(s, &mut acc[row * acc_chunks..][..acc_chunks], factor);
        }
    }
    let mut totals = [s.splat_f(0.0); ROWS];
    for row in 0..rows {
        let scores = &mut scores[row * row_chunks..][..chunks];
        totals[row] = if whole[row] {
            weigh::<S, true>(s, scores, masks[row], factor, max[row])
        } else {
            weigh::<S, false>(s, scores, masks[row], factor, max[row])
        };
    }
    let totals = s.reduce_add4(totals);
    for row in 0..rows {
        sum[row] += totals[row];
    }
}

/// Replaces scores by logits.
#[inline(always)]
pub(crate) fn apply<S: Simd>(s: S, scores: &mut [[f32; 16]], logits: Logits) {
    for chunk in scores {
        for half in 0..S::HALVES {
            let mut x = s.mul(s.load_f(chunk, half), s.splat_f(logits.scale));
            if let Some(cap) = logits.softcap {
                x = s.mul(s.splat_f(cap), tanh(s, s.div(x, s.splat_f(cap))));
            }
            s.store_f(x, chunk, half);
        }
    }
}

/// Whether all slots count, per row; rows of one query share their masks.
#[inline(always)]
fn whole(masks: [&[u16]; ROWS], rows: usize) -> [bool; ROWS] {
    let mut whole = [false; ROWS];
    for row in 0..rows {
        let shared = row > 0 && core::ptr::eq(masks[row], masks[row - 1]);
        let count = || masks[row].iter().fold(u16::MAX, |all, mask| all & mask) == u16::MAX;
        whole[row] = if shared { whole[row - 1] } else { count() };
    }
    whole
}

/// The largest score that counts, per lane; `WHOLE`: all do.
#[inline(always)]
fn largest_of<S: Simd, const WHOLE: bool>(s: S, scores: &[[f32; 16]], masks: &[u16]) -> S::F {
    let mut largest = s.splat_f(f32::NEG_INFINITY);
    for (chunk, &mask) in scores.iter().zip(masks) {
        for half in 0..S::HALVES {
            let mut x = s.load_f(chunk, half);
            if !WHOLE && mask != u16::MAX {
                x = s.select(mask, half, x, s.splat_f(f32::NEG_INFINITY));
            }
            largest = s.max(largest, x);
        }
    }
    largest
}

/// Replaces scores by the weights `2^(score * factor - max)` and returns their sums per lane.
#[inline(always)]
fn weigh<S: Simd, const WHOLE: bool>(
    s: S,
    scores: &mut [[f32; 16]],
    masks: &[u16],
    factor: f32,
    max: f32,
) -> S::F {
    let mut total = s.splat_f(0.0);
    // A row that has seen nothing yet has the maximum -inf, and -inf from it would be NaN.
    let (factor, shift) = (s.splat_f(factor), s.splat_f(if max == f32::NEG_INFINITY { 0.0 } else { -max }));
    for (chunk, &mask) in scores.iter_mut().zip(masks) {
        for half in 0..S::HALVES {
            let mut weight = exp2(s, s.mul_add(s.load_f(chunk, half), factor, shift));
            if !WHOLE && mask != u16::MAX {
                weight = s.select(mask, half, weight, s.splat_f(0.0));
            }
            total = s.add(total, weight);
            s.store_f(weight, chunk, half);
        }
    }
    total
}

#[inline(always)]
fn multiply<S: Simd>(s: S, x: &mut [[f32; 16]], factor: f32) {
    for chunk in x {
        for half in 0..S::HALVES {
            s.store_f(s.mul(s.load_f(chunk, half), s.splat_f(factor)), chunk, half);
        }
    }
}

/// `2^x` within 3e-7 relative for x <= 0, at least 2^-126.
///
/// `x = n + f` with `|f| <= 1/2`; `2^f` by the polynomial of degree 5 that is exact at 0 and closest elsewhere (7e-8).
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::F) -> S::F {
    const COEFFICIENTS: [f32; 5] = [9.674_952e-3, 5.551_047_3e-2, 2.402_216_6e-1, 6.931_466e-1, 1.0];
    let x = s.max(x, s.splat_f(-126.0));
    let n = s.round(x);
    let f = s.sub(x, n);
    let mut p = s.splat_f(1.320_298_2e-3);
    for c in COEFFICIENTS {
        p = s.mul_add(p, f, s.splat_f(c));
    }
    s.scale_by_power(p, n)
}

/// The hyperbolic tangent within 3e-7: `(1 - e) / (1 + e)` with `e = exp(-2 |x|)`, and the sign of x.
#[inline(always)]
fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat_f(1.0);
    let e = exp2(s, s.mul(s.abs(x), s.splat_f(-2.0 * LOG2_E)));
    let positive = s.div(s.sub(one, e), s.add(one, e));
    // x times a huge number, clamped to 1: the sign of x.
    let sign = s.max(s.min(s.mul(x, s.splat_f(1e38)), one), s.splat_f(-1.0));
    s.mul(positive, sign)
}
