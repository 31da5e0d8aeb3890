//! What a set of pages costs in chunks, without an arena.

use super::slab::{capacity, order_for};
use super::space::{MAX_CHUNK, UNIT, growth};
use std::collections::BTreeMap;

/// Chunk bytes of an arena that owns exactly `wants` pages of `(page bytes, count)`.
///
/// Exact for pages of up to 256 KiB that were reserved into an empty arena without a capacity, in any order: free
/// space is at most one block of 128 and one of 64 KiB before a new one is opened. Larger pages are counted
/// as if they had come first.
///
/// # Panics
/// If a page has no bytes.
#[must_use]
pub fn footprint(wants: &[(u32, u64)]) -> u64 {
    let mut pages: BTreeMap<u32, u64> = BTreeMap::new();
    for &(bytes, count) in wants.iter().filter(|(_, count)| *count > 0) {
        *pages.entry(bytes).or_default() += count;
    }
    let mut slabs: BTreeMap<u32, u64> = BTreeMap::new();
    for (bytes, count) in pages {
        let order = order_for(bytes);
        *slabs.entry(order).or_default() += count.div_ceil(u64::from(capacity(bytes, order)));
    }
    let (mut have, mut used) = (0u64, 0u64);
    for (order, count) in slabs.into_iter().rev() {
        let size = UNIT << order;
        used = used.saturating_add(size.saturating_mul(count));
        while have < used && growth(have) < MAX_CHUNK {
            have += growth(have).max(size);
        }
        let chunk = size.max(MAX_CHUNK);
        have = have.saturating_add(used.saturating_sub(have).div_ceil(chunk).saturating_mul(chunk));
    }
    have
}
