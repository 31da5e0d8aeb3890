//! A quantiser's measured distortion as `D(b) = alpha * beta^-b`.
//!
//! `RateQuant` (2026, arXiv:2605.06675) fits two numbers per quantiser and allocates with them.

use super::{Curve, MOST_BITS};
use crate::{Error, Result};

/// Distortion of one channel of unit variance at `b` bits, `alpha * beta^-b`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateModel {
    /// Distortion that the line has at 0 bits.
    pub alpha: f64,
    /// By how much one bit divides the distortion; 4 at high rates.
    pub beta: f64,
}

impl RateModel {
    /// The least-squares line through the logarithms of measured distortions.
    ///
    /// # Errors
    /// [`Error::Shape`] if there are not as many distortions as bits; [`Error::Argument`] if there are fewer than two
    /// different numbers of bits, a number is not finite, a distortion is not above 0, or more bits are not better.
    pub fn fit(bits: &[f64], distortion: &[f64]) -> Result<Self> {
        if bits.len() != distortion.len() {
            let (got, allowed) = (format!("[{}]", distortion.len()), format!("[{}], as bits", bits.len()));
            return Err(Error::shape("distortion", got, allowed));
        }
        check(bits, distortion)?;
        let mean = |numbers: &mut dyn Iterator<Item = f64>| numbers.sum::<f64>() / bits.len() as f64;
        let (b, y) = (mean(&mut bits.iter().copied()), mean(&mut distortion.iter().map(|d| d.ln())));
        let spread = mean(&mut bits.iter().map(|x| (x - b) * (x - b)));
        let common = mean(&mut bits.iter().zip(distortion).map(|(x, d)| (x - b) * (d.ln() - y)));
        if spread == 0.0 {
            return Err(Error::argument("bits", format!("{bits:?}"), "two or more different numbers"));
        }
        let slope = common / spread;
        if slope >= 0.0 {
            return Err(Error::argument(
                "distortion",
                "not falling with bits",
                "less distortion for more bits",
            ));
        }
        Ok(Self { alpha: (y - slope * b).exp(), beta: (-slope).exp() })
    }

    /// Distortion at `bits`; a channel without bits is dropped and costs its variance, and no code is worse.
    #[must_use]
    pub fn at(self, bits: u8) -> f64 {
        if bits == 0 { 1.0 } else { (self.alpha * self.beta.powi(-i32::from(bits))).min(1.0) }
    }

    /// The model as a curve for the allocations.
    ///
    /// # Errors
    /// [`Error::Argument`] if `alpha` or `beta` is not a finite number above 0, or `beta` below 1.
    pub fn curve(self) -> Result<Curve> {
        for (what, value, least) in [("alpha", self.alpha, 0.0), ("beta", self.beta, 1.0)] {
            if !value.is_finite() || value <= least {
                return Err(Error::argument(what, value, format!("a finite number above {least}")));
            }
        }
        Curve::new(&(0..=MOST_BITS).map(|bits| self.at(bits)).collect::<Vec<_>>())
    }
}

fn check(bits: &[f64], distortion: &[f64]) -> Result<()> {
    if bits.len() < 2 {
        return Err(Error::argument("bits", format!("{bits:?}"), "two or more different numbers"));
    }
    if let Some(i) = bits.iter().position(|b| !b.is_finite()) {
        return Err(Error::argument(format!("bits[{i}]"), bits[i], "a finite number"));
    }
    if let Some(i) = distortion.iter().position(|d| !d.is_finite() || *d <= 0.0) {
        return Err(Error::argument(format!("distortion[{i}]"), distortion[i], "a finite number above 0"));
    }
    Ok(())
}
