//! Rotations of vectors into stored channels: three rounds of signs and Walsh-Hadamard, or a dense matrix.
//!
//! `B` is the orthonormal synthesis `[d, n]`. Encoding takes `B^T x` times a factor, bit for bit the same on
//! every backend; queries and outputs take `B^T q` and `B acc` in f32, in any order of summation.

use std::sync::Arc;

/// Rounds of signs and Walsh-Hadamard: one leaves one-hot inputs far from gaussian (mean squared error .0033
/// at 4 bits where three give .0096 and gaussian inputs .0093).
pub const ROUNDS: usize = 3;

/// Largest dimension of a transform.
const MAX_DIM: usize = crate::desc::MAX_CHANNELS;

/// How a vector becomes stored channels.
#[derive(Debug, Clone, PartialEq)]
pub enum Transform {
    /// The channels themselves.
    Identity {
        /// Channels.
        d: usize,
    },
    /// Three rounds of signs and Walsh-Hadamard (`d` a power of two from 16 on).
    Hadamard {
        /// Signs `[3][d]`, 1 or -1.
        signs: Arc<[f32]>,
        /// Channels.
        d: usize,
    },
    /// A matrix with orthonormal rows, or of random ones for a sketch, followed by zero rows up to `n`.
    Dense {
        /// Analysis matrix `[n][d]`.
        matrix: Arc<[f32]>,
        /// Channels.
        d: usize,
        /// Stored channels, a multiple of 16.
        n: usize,
    },
    /// Two matrices out of data: what is stored and how much each stored channel adds need not be transposes.
    Pair {
        /// Analysis matrix `[n][d]`.
        analysis: Arc<[f32]>,
        /// Transpose of the synthesis `[n][d]`: what one unit of each stored channel adds to a vector.
        synthesis: Arc<[f32]>,
        /// Channels.
        d: usize,
        /// Stored channels, a multiple of 16.
        n: usize,
    },
}

impl Transform {
    /// Channels of a vector.
    #[must_use]
    pub fn d(&self) -> usize {
        match self {
            Self::Identity { d }
            | Self::Hadamard { d, .. }
            | Self::Dense { d, .. }
            | Self::Pair { d, .. } => *d,
        }
    }

    /// Stored channels, a multiple of 16.
    #[must_use]
    pub fn n(&self) -> usize {
        match self {
            Self::Dense { n, .. } | Self::Pair { n, .. } => *n,
            _ => self.d().next_multiple_of(16),
        }
    }

    /// Stored channels that carry something; those behind them are padding, whose code is 0.
    #[must_use]
    pub fn live(&self) -> usize {
        match self {
            Self::Pair { n, .. } => *n,
            _ => self.n().min(self.d()),
        }
    }

