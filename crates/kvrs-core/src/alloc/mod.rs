//! How many bits each run of channels gets under one budget.
//!
//! An item is a run of channels of one layer, side and head, with the distortion that it has at 0 bits. All
//! allocations take the same [`Items`] and a budget of code bits per token: [`waterfill()`] is reverse water-filling
//! by bisection, [`greedy()`] follows the marginal gain, [`exact()`] is dynamic programming. [`Curve`] says how
//! distortion falls with bits.

mod dp;
mod greedy;
mod joint;
mod rate;
#[cfg(test)]
mod tests;
mod waterfill;

pub use dp::exact;
pub use greedy::greedy;
pub use joint::{Choice, GONE, Rate, Stake, bytes, distortion, joint, one_rate};
pub use rate::RateModel;
pub use waterfill::waterfill;

use crate::{Error, Result};

/// Most bits of a channel.
pub const MOST_BITS: u8 = 8;

/// Distortion of one channel of unit variance at 0 to 8 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curve([f64; MOST_BITS as usize + 1]);

impl Curve {
    /// Gaussian channels in the codebooks of kvrs.
    pub const GAUSSIAN: Self =
        Self([1.0, 0.36338, 0.11748, 0.03455, 0.00951, 0.00252, 0.00066, 0.000_30, 0.000_09]);

    /// Distortion at 0 to 8 bits.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are not nine, one is not finite or negative, or more bits are worse.
    pub fn new(distortion: &[f64]) -> Result<Self> {
        let Ok(values) = <[f64; 9]>::try_from(distortion) else {
            return Err(Error::argument(
                "curve",
                format!("{} numbers", distortion.len()),
                "9, for 0 to 8 bits",
            ));
        };
        for (bits, value) in values.iter().enumerate() {
            if !value.is_finite() || *value < 0.0 {
                return Err(Error::argument(format!("curve[{bits}]"), value, "a finite number from 0 on"));
            }
            if bits > 0 && *value > values[bits - 1] {
                let allowed = format!("at most curve[{}], {}", bits - 1, values[bits - 1]);
                return Err(Error::argument(format!("curve[{bits}]"), value, allowed));
            }
        }
        Ok(Self(values))
    }

    /// Distortion at `bits`.
    ///
    /// # Panics
    /// If `bits` is above 8.
    #[must_use]
    pub fn at(&self, bits: u8) -> f64 {
        self.0[usize::from(bits)]
    }
}

/// The runs of channels that share a budget, in the order in which equal gains are served: layer, head, run.
#[derive(Debug, Clone, Copy)]
pub struct Items<'a> {
    /// Distortion of each item at 0 bits: the sum of `w * sigma^2` over its channels.
    weights: &'a [f64],
    /// Channels of each item: what one bit more costs.
    channels: &'a [u32],
    /// Least bits of each item.
    floors: &'a [u8],
}

impl<'a> Items<'a> {
    /// Items of one number each in three slices.
    ///
    /// # Errors
    /// [`Error::Argument`] if there are none, a weight is negative or not finite, an item has no channels or a floor
    /// above 8 bits; [`Error::Shape`] if the slices differ in length.
    pub fn new(weights: &'a [f64], channels: &'a [u32], floors: &'a [u8]) -> Result<Self> {
        if weights.is_empty() {
            return Err(Error::argument("weights", "empty", "one number or more"));
        }
        for (what, len) in [("channels", channels.len()), ("floors", floors.len())] {
            if len != weights.len() {
                return Err(Error::shape(
                    what,
                    format!("[{len}]"),
                    format!("[{}], as weights", weights.len()),
                ));
            }
        }
        if let Some(i) = weights.iter().position(|w| !w.is_finite() || *w < 0.0) {
            return Err(Error::argument(format!("weights[{i}]"), weights[i], "a finite number from 0 on"));
        }
        if let Some(i) = channels.iter().position(|&n| n == 0) {
            return Err(Error::argument(format!("channels[{i}]"), 0, "1 or more"));
        }
        if let Some(i) = floors.iter().position(|&bits| bits > MOST_BITS) {
            return Err(Error::argument(format!("floors[{i}]"), floors[i], "0 to 8"));
        }
        Ok(Self { weights, channels, floors })
    }

    /// Number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Whether there are no items; never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    /// Bits per token of an allocation.
    #[must_use]
    pub fn bits(&self, widths: &[u8]) -> u64 {
        widths.iter().zip(self.channels).map(|(&bits, &n)| u64::from(bits) * u64::from(n)).sum()
    }

    /// Distortion of an allocation.
    #[must_use]
    pub fn distortion(&self, widths: &[u8], curve: &Curve) -> f64 {
        widths.iter().zip(self.weights).map(|(&bits, weight)| weight * curve.at(bits)).sum()
    }

    /// Refuses a budget below the floors.
    fn check_budget(&self, budget: u64) -> Result<()> {
        let least = self.bits(self.floors);
        if budget >= least {
            return Ok(());
        }
        let allowed = format!("{least} bits a token or more, which the floors take");
        Err(Error::argument("budget", format!("{budget} bits a token"), allowed))
    }
}
