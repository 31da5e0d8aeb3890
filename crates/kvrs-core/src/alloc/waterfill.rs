//! Reverse water-filling: bits from one water level, found by bisection.

use super::{Items, MOST_BITS};
use crate::Result;

/// Halvings of the range of levels.
const STEPS: usize = 50;

/// Bits of each item, `round(1/2 log2(w / level))` between its floor and 8, with `w` its weight per channel.
///
/// The lowest level whose bits fit `budget`, in bits per token, is found by bisection; what the next level would
/// give more is handed out from the lower items on as far as it fits.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) if the budget is below the floors.
pub fn waterfill(items: &Items<'_>, budget: u64) -> Result<Vec<u8>> {
    items.check_budget(budget)?;
    let heights: Vec<f64> =
        items.weights.iter().zip(items.channels).map(|(w, &n)| (w / f64::from(n)).log2()).collect();
    let finite = || heights.iter().copied().filter(|height| height.is_finite());
    let at = |level: f64| -> Vec<u8> {
        heights.iter().zip(items.floors).map(|(&height, &floor)| bits_at(height, level, floor)).collect()
    };
    // At the lower end every item with a weight has 8 bits, at the upper end none more than its floor.
    let mut low = finite().fold(f64::INFINITY, f64::min) - 2.0 * f64::from(MOST_BITS) - 1.0;
    let mut high = finite().fold(f64::NEG_INFINITY, f64::max) + 2.0;
    if low > high || items.bits(&at(low)) <= budget {
        return Ok(at(low.min(high)));
    }
    for _ in 0..STEPS {
        let middle = f64::midpoint(low, high);
        if items.bits(&at(middle)) <= budget {
            high = middle;
        } else {
            low = middle;
        }
    }
    let mut widths = at(high);
    let mut free = budget - items.bits(&widths);
    for (item, &more) in at(low).iter().enumerate() {
        let cost = u64::from(more - widths[item]) * u64::from(items.channels[item]);
        if cost <= free {
            free -= cost;
            widths[item] = more;
        }
    }
    Ok(widths)
}

/// Bits of an item whose weight per channel is `2^height`, at the water level `2^level`.
fn bits_at(height: f64, level: f64, floor: u8) -> u8 {
    let bits = (0.5 * (height - level)).round();
    // A weight of zero has height -inf: no bits.
    if bits.is_nan() { floor } else { (bits.clamp(0.0, f64::from(MOST_BITS)) as u8).max(floor) }
}
