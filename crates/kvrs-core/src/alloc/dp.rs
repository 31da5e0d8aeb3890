//! The least distortion under a budget, by dynamic programming over items and bits.

use super::{Curve, Items, MOST_BITS};
use crate::{Error, Result};

/// Most entries of the table of choices, a byte each.
const MOST_ENTRIES: u64 = 1 << 28;

/// Bits of each item with the least distortion that `budget`, in bits per token, allows, for any curve and sizes.
///
/// The table has an entry per item and multiple of the largest common divisor of the sizes: runs of 16 channels
/// divide a budget by 16. A budget in bytes is one of eight times as many bits. Among equals an item gets the fewer bits.
///
/// # Errors
/// [`Error::Argument`] if the budget is below the floors, or the table would have more than 2^28 entries.
pub fn exact(items: &Items<'_>, budget: u64, curve: &Curve) -> Result<Vec<u8>> {
    items.check_budget(budget)?;
    let unit = items.channels.iter().fold(0, |unit, &n| divisor(unit, n));
    let most: u64 = items.channels.iter().map(|&n| u64::from(n / unit) * u64::from(MOST_BITS)).sum();
    let units = (budget / u64::from(unit)).min(most);
    let entries = (units + 1).saturating_mul(items.len() as u64);
    if entries > MOST_ENTRIES {
        let allowed = format!(
            "at most {} bits a token for {} items",
            u64::from(unit) * (MOST_ENTRIES / items.len() as u64 - 1),
            items.len()
        );
        return Err(Error::argument("budget", format!("{budget} bits a token"), allowed));
    }
    let table = Table { items, curve, unit, units: units as usize };
    Ok(table.widths(&table.choices()))
}

struct Table<'a> {
    items: &'a Items<'a>,
    curve: &'a Curve,
    unit: u32,
    units: usize,
}

impl Table<'_> {
    /// The best bits of each item for each number of units that it and the items before may take.
    fn choices(&self) -> Vec<Vec<u8>> {
        let mut best = vec![0.0; self.units + 1];
        (0..self.items.len()).map(|item| self.add(item, &mut best)).collect()
    }

    /// Adds an item to the least distortions of those before it, and returns its bits.
    fn add(&self, item: usize, best: &mut [f64]) -> Vec<u8> {
        let before = best.to_vec();
        best.fill(f64::INFINITY);
        let mut chosen = vec![0; best.len()];
        for bits in self.items.floors[item]..=MOST_BITS {
            let distortion = self.items.weights[item] * self.curve.at(bits);
            for (units, base) in
                before.iter().enumerate().take((self.units + 1).saturating_sub(self.cost(item, bits)))
            {
                let at = units + self.cost(item, bits);
                if base + distortion < best[at] {
                    best[at] = base + distortion;
                    chosen[at] = bits;
                }
            }
        }
        chosen
    }

    /// The bits of all items from the choices, from the last item back.
    fn widths(&self, choices: &[Vec<u8>]) -> Vec<u8> {
        let mut units = self.units;
        let mut widths = vec![0; choices.len()];
        for (item, chosen) in choices.iter().enumerate().rev() {
            widths[item] = chosen[units];
            units -= self.cost(item, chosen[units]);
        }
        widths
    }

    fn cost(&self, item: usize, bits: u8) -> usize {
        (self.items.channels[item] / self.unit) as usize * usize::from(bits)
    }
}

/// The largest common divisor; of 0 and `b`, `b`.
fn divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { divisor(b, a % b) }
}
