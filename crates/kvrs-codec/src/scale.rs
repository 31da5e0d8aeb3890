//! Exact sums, norms and the scale of a vector's codes.

use half::f16;
use serde::{Deserialize, Serialize};

/// Squared length below which a vector counts as zero: 2^-100.
const TINY: f32 = 1.0 / (1u128 << 100) as f32;
/// Largest f16.
const F16_MAX: f32 = 65504.0;

/// How the scale of a vector follows from its length `n`, its channels `u` of unit variance, and the values `v`
/// of their codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRule {
    /// `n / sqrt d`: the codes' own scale.
    Raw,
    /// `n / |v|`: decoded vectors have the right length.
    Norm,
    /// `n / sqrt d * (u.v) / (v.v)`: least squares.
    Lsq,
    /// `n sqrt d / (u.v)`: unbiased inner products (EDEN, Vargaftik et al., 2022, arXiv:2108.08842).
    Unbiased,
    /// Root mean square of the stored channels, for transform coding.
    Rms,
}

/// A length and its reciprocal, both zero for the zero vector.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Length, or root mean square.
    pub length: f32,
    /// `1 / length`, or 0.
    pub inverse: f32,
}

/// The sum of `values` in 16 partial sums (channel c into c mod 16, ascending), then halved by 8, 4, 2, 1.
#[must_use]
pub fn red16(values: &[f32]) -> f32 {
    sum16(values, |x| x)
}

/// [`red16`] of the products `a * b`, each rounded before it is added.
///
/// # Panics
/// If the lengths differ.
#[must_use]
pub fn red16_products(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of one length");
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut p = [0.0; 16];
    for (a, b) in a.iter().zip(b) {
        (0..16).for_each(|i| p[i] += a[i] * b[i]);
    }
    a_rest.iter().zip(b_rest).zip(&mut p).for_each(|((a, b), p)| *p += a * b);
    halve(p)
}

fn sum16(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut p = [0.0; 16];
    for chunk in chunks {
        (0..16).for_each(|i| p[i] += term(chunk[i]));
    }
    rest.iter().zip(&mut p).for_each(|(x, p)| *p += term(*x));
    halve(p)
}

fn halve(mut p: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|i| p[i] += p[i + half]);
    }
    p[0]
}

/// Length of `x`; zero if the squared length is below 2^-100.
///
/// A squared length that is not finite (channels beyond 1e18, which only bf16 can hold) gives zero too: callers
/// refuse such vectors before they are stored ([`has_length`]).
#[must_use]
pub fn norm(x: &[f32]) -> Norm {
    let square = sum16(x, |v| v * v);
    Norm::of_square(square, square)
}

/// Whether `x` is finite and its squared length is, so that it can be encoded.
#[must_use]
pub fn has_length(x: &[f32]) -> bool {
    sum16(x, |v| v * v).is_finite()
}

/// Root mean square of the live channels `y`.
#[must_use]
pub fn rms(y: &[f32]) -> Norm {
    let square = sum16(y, |v| v * v);
    Norm::of_square(square, square * (1.0 / y.len() as f32))
}

impl Norm {
    /// The root of `mean`, zero if the squared length is below 2^-100 or not finite.
    #[inline]
    #[must_use]
    pub fn of_square(square: f32, mean: f32) -> Self {
        if !(square >= TINY && square.is_finite()) {
            return Self { length: 0.0, inverse: 0.0 };
        }
        let length = mean.sqrt();
        Self { length, inverse: 1.0 / length }
    }
}

impl ScaleRule {
    /// Every rule, in the order of its name's mention.
    pub const ALL: [Self; 5] = [Self::Raw, Self::Norm, Self::Lsq, Self::Unbiased, Self::Rms];

