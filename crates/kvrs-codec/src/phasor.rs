//! Rotary embeddings (Su et al., 2021, arXiv:2104.09864) from exact 64-bit phases.
//!
//! A frequency is held as the fraction of a turn per position times 2^64, so that phases wrap exactly and the
//! error of an angle does not grow with the position (an f32 angle is off by .006 at position 131k).

use kvrs_core::{Error, Pairing, Result, Rope};

/// `1 / (2 pi)` times 2^128, rounded.
const INVERSE_TWO_PI: u128 = 0x28BE_60DB_9391_054A_7F09_D5F4_7D4D_3770;
/// Radians of one phase unit: f64(2 pi) times 2^-64.
const RADIANS_PER_PHASE: f64 = std::f64::consts::TAU * (1.0 / 18_446_744_073_709_551_616.0);

/// Taylor coefficients of `sin(x) / x` in `x^2`, highest power first.
const SINE: [f64; 7] = [
    1.0 / 6_227_020_800.0,
    -1.0 / 39_916_800.0,
    1.0 / 362_880.0,
    -1.0 / 5040.0,
    1.0 / 120.0,
    -1.0 / 6.0,
    1.0,
];
/// Taylor coefficients of `cos(x)` in `x^2`, highest power first.
const COSINE: [f64; 8] = [
    -1.0 / 87_178_291_200.0,
    1.0 / 479_001_600.0,
    -1.0 / 3_628_800.0,
    1.0 / 40_320.0,
    -1.0 / 720.0,
    1.0 / 24.0,
    -1.0 / 2.0,
    1.0,
];

/// Two channels that turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pair {
    /// First channel.
    pub a: usize,
    /// Second channel; `None` for the last channel of an odd dimension, which never turns.
    pub b: Option<usize>,
    /// Turns per position times 2^64; 0 for channels outside the rotary dimensions.
    pub turn: u64,
}

/// The rotary embedding of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Phasors {
    pairs: Vec<Pair>,
    dim: usize,
    rotary_dim: usize,
    attention_factor: f32,
}

impl Phasors {
    /// The phases of `rope` on keys of `key_dim` channels.
    ///
    /// Channels from the rotary dimension on are neighbours `(2 j, 2 j + 1)` that do not turn.
    ///
    /// # Errors
    /// [`Error::Plan`] if an inverse frequency is outside 0..6 or their number does not fit.
    pub fn new(rope: &Rope, key_dim: usize) -> Result<Self> {
        let rotary_dim = rope.rotary_dim(key_dim);
        if rotary_dim > key_dim || !rotary_dim.is_multiple_of(2) {
            return Err(Error::plan("rope.dim", rotary_dim, format!("an even number up to {key_dim}")));
        }
        let inv_freq = inverse_frequencies(rope, rotary_dim);
        if inv_freq.len() != rotary_dim / 2 {
            return Err(Error::plan("rope.inv_freq", format!("{} numbers", inv_freq.len()), rotary_dim / 2));
        }
        if let Some(bad) = inv_freq.iter().find(|f| !(0.0..6.0).contains(*f)) {
            return Err(Error::plan("rope.inv_freq", bad, "finite numbers in 0..6"));
        }
        let turning = inv_freq.iter().enumerate().map(|(j, &f)| {
            let (a, b) = match rope.pairing {
                Pairing::Half => (j, j + rotary_dim / 2),
                Pairing::Interleaved => (2 * j, 2 * j + 1),
            };
            Pair { a, b: Some(b), turn: phase_step(f) }
        });
        let pairs = turning.chain(still_pairs(rotary_dim, key_dim)).collect();
        Ok(Self { pairs, dim: key_dim, rotary_dim, attention_factor: rope.attention_factor })
    }

    /// Keys of `key_dim` channels that nothing turns.
    #[must_use]
    pub fn still(key_dim: usize) -> Self {
        Self { pairs: still_pairs(0, key_dim).collect(), dim: key_dim, rotary_dim: 0, attention_factor: 1.0 }
    }

