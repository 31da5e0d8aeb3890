//! Free space inside chunks, in units of 64 KiB, by the buddy rule: a block of 2^n units starts at a
//! multiple of 2^n and, once free, merges with its free neighbour (Knuth, TAOCP vol. 1, section 2.5).

use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of the smallest block.
pub(super) const UNIT: u64 = 64 << 10;
/// Bytes of the smallest chunk that is asked for while the capacity allows it.
const MIN_CHUNK: u64 = 256 << 10;
/// Bytes of a chunk once the arena is large: one huge page.
pub(super) const MAX_CHUNK: u64 = 2 << 20;

/// A place inside a chunk; the order is the order in which places are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spot {
    pub(super) chunk: u64,
    pub(super) unit: u32,
}

#[derive(Debug)]
struct Extent {
    units: u32,
    used: u32,
}

/// The free blocks of all chunks.
#[derive(Debug, Default)]
pub(super) struct Space {
    chunks: BTreeMap<u64, Extent>,
    /// Free blocks of 2^n units.
    free: Vec<BTreeSet<Spot>>,
    next: u64,
}

/// Bytes of the next chunk of an arena that has `chunk_bytes`: about a sixteenth, so that slack stays small.
///
/// Steps from nothing pass through every multiple of 2 MiB, so that a few make a huge page.
pub(super) fn growth(chunk_bytes: u64) -> u64 {
    (chunk_bytes / 16 + 1).checked_next_power_of_two().unwrap_or(MAX_CHUNK).clamp(MIN_CHUNK, MAX_CHUNK)
}

/// The aligned blocks `(unit, order)` that make up an empty chunk.
fn blocks(units: u32) -> impl Iterator<Item = (u32, u32)> {
    let mut unit = 0;
    std::iter::from_fn(move || {
        let order = (units - unit).checked_ilog2()?.min(if unit == 0 { 31 } else { unit.trailing_zeros() });
        let block = (unit, order);
        unit += 1 << order;
        Some(block)
    })
}

impl Space {
    /// A new chunk, entirely free.
    pub(super) fn add(&mut self, units: u32) -> u64 {
        let chunk = self.next;
        self.next += 1;
        self.chunks.insert(chunk, Extent { units, used: 0 });
        for (unit, order) in blocks(units) {
            self.insert(Spot { chunk, unit }, order);
        }
        chunk
    }

    /// The smallest free block that holds 2^order units, the first by address among equals.
    pub(super) fn take(&mut self, order: u32) -> Option<Spot> {
        let mut at = (order as usize..self.free.len()).find(|&n| !self.free[n].is_empty())? as u32;
        let spot = self.free[at as usize].pop_first()?;
        while at > order {
            at -= 1;
            self.insert(Spot { unit: spot.unit + (1 << at), ..spot }, at);
        }
        self.chunks.get_mut(&spot.chunk).expect("a free block lies in a chunk").used += 1 << order;
        Some(spot)
    }

    /// Gives a block back; true if its chunk is now entirely free.
    pub(super) fn put(&mut self, mut spot: Spot, mut order: u32) -> bool {
        let extent = self.chunks.get_mut(&spot.chunk).expect("a used block lies in a chunk");
        extent.used -= 1 << order;
        let empty = extent.used == 0;
        while self.free.get_mut(order as usize).is_some_and(|free| free.remove(&buddy(spot, order))) {
            spot.unit &= !(1 << order);
            order += 1;
        }
        self.insert(spot, order);
        empty
    }

    /// Forgets an entirely free chunk.
    pub(super) fn remove(&mut self, chunk: u64) {
        let extent = self.chunks.remove(&chunk).expect("only chunks of this space are removed");
        for (unit, order) in blocks(extent.units) {
            let whole = self.free[order as usize].remove(&Spot { chunk, unit });
            debug_assert!(whole, "a free chunk consists of its aligned blocks");
        }
    }

    /// Units of all chunks.
    pub(super) fn units(&self) -> u64 {
        self.chunks.values().map(|extent| u64::from(extent.units)).sum()
    }

    /// Units of all free blocks.
    pub(super) fn free_units(&self) -> u64 {
        self.free.iter().enumerate().map(|(order, spots)| (spots.len() as u64) << order).sum()
    }

    /// Checks that free blocks and `used` (spot, order) cover every chunk once.
    pub(super) fn check(&self, used: impl Iterator<Item = (Spot, u32)>) -> Result<()> {
        let free =
            self.free.iter().zip(0u32..).flat_map(|(spots, order)| spots.iter().map(move |&s| (s, order)));
        let mut all: Vec<_> = free.chain(used).collect();
        all.sort_unstable();
        let mut parts = all.into_iter().peekable();
        for (&chunk, extent) in &self.chunks {
            let mut unit = 0;
            while let Some((spot, order)) = parts.next_if(|(spot, _)| spot.chunk == chunk) {
                if spot.unit != unit || unit.trailing_zeros() < order {
                    return Err(Error::Internal(format!(
                        "chunk {chunk} has a gap or overlap at unit {unit}"
                    )));
                }
                unit += 1 << order;
            }
            if unit != extent.units {
                return Err(Error::Internal(format!(
                    "chunk {chunk} has {} units, {unit} known",
                    extent.units
                )));
            }
        }
        parts.next().map_or(Ok(()), |(s, _)| Err(Error::Internal(format!("block in no chunk: {s:?}"))))
    }

    fn insert(&mut self, spot: Spot, order: u32) {
        let order = order as usize;
        if self.free.len() <= order {
            self.free.resize_with(order + 1, BTreeSet::new);
        }
        self.free[order].insert(spot);
    }
}

fn buddy(spot: Spot, order: u32) -> Spot {
    Spot { unit: spot.unit ^ (1 << order), ..spot }
}