    /// Bytes of the constants.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Identity { .. } => 0,
            Self::Hadamard { signs: constants, .. } | Self::Dense { matrix: constants, .. } => {
                size_of_val(&**constants)
            }
            Self::Pair { analysis, synthesis, .. } => size_of_val(&**analysis) + size_of_val(&**synthesis),
        }
    }

    /// Analyses `x` `[d]` into `y` `[n]` up to [`Self::unit_factor`], in the exact order of operations that
    /// encoding demands; padding becomes zero.
    ///
    /// # Panics
    /// If `x` is not `[d]` or `y` not `[n]`.
    pub fn analyse(&self, x: &[f32], y: &mut [f32]) {
        assert!(x.len() == self.d() && y.len() == self.n(), "vectors of the transform's dimensions");
        match self {
            Self::Identity { d } => {
                y[..*d].copy_from_slice(x);
                y[*d..].fill(0.0);
            }
            Self::Hadamard { signs, d } => {
                y.copy_from_slice(x);
                hadamard(signs, *d, y);
            }
            Self::Dense { matrix, d, .. } | Self::Pair { analysis: matrix, d, .. } => {
                dense_in_order(matrix, *d, x, y);
            }
        }
    }

    /// What turns [`Self::analyse`] of a unit vector into channels of unit variance.
    #[must_use]
    pub fn unit_factor(&self) -> f32 {
        match self {
            Self::Hadamard { d, .. } => kappa(*d),
            _ => (self.d() as f64).sqrt() as f32,
        }
    }

    /// What makes three rounds of signs and Walsh-Hadamard of `d` channels orthonormal.
    #[must_use]
    pub fn orthonormal_factor(d: usize) -> f32 {
        kappa(d) / (d as f32).sqrt()
    }

    /// Factor after each of the first rounds of signs and Walsh-Hadamard of `d` channels: `2^-floor(log2 d / 2)`, exact.
    #[must_use]
    pub fn between_rounds(d: usize) -> f32 {
        between_rounds(d)
    }

    /// Prepares a query: `z = B^T q`, `[n]`.
    ///
    /// # Panics
    /// If `q` is not `[d]` or `z` not `[n]`.
    pub fn prepare(&self, q: &[f32], z: &mut [f32]) {
        match self {
            Self::Identity { .. } => self.analyse(q, z),
            Self::Hadamard { d, .. } => {
                self.analyse(q, z);
                let factor = Self::orthonormal_factor(*d);
                for v in z {
                    *v *= factor;
                }
            }
            Self::Dense { matrix, d, n } | Self::Pair { synthesis: matrix, d, n, .. } => {
                assert!(q.len() == *d && z.len() == *n, "vectors of the transform's dimensions");
                z.iter_mut().zip(matrix.chunks_exact(*d)).for_each(|(z, row)| *z = dot(row, q));
            }
        }
    }

    /// Adds the synthesis of stored channels: `out += B acc`.
    ///
    /// # Panics
    /// If `acc` is not `[n]` or `out` not `[d]`.
    pub fn finish(&self, acc: &[f32], out: &mut [f32]) {
        assert!(acc.len() == self.n() && out.len() == self.d(), "vectors of the transform's dimensions");
        match self {
            Self::Identity { .. } => out.iter_mut().zip(acc).for_each(|(o, a)| *o += a),
            Self::Hadamard { signs, d } => {
                let mut buffer = [0.0; MAX_DIM];
                let x = &mut buffer[..*d];
                x.copy_from_slice(acc);
                hadamard_transposed(signs, *d, x);
                let factor = Self::orthonormal_factor(*d);
                out.iter_mut().zip(x).for_each(|(o, x)| *o += *x * factor);
            }
            Self::Dense { matrix, d, .. } | Self::Pair { synthesis: matrix, d, .. } => {
                for (row, &a) in matrix.chunks_exact(*d).zip(acc) {
                    out.iter_mut().zip(row).for_each(|(o, m)| *o += m * a);
                }
            }
        }
    }
}

fn between_rounds(d: usize) -> f32 {
    1.0 / (1u32 << (d.ilog2() / 2)) as f32
}

/// 1 where log2 d is even, 1/2 where it is odd: three rounds then have unit variance.
fn kappa(d: usize) -> f32 {
    if d.ilog2().is_multiple_of(2) { 1.0 } else { 0.5 }
}

fn hadamard(signs: &[f32], d: usize, x: &mut [f32]) {
    let between = between_rounds(d);
    for (r, signs) in signs.chunks_exact(d).enumerate() {
        x.iter_mut().zip(signs).for_each(|(x, s)| *x *= s);
        walsh_hadamard(x);
        if r + 1 < ROUNDS {
            for x in &mut *x {
                *x *= between;
            }
        }
    }
}

fn hadamard_transposed(signs: &[f32], d: usize, x: &mut [f32]) {
    let between = between_rounds(d);
    for (r, signs) in signs.chunks_exact(d).enumerate().rev() {
        walsh_hadamard(x);
        let factor = if r > 0 { between } else { 1.0 };
        x.iter_mut().zip(signs).for_each(|(x, s)| *x *= s * factor);
    }
}