    /// The pairs: turning ones in order of their frequency index, then the others. They cover every channel.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// Channels of a key.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes of the phases.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.pairs.as_slice())
    }

    /// Cosine and sine of pair `pair` at `position`, each rounded once to f32.
    ///
    /// # Panics
    /// If there is no such pair.
    #[must_use]
    pub fn cos_sin(&self, position: i64, pair: usize) -> (f32, f32) {
        let (c, s) = self.cos_sin64(position, pair);
        (c as f32, s as f32)
    }

    /// Cosine and sine of pair `pair` at `position`; error below 2e-13 up to position 2^20.
    ///
    /// # Panics
    /// If there is no such pair.
    #[must_use]
    pub fn cos_sin64(&self, position: i64, pair: usize) -> (f64, f64) {
        turned(position, self.pairs[pair].turn)
    }

    /// Turns `x` `[dim]` to `position`; the attention factor is not applied.
    ///
    /// # Panics
    /// If `x` is not `[dim]`.
    pub fn rotate(&self, position: i64, x: &mut [f32]) {
        assert_eq!(x.len(), self.dim, "a vector of the rotary embedding's dimension");
        for (j, pair) in self.pairs.iter().enumerate() {
            if let (Some(b), true) = (pair.b, pair.turn != 0) {
                let (c, s) = self.cos_sin(position, j);
                (x[pair.a], x[b]) = (x[pair.a] * c - x[b] * s, x[b] * c + x[pair.a] * s);
            }
        }
    }

    /// Multiplies the turning channels of `x` `[dim]` with the attention factor.
    pub fn apply_factor(&self, x: &mut [f32]) {
        x[..self.rotary_dim].iter_mut().for_each(|v| *v *= self.attention_factor);
    }
}

/// The given inverse frequencies, or `theta^(-2 j / dim)` by f64 powers rounded to f32.
fn inverse_frequencies(rope: &Rope, rotary_dim: usize) -> Vec<f32> {
    let power = |j: usize| libm::pow(rope.theta, -((2 * j) as f64) / rotary_dim as f64) as f32;
    rope.inv_freq.clone().unwrap_or_else(|| (0..rotary_dim / 2).map(power).collect())
}

fn still_pairs(first: usize, dim: usize) -> impl Iterator<Item = Pair> {
    (first..dim).step_by(2).map(move |a| Pair { a, b: (a + 1 < dim).then_some(a + 1), turn: 0 })
}

/// `round(theta / (2 pi) * 2^64)`, exactly, for an f32 in 0..8.
///
/// `theta = m 2^-e` with `m < 2^24` and `e >= 21`, so the result is `m * INVERSE_TWO_PI >> (64 + e)`, rounded;
/// the low 64 bits of the product lie below the rounding bit and cannot change it.
fn phase_step(theta: f32) -> u64 {
    let bits = theta.to_bits();
    let (exponent, fraction) = (bits >> 23, u128::from(bits & 0x7F_FFFF));
    let (mantissa, shift) =
        if exponent == 0 { (fraction, 149) } else { (fraction | 1 << 23, 150_u32.saturating_sub(exponent)) };
    let low = mantissa * (INVERSE_TWO_PI & u128::from(u64::MAX));
    let high = mantissa * (INVERSE_TWO_PI >> 64) + (low >> 64);
    match shift {
        1..=127 => ((high + (1 << (shift - 1))) >> shift) as u64,
        _ => 0,
    }
}

/// Cosine and sine of `position * turn / 2^64` turns.
pub(crate) fn turned(position: i64, turn: u64) -> (f64, f64) {
    let phase = (position as u64).wrapping_mul(turn);
    let quarter = phase.wrapping_add(1 << 61) >> 62;
    let x = phase.wrapping_sub(quarter << 62) as i64 as f64 * RADIANS_PER_PHASE;
    let square = x * x;
    let (c, s) = (horner(&COSINE, square), horner(&SINE, square) * x);
    match quarter {
        0 => (c, s),
        1 => (-s, c),
        2 => (-c, -s),
        _ => (s, -c),
    }
}

