//! Loops over 16 lanes that the compiler vectorises on any x86-64.

use crate::kernels::Kernels;
use crate::simd::lanes::LaneArgs;

/// 16 tokens (keys) or 16 channels (values).
pub(crate) type Lanes = [f32; 16];

/// `acc[q][lane] += sum over i of weights[q][i] * rows[i][lane]`.
#[inline]
fn accumulate<const Q: usize>(weights: [&[f32]; Q], rows: &[Lanes], acc: &mut [Lanes; Q]) {
    let weights = weights.map(|w| &w[..rows.len()]);
    let mut sums = *acc;
    for (i, row) in rows.iter().enumerate() {
        for (sum, w) in sums.iter_mut().zip(weights) {
            let w = w[i];
            sum.iter_mut().zip(row).for_each(|(s, x)| *s += w * x);
        }
    }
    *acc = sums;
}

/// Adds `sum over i of weights[q][i] * rows[i]` to the 16 floats at `to[q * to_stride + at]`, for every row q of
/// weights that starts at `q * stride + from`.
pub(crate) fn add_sums(
    kernels: Option<Kernels>,
    weights: &[f32],
    (stride, from): (usize, usize),
    lanes: &[Lanes],
    to: &mut [f32],
    (to_stride, at): (usize, usize),
) {
    let rows = weights.len() / stride;
    match kernels {
        None => scalar_sums(weights, (stride, from), lanes, to, (to_stride, at)),
        Some(kernels) if rows > 0 => {
            let (weights, to) = (&weights[from..], &mut to[at..]);
            kernels.lane_sums(&mut LaneArgs { weights, stride, lanes, to, to_stride, rows });
        }
        Some(_) => {}
    }
}

fn scalar_sums(
    weights: &[f32],
    (stride, from): (usize, usize),
    rows: &[Lanes],
    to: &mut [f32],
    (to_stride, at): (usize, usize),
) {
    let count = weights.len() / stride;
    let row = |q: usize| &weights[q * stride + from..][..rows.len()];
    let lanes = |q: usize| q * to_stride + at..q * to_stride + at + 16;
    let load = |to: &[f32], q: usize| -> Lanes { *to[lanes(q)].first_chunk().expect("16 lanes") };
    let mut q = 0;
    while q + 2 <= count {
        let mut acc = [load(to, q), load(to, q + 1)];
        accumulate([row(q), row(q + 1)], rows, &mut acc);
        to[lanes(q)].copy_from_slice(&acc[0]);
        to[lanes(q + 1)].copy_from_slice(&acc[1]);
        q += 2;
    }
    if q < count {
        let mut acc = [load(to, q)];
        accumulate([row(q)], rows, &mut acc);
        to[lanes(q)].copy_from_slice(&acc[0]);
    }
}

/// The largest element; -inf for none.
pub(crate) fn max(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(m, &v)| *m = if v > *m { v } else { *m });
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &v| m.max(v))
}

/// Replaces each x by `exp(x - shift)` and returns their sum; -inf becomes 0. No x may be above the shift.
pub(crate) fn exp_sum(x: &mut [f32], shift: f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks_mut::<16>();
    for chunk in chunks {
        for (sum, v) in lanes.iter_mut().zip(chunk) {
            *v = exp(*v - shift);
            *sum += *v;
        }
    }
    let mut sum = lanes.iter().sum::<f32>();
    for v in rest {
        *v = exp(*v - shift);
        sum += *v;
    }
    sum
}

/// `exp(x)` for x <= 0 within 2 units in the last place, 0 below -87; without branches, so that it vectorises.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `exp(r)` by Taylor to r^7 (remainder 5e-9), `2^n` by its exponent.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const LN2_HIGH: f32 = 0.693_359_4; // 9 bits, so that n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    // The low bits of `shifted` are n; 2^n has the exponent n + 127, which is 1 or more.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x > -87.0 { p * power } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in 0..200_000 {
            let x = -(i as f32) * (86.99 / 200_000.0);
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}): relative error {error:e}");
        }
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY), exp(-1e30)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn sums_equal_the_plain_loop() {
        let rows: Vec<Lanes> = (0..7).map(|i| std::array::from_fn(|l| (i * 16 + l) as f32)).collect();
        for count in 0..6 {
            let weights: Vec<f32> = (0..count * 9).map(|i| (i % 5) as f32 - 2.0).collect();
            let mut got = vec![1.0; count * 40];
            scalar_sums(&weights, (9, 2), &rows, &mut got, (40, 3));
            for (q, l) in (0..count).flat_map(|q| (0..40).map(move |l| (q, l))) {
                let sum: f32 = (0..7).map(|i| weights[q * 9 + 2 + i] * (i * 16 + l.max(3) - 3) as f32).sum();
                let expected = if (3..19).contains(&l) { 1.0 + sum } else { 1.0 };
                assert_eq!(got[q * 40 + l].to_bits(), expected.to_bits());
            }
        }
    }
}
