//! Products of a matrix with one vector: what folds a dense transform into a query and out of an output.

use super::Simd;

/// A matrix of rows of whole chunks, against one vector.
pub(crate) struct MatrixArgs<'a> {
    /// `[rows][chunks]`.
    pub(crate) matrix: &'a [[f32; 16]],
    /// One number per row.
    pub(crate) by_row: &'a mut [f32],
    /// `[chunks]`.
    pub(crate) by_channel: &'a mut [[f32; 16]],
}

/// `by_row[i] = sum over c of matrix[i][c] * by_channel[c]`.
#[inline(always)]
pub(crate) fn rows_dot<S: Simd>(s: S, args: &mut MatrixArgs<'_>) {
    let x = &*args.by_channel;
    for (rows, out) in args.matrix.chunks_exact(4 * x.len()).zip(args.by_row.as_chunks_mut::<4>().0) {
        let mut sums = [s.splat_f(0.0); 4];
        for c in 0..x.len() {
            for half in 0..S::HALVES {
                let v = s.load_f(&x[c], half);
                for i in 0..4 {
                    sums[i] = s.mul_add(s.load_f(&rows[i * x.len() + c], half), v, sums[i]);
                }
            }
        }
        *out = s.reduce_add4(sums);
    }
}

/// `by_channel[c] += sum over i of by_row[i] * matrix[i][c]`.
#[inline(always)]
pub(crate) fn rows_sum<S: Simd>(s: S, args: &mut MatrixArgs<'_>) {
    let chunks = args.by_channel.len();
    let mut first = 0;
    while first < chunks {
        if chunks - first >= 4 {
            columns::<S, 4>(s, args, first);
            first += 4;
        } else {
            columns::<S, 1>(s, args, first);
            first += 1;
        }
    }
}

#[inline(always)]
fn columns<S: Simd, const N: usize>(s: S, args: &mut MatrixArgs<'_>, first: usize) {
    let mut sums = [[s.splat_f(0.0); 2]; N];
    for (row, weight) in args.matrix.chunks_exact(args.by_channel.len()).zip(&*args.by_row) {
        let (weight, row) = (s.splat_f(*weight), &row[first..first + N]);
        for j in 0..N {
            for half in 0..S::HALVES {
                sums[j][half] = s.mul_add(s.load_f(&row[j], half), weight, sums[j][half]);
            }
        }
    }
    for j in 0..N {
        let out = &mut args.by_channel[first + j];
        for half in 0..S::HALVES {
            s.store_f(s.add(s.load_f(out, half), sums[j][half]), out, half);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::model::Model;

    /// Some numbers in -1..1.
    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        kvrs_codec::rng::gaussian(seed, n).iter().map(|x| (*x as f32 / 4.0).clamp(-1.0, 1.0)).collect()
    }

    fn check<const LANES: usize>(rows: usize, chunks: usize) {
        let matrix = numbers(rows * chunks * 16, 1);
        let (weights, channels) = (numbers(rows, 2), numbers(chunks * 16, 3));
        let (mut products, mut sums) = (vec![9.0; rows], channels.clone());
        let (mut w, mut x) = (weights.clone(), channels.clone());
        let matrix_chunks = matrix.as_chunks().0;
        let args =
            &mut MatrixArgs { matrix: matrix_chunks, by_row: &mut products, by_channel: x.as_chunks_mut().0 };
        rows_dot(Model::<LANES>, args);
        let args =
            &mut MatrixArgs { matrix: matrix_chunks, by_row: &mut w, by_channel: sums.as_chunks_mut().0 };
        rows_sum(Model::<LANES>, args);
        let row = |i: usize| &matrix[i * chunks * 16..][..chunks * 16];
        for (i, got) in products.iter().enumerate() {
            let want: f32 = row(i).iter().zip(&channels).map(|(m, x)| m * x).sum();
            assert!((got - want).abs() < 1e-4, "row {i} of {rows}: {got}, not {want}");
        }
        for (c, got) in sums.iter().enumerate() {
            let want = channels[c] + (0..rows).map(|i| weights[i] * row(i)[c]).sum::<f32>();
            assert!((got - want).abs() < 1e-4, "channel {c}: {got}, not {want}");
        }
    }

    #[test]
    fn products_are_those_of_the_matrix() {
        for (rows, chunks) in [(16, 1), (32, 2), (48, 5), (128, 8)] {
            check::<8>(rows, chunks);
            check::<16>(rows, chunks);
        }
    }
}