/// Unnormalised Walsh-Hadamard transform, stages h = 1, 2, 4 .. d/2; the first two in one pass.
fn walsh_hadamard(x: &mut [f32]) {
    for quad in x.as_chunks_mut::<4>().0 {
        let [a, b, c, d] = *quad;
        let [a, b, c, d] = [a + b, a - b, c + d, c - d];
        *quad = [a + c, b + d, a - c, b - d];
    }
    let mut h = 4;
    while h < x.len() {
        for pair in x.chunks_exact_mut(2 * h) {
            let (a, b) = pair.split_at_mut(h);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        h *= 2;
    }
}

/// `y = matrix x`; each sum starts at +0 and takes channels ascending. Sixteen sums go side by side.
fn dense_in_order(matrix: &[f32], d: usize, x: &[f32], y: &mut [f32]) {
    for (rows, y) in matrix.chunks_exact(16 * d).zip(y.as_chunks_mut::<16>().0) {
        let mut acc = [0.0; 16];
        for (c, &x) in x.iter().enumerate() {
            acc.iter_mut().enumerate().for_each(|(r, acc)| *acc += rows[r * d + c] * x);
        }
        *y = acc;
    }
}

/// Dot product in 16 partial sums, which are then added in pairs: large terms meet in few roundings.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut acc = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        (0..16).for_each(|i| acc[i] += a[i] * b[i]);
    }
    acc.iter_mut().zip(a_rest.iter().zip(b_rest)).for_each(|(acc, (a, b))| *acc += a * b);
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|i| acc[i] += acc[i + half]);
    }
    acc[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    fn transforms() -> Vec<Transform> {
        let padded = |d: usize, n: usize| {
            let mut matrix = rng::dense_rotation(4, d);
            matrix.resize(n * d, 0.0);
            Transform::Dense { matrix: matrix.into(), d, n }
        };
        let hadamard = |d: usize| Transform::Hadamard { signs: rng::signs(9, ROUNDS, d).into(), d };
        vec![
            Transform::Identity { d: 72 },
            padded(80, 80),
            padded(72, 80),
            hadamard(16),
            hadamard(32),
            hadamard(128),
        ]
    }

    fn vector(key: u64, n: usize) -> Vec<f32> {
        rng::gaussian(key, n).iter().map(|&x| x as f32).collect()
    }

    fn norm(x: &[f32]) -> f64 {
        x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt()
    }

    #[test]
    fn finishing_a_prepared_vector_gives_it_back() {
        for t in transforms() {
            let x = vector(1, t.d());
            let (mut z, mut out) = (vec![9.0; t.n()], vec![1.0; t.d()]);
            t.prepare(&x, &mut z);
            t.finish(&z, &mut out);
            assert!(z[t.live()..].iter().all(|&p| p == 0.0));
            assert!((norm(&x) - norm(&z)).abs() < 1e-5, "{} channels keep the length", t.d());
            assert!(out.iter().zip(&x).all(|(o, x)| (o - 1.0 - x).abs() < 1e-5), "{} channels", t.d());
        }
    }

    #[test]
    fn analysis_of_a_unit_vector_has_unit_variance() {
        for t in transforms() {
            let mut x = vector(2, t.d());
            let length = norm(&x) as f32;
            for v in &mut x {
                *v /= length;
            }
            let mut y = vec![9.0; t.n()];
            t.analyse(&x, &mut y);
            let variance = (norm(&y) * f64::from(t.unit_factor())).powi(2) / t.d() as f64;
            assert!((variance - 1.0).abs() < 1e-5, "{} channels: {variance}", t.d());
        }
    }

    #[test]
    fn queries_and_encoding_use_the_same_rotation() {
        for t in transforms() {
            let x = vector(3, t.d());
            let (mut y, mut z) = (vec![0.0; t.n()], vec![0.0; t.n()]);
            t.analyse(&x, &mut y);
            t.prepare(&x, &mut z);
            let factor = t.unit_factor() / (t.d() as f32).sqrt();
            assert!(y.iter().zip(&z).all(|(y, z)| (y * factor - z).abs() < 1e-5), "{} channels", t.d());
        }
    }
}