/// Cosines and sines of `positions[lane] * turn / 2^64` turns, rounded to f32 as those of [`Phasors::cos_sin`] are.
///
/// Loops over lanes without branches, which the compiler turns into vectors of the caller's instruction set.
#[inline(always)]
#[expect(clippy::inline_always, reason = "to be compiled for the caller's instruction set")]
pub(crate) fn turned_16(positions: &[i64; 16], turn: u64) -> [[f32; 16]; 2] {
    let (mut quarters, mut angles) = ([0u64; 16], [0.0f64; 16]);
    for lane in 0..16 {
        let phase = (positions[lane] as u64).wrapping_mul(turn);
        quarters[lane] = phase.wrapping_add(1 << 61) >> 62;
        let rest = phase.wrapping_sub(quarters[lane] << 62) as i64;
        // Both parts are exact, so their sum rounds once, as a conversion of 64 bits does.
        let rest = f64::from((rest >> 32) as i32) * 4_294_967_296.0 + f64::from(rest as u32);
        angles[lane] = rest * RADIANS_PER_PHASE;
    }
    let [mut cosines, mut sines] = [[0.0; 16]; 2];
    for lane in 0..16 {
        let (quarter, x) = (quarters[lane], angles[lane]);
        let square = x * x;
        let (c, s) = (horner(&COSINE, square), horner(&SINE, square) * x);
        let (a, b) = if quarter & 1 == 1 { (s, c) } else { (c, s) };
        cosines[lane] = f64::from_bits(a.to_bits() ^ (((quarter + 1) & 2) << 62)) as f32;
        sines[lane] = f64::from_bits(b.to_bits() ^ ((quarter & 2) << 62)) as f32;
    }
    [cosines, sines]
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "part of `turned_16`")]
fn horner<const N: usize>(coefficients: &[f64; N], z: f64) -> f64 {
    let mut p = coefficients[0];
    for c in &coefficients[1..] {
        p = p * z + c;
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_radian_per_position_is_an_exact_share_of_a_turn() {
        // round(2^64 / (2 pi)) is the leading half of the constant, whose next bit is clear.
        assert_eq!(phase_step(1.0), 0x28BE_60DB_9391_054A);
        assert_eq!(phase_step(0.5), 0x145F_306D_C9C8_82A5);
        assert_eq!(phase_step(0.0), 0);
        assert_eq!(phase_step(f32::from_bits(1)), 0);
        assert_eq!(phase_step(2f32.powi(-62)), 1); // .64 of a unit
    }

    #[test]
    fn phasors_agree_with_a_reduced_angle_at_large_positions() {
        for theta in [1.0f32, 0.749_894_2, 1.0e-4, 3.16e-7] {
            let turn = phase_step(theta);
            for position in [0i64, 1, -1, 4095, 131_071, 1_048_575] {
                let angle = f64::from(theta) * position as f64;
                let (c, s) = turned(position, turn);
                // The angle itself is rounded: up to 2^20 * 2^-53.
                assert!(
                    (c - angle.cos()).abs() < 4e-10 && (s - angle.sin()).abs() < 4e-10,
                    "{theta} {position}"
                );
                assert!((c * c + s * s - 1.0).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn sixteen_positions_at_once_are_those_one_by_one_bit_for_bit() {
        let thetas = [1.0f32, 0.749_894_2, 1.0e-4, 3.16e-7, 5.9, 0.0].map(phase_step);
        let turns = thetas.into_iter().chain([1 << 61, (1 << 61) + 1, (1 << 62) - 1, 1 << 63, u64::MAX, 1]);
        for turn in turns {
            for position in [0i64, -5, 4095, 131_071, 1_048_575, 1 << 39] {
                let [cosines, sines] = turned_16(&std::array::from_fn(|lane| position + lane as i64), turn);
                for lane in 0..16 {
                    let (c, s) = turned(position + lane as i64, turn);
                    let expected = [c as f32, s as f32].map(f32::to_bits);
                    assert_eq!(
                        [cosines[lane], sines[lane]].map(f32::to_bits),
                        expected,
                        "{turn:x} {position}"
                    );
                }
            }
        }
    }

    #[test]
    fn turning_forth_and_back_gives_the_vector() {
        let rope = Rope { dim: Some(6), pairing: Pairing::Interleaved, ..Rope::new(1e4) };
        let phasors = Phasors::new(&rope, 9).unwrap();
        let x: Vec<f32> = (0..9).map(|i| i as f32 - 4.0).collect();
        let mut y = x.clone();
        phasors.rotate(77, &mut y);
        assert!(y[..6].iter().zip(&x).all(|(a, b)| a != b), "every rotary channel turns");
        assert_eq!(y[6..], x[6..]);
        phasors.rotate(-77, &mut y);
        assert!(y.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn pairs_cover_every_channel_once() {
        for (dim, rotary, pairing) in
            [(8, 8, Pairing::Half), (9, 4, Pairing::Interleaved), (7, 6, Pairing::Half)]
        {
            let rope = Rope { dim: Some(rotary), pairing, ..Rope::new(1e4) };
            let phasors = Phasors::new(&rope, dim).unwrap();
            let mut seen: Vec<usize> =
                phasors.pairs().iter().flat_map(|p| std::iter::once(p.a).chain(p.b)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..dim).collect::<Vec<_>>());
        }
    }

    #[test]
    fn frequencies_outside_the_range_are_refused() {
        for bad in [f32::NAN, -1.0, 6.0] {
            let rope = Rope { inv_freq: Some(vec![bad; 4]), ..Rope::new(1e4) };
            assert!(Phasors::new(&rope, 8).unwrap_err().to_string().contains("rope.inv_freq"));
        }
    }
}
