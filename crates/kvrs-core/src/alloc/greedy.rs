//! Marginal gain: one bit more where it lowers the distortion most per bit.

use super::{Curve, Items, MOST_BITS};
use crate::Result;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Bits of each item: from the floors on, always the step of largest gain per bit that still fits.
///
/// `budget` is in bits per token and never passed. With items of one size and a convex curve the result is the
/// optimum. Equal gains go to the lower item.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) if the budget is below the floors.
pub fn greedy(items: &Items<'_>, budget: u64, curve: &Curve) -> Result<Vec<u8>> {
    items.check_budget(budget)?;
    let mut widths = items.floors.to_vec();
    let mut free = budget - items.bits(&widths);
    let step = |item: usize, bits: u8| (bits < MOST_BITS).then(|| Step::new(items, item, bits, curve));
    let mut steps: BinaryHeap<Step> = (0..items.len()).filter_map(|i| step(i, widths[i])).collect();
    while let Some(Step { item, .. }) = steps.pop() {
        let cost = u64::from(items.channels[item]);
        if cost > free {
            continue;
        }
        free -= cost;
        widths[item] += 1;
        steps.extend(step(item, widths[item]));
    }
    Ok(widths)
}

/// One bit more for one item.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Step {
    gain: f64,
    item: usize,
}

impl Step {
    fn new(items: &Items<'_>, item: usize, bits: u8, curve: &Curve) -> Self {
        let fall = curve.at(bits) - curve.at(bits + 1);
        Self { gain: items.weights[item] * fall / f64::from(items.channels[item]), item }
    }
}

impl Eq for Step {}

impl Ord for Step {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain.total_cmp(&other.gain).then(other.item.cmp(&self.item))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