    /// The name used in plans.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Norm => "norm",
            Self::Lsq => "lsq",
            Self::Unbiased => "unbiased",
            Self::Rms => "rms",
        }
    }

    /// The scale of `v`, not yet rounded to f16; `length` is that of [`norm`] (or of [`rms`] for
    /// [`ScaleRule::Rms`]), `d` the channels of the vector, `u` and `v` its live stored channels.
    #[must_use]
    pub fn scale(self, length: f32, d: usize, u: &[f32], v: &[f32]) -> f32 {
        self.of_sums(length, d, || red16_products(u, v), || red16_products(v, v))
    }

    /// As [`Self::scale`], from the sums `u.v` and `v.v`, of which only those are taken that the rule needs.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::inline_always, reason = "kernels call it for every lane")]
    pub fn of_sums(self, length: f32, d: usize, along: impl Fn() -> f32, square: impl Fn() -> f32) -> f32 {
        if length == 0.0 {
            return 0.0;
        }
        let root = (d as f64).sqrt();
        let inverse_root = (1.0 / root) as f32;
        let by_norm = || length / square().sqrt();
        match self {
            Self::Raw => length * inverse_root,
            Self::Norm => by_norm(),
            Self::Lsq => (length * inverse_root) * (along() / square()),
            Self::Unbiased => {
                let along = along();
                if along > 0.0 { (length * root as f32) / along } else { by_norm() }
            }
            Self::Rms => length,
        }
    }
}

/// `scale` >= 0 as f16, nearest even, saturated at 65504.
#[must_use]
pub fn to_f16(scale: f32) -> f16 {
    f16::from_f32(scale.min(F16_MAX))
}

/// `x` of either sign as f16, nearest even, saturated at 65504; a zero is positive.
#[must_use]
pub fn signed_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(-F16_MAX, F16_MAX) + 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_follow_the_written_order() {
        let x: Vec<f32> =
            (0..88).map(|i| 1e7 / (i as f32 + 0.3) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let mut p = [0f32; 16];
        x.iter().enumerate().for_each(|(c, v)| p[c % 16] += v);
        let q: Vec<f32> = (0..8).map(|i| p[i] + p[i + 8]).collect();
        let r: Vec<f32> = (0..4).map(|i| q[i] + q[i + 4]).collect();
        let expected = (r[0] + r[2]) + (r[1] + r[3]);
        assert_eq!(red16(&x).to_bits(), expected.to_bits());
        assert_eq!(red16_products(&x, &[1.0; 88]).to_bits(), expected.to_bits());
    }

    #[test]
    fn tiny_and_endless_vectors_count_as_zero() {
        let zero = Norm { length: 0.0, inverse: 0.0 };
        assert_eq!(norm(&[0.0; 16]), zero);
        assert_eq!(norm(&[2f32.powi(-51); 1]), zero);
        assert_eq!(norm(&[2f32.powi(-50); 1]), Norm { length: 2f32.powi(-50), inverse: 2f32.powi(50) });
        assert_eq!(norm(&[1e30; 4]), zero);
        assert!(!has_length(&[1e30; 4]) && !has_length(&[f32::NAN]) && has_length(&[65504.0; 1024]));
    }

    #[test]
    fn scales_saturate_and_round_to_even() {
        assert_eq!(to_f16(f32::INFINITY).to_f32(), 65504.0);
        assert_eq!(to_f16(1.0 + 2f32.powi(-11)).to_f32(), 1.0);
        assert_eq!(to_f16(1.0 + 3.0 * 2f32.powi(-11)).to_f32(), 1.0 + 2f32.powi(-9));
        assert_eq!((signed_f16(-1e9).to_f32(), signed_f16(-0.0).to_bits()), (-65504.0, 0));
    }

    #[test]
    fn rules_agree_where_codes_are_exact() {
        let u = [1.0f32; 64];
        for rule in [ScaleRule::Raw, ScaleRule::Norm, ScaleRule::Lsq, ScaleRule::Unbiased] {
            assert_eq!(rule.scale(16.0, 64, &u, &u), 2.0, "{rule:?}");
        }
        let opposite = [-1.0f32; 64];
        assert_eq!(ScaleRule::Unbiased.scale(16.0, 64, &u, &opposite), 2.0, "falls back to norm");
    }
}
