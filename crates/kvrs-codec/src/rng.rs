//! Random numbers that every backend draws alike: `SplitMix64` (Steele et al., 2014) in counter form.
//!
//! Streams are keyed by a plan's seed, a purpose, the side and the dimension, and shared by layers and heads.

use crate::desc::Side;

/// Purpose word of the signs of the randomized Hadamard rotation.
pub const ROTATION_SIGNS: u64 = 1;
/// Purpose word of the reflections of the dense rotation.
pub const DENSE_ROTATION: u64 = 2;
/// Purpose word of a gaussian sketch matrix, with 256 times its rows added.
pub const SKETCH: u64 = 3;
/// Purpose word of the reflections of an orthogonal sketch matrix.
pub const ORTHOGONAL_SKETCH: u64 = 4;

/// Mean of the sum of twelve uniform u16.
const GAUSSIAN_MEAN: i64 = 393_210;

/// Word `i` of the stream `key`.
#[must_use]
pub fn word(key: u64, i: u64) -> u64 {
    let mut z = key.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Key of the stream of (purpose, side, d) under a plan's seed.
#[must_use]
pub fn stream(seed: u64, purpose: u64, side: Side, d: usize) -> u64 {
    [purpose, side as u64, d as u64].iter().fold(word(seed, 0), |key, w| word(key ^ w, 0))
}

/// Signs `[rounds][d]`, 1 or -1: bit `r * d + c` of the stream, least significant first; a set bit is minus.
#[must_use]
pub fn signs(key: u64, rounds: usize, d: usize) -> Vec<f32> {
    let bit = |i: usize| word(key, i as u64 / 64) >> (i % 64) & 1;
    (0..rounds * d).map(|i| if bit(i) == 1 { -1.0 } else { 1.0 }).collect()
}

/// The first `n` near-gaussian numbers of a stream: number g is the sum of the twelve u16 of words
/// `3 g .. 3 g + 3`, less its mean, over 65536; exact in f64.
#[must_use]
pub fn gaussian(key: u64, n: usize) -> Vec<f64> {
    let quarters = |w: u64| (0..4).map(|i| (w >> (16 * i) & 0xFFFF) as i64).sum::<i64>();
    let sum = |g: u64| (3 * g..3 * g + 3).map(|i| quarters(word(key, i))).sum::<i64>();
    (0..n as u64).map(|g| (sum(g) - GAUSSIAN_MEAN) as f64 / 65536.0).collect()
}

/// The dense rotation `[n][n]` f32, whose rows are the analysis matrix: `H_0 H_1 .. H_(n-2)` of Householder
/// reflections in f64 (Stewart, 1980, doi:10.1137/0717034), rounded once.
///
/// Reflection r sends a gaussian vector of length `n - r` to a multiple of its first axis and acts on
/// coordinates `r .. n`; the vectors are read from one stream, r ascending.
#[must_use]
pub fn dense_rotation(key: u64, n: usize) -> Vec<f32> {
    let draws = gaussian(key, (n * (n + 1) / 2).saturating_sub(1));
    let mut a = vec![0.0; n * n];
    (0..n).for_each(|i| a[i * n + i] = 1.0);
    let mut end = draws.len();
    for r in (0..n.saturating_sub(1)).rev() {
        let start = end - (n - r);
        reflect(&mut a, n, r, draws[start..end].to_vec());
        end = start;
    }
    a.iter().map(|&x| x as f32).collect()
}

/// Applies `I - 2 w w' / (w' w)` to rows and columns `r..` of `a` (the columns before are still zero there),
/// where `w` is the drawn vector with its length added to the first element, away from zero.
///
/// One f64 operation per element and statement, sums ascending from +0: the bits are part of the format.
fn reflect(a: &mut [f64], n: usize, r: usize, mut w: Vec<f64>) {
    let square = sum_of_squares(&w);
    if square == 0.0 {
        return;
    }
    let length = square.sqrt();
    w[0] = if w[0] >= 0.0 { w[0] + length } else { w[0] - length };
    let beta = 2.0 / sum_of_squares(&w);
    let mut dots = vec![0.0; n - r];
    for (row, &x) in a[r * n..].chunks_exact(n).zip(&w) {
        dots.iter_mut().zip(&row[r..]).for_each(|(dot, y)| *dot += x * y);
    }
    for dot in &mut dots {
        *dot *= beta;
    }
    for (row, &x) in a[r * n..].chunks_exact_mut(n).zip(&w) {
        row[r..].iter_mut().zip(&dots).for_each(|(y, dot)| *y -= x * dot);
    }
}

fn sum_of_squares(w: &[f64]) -> f64 {
    w.iter().fold(0.0, |sum, x| sum + x * x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_the_published_generator() {
        // First outputs of the reference implementation for the seed 1234567.
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([0, 1, 2].map(|i| word(1_234_567, i)), expected);
    }

    #[test]
    fn streams_of_sides_and_dimensions_differ() {
        let key = |side, d| stream(7, ROTATION_SIGNS, side, d);
        assert_ne!(key(Side::Key, 64), key(Side::Value, 64));
        assert_ne!(key(Side::Key, 64), key(Side::Key, 128));
    }

    #[test]
    fn gaussians_have_the_moments_of_the_normal_distribution() {
        let x = gaussian(3, 100_000);
        let moment = |p: i32| x.iter().map(|v| v.powi(p)).sum::<f64>() / x.len() as f64;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02, "{} {}", moment(1), moment(2));
        assert!((moment(4) - 2.9).abs() < 0.1, "{}", moment(4)); // 3 - 1.2 / 12 for twelve summands
    }

    #[test]
    fn dense_rotations_are_orthogonal_in_any_dimension() {
        for n in [1, 2, 3, 80, 96] {
            let a = dense_rotation(5, n);
            for i in 0..n {
                for j in 0..=i {
                    let dot: f64 = (0..n).map(|c| f64::from(a[i * n + c]) * f64::from(a[j * n + c])).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-6, "rows {i}, {j} of {n}: {dot}");
                }
            }
        }
    }
}
