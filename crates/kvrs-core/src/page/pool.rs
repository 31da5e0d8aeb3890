//! The state behind an arena's lock: which chunks, slabs and pages there are, and which are free.

use super::arena::ChunkSource;
use super::slab::{Slab, capacity, order_for};
use super::space::{MAX_CHUNK, Space, Spot, UNIT, growth};
use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes that a table entry costs, counted with each owned page: the entry, its share of a growing table,
/// and the page's own bookkeeping.
pub const ENTRY_BYTES: u64 = 160;

/// Where a page lies; the order is by page size, then by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) page_bytes: u32,
    pub(super) slab: Spot,
    index: u32,
}

/// How far the chunks may and should grow for a reservation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Growth {
    /// Upper bound of all chunk bytes.
    pub(super) limit: u64,
    /// Chunk bytes that the pages of the reservation still lack.
    pub(super) lacking: u64,
}

impl Place {
    pub(super) fn offset(&self) -> usize {
        self.slab.unit as usize * UNIT as usize + self.index as usize * self.page_bytes as usize
    }
}

/// Chunks, slabs and counters.
#[derive(Debug)]
pub(super) struct Pool<C> {
    chunks: BTreeMap<u64, (C, u64)>,
    space: Space,
    slabs: BTreeMap<Spot, Slab>,
    /// Slabs with free pages by page size, the fullest first, so that the emptiest may drain.
    open: BTreeMap<u32, BTreeSet<(u32, Spot)>>,
    pub(super) chunk_bytes: u64,
    pub(super) pages_total: u64,
    pub(super) pages_owned: u64,
    pub(super) page_bytes_used: u64,
}

impl<C> Default for Pool<C> {
    fn default() -> Self {
        Self {
            chunks: BTreeMap::new(),
            space: Space::default(),
            slabs: BTreeMap::new(),
            open: BTreeMap::new(),
            chunk_bytes: 0,
            pages_total: 0,
            pages_owned: 0,
            page_bytes_used: 0,
        }
    }
}

impl<C> Pool<C> {
    /// A page of that size, or `None` if the limit of `growth` does not allow it.
    pub(super) fn take(
        &mut self,
        page_bytes: u32,
        source: &impl ChunkSource<Chunk = C>,
        growth: &mut Growth,
    ) -> Result<Option<Place>> {
        let first = self.open.get(&page_bytes).and_then(BTreeSet::first).map(|&(_, spot)| spot);
        let slab = match first {
            Some(spot) => Some(spot),
            None => self.open_slab(page_bytes, source, growth)?,
        };
        Ok(slab.map(|spot| self.take_from(spot)))
    }

    fn take_from(&mut self, spot: Spot) -> Place {
        let slab = self.slabs.get_mut(&spot).expect("an open slab is live");
        let index = slab.take().expect("an open slab has a free page");
        let (page_bytes, free) = (slab.page_bytes, slab.free);
        self.move_slab(spot, page_bytes, free + 1, free);
        self.pages_owned += 1;
        self.page_bytes_used += u64::from(page_bytes);
        Place { page_bytes, slab: spot, index }
    }

    /// Frees a page, then its slab and its chunk if nothing else lives there.
    pub(super) fn put(&mut self, place: Place) {
        let slab = self.slabs.get_mut(&place.slab).expect("an owned page lies in a live slab");
        slab.put(place.index);
        let (free, pages, order) = (slab.free, slab.pages, slab.order);
        self.pages_owned -= 1;
        self.page_bytes_used -= u64::from(place.page_bytes);
        let listed = if free == pages { 0 } else { free };
        self.move_slab(place.slab, place.page_bytes, free - 1, listed);
        if free < pages {
            return;
        }
        self.slabs.remove(&place.slab);
        self.pages_total -= u64::from(pages);
        if self.space.put(place.slab, order) {
            self.space.remove(place.slab.chunk);
            let chunk = self.chunks.remove(&place.slab.chunk);
            self.chunk_bytes -= chunk.map_or(0, |(_, bytes)| bytes);
        }
    }

    /// Lists a slab under its new number of free pages; 0 is not listed.
    fn move_slab(&mut self, spot: Spot, page_bytes: u32, from: u32, to: u32) {
        let open = self.open.entry(page_bytes).or_default();
        open.remove(&(from, spot));
        if to > 0 {
            open.insert((to, spot));
        } else if open.is_empty() {
            self.open.remove(&page_bytes);
        }
    }

    /// Cuts a slab for that page size, a smaller one than usual if only that still fits the limit.
    fn open_slab(
        &mut self,
        page_bytes: u32,
        source: &impl ChunkSource<Chunk = C>,
        growth: &mut Growth,
    ) -> Result<Option<Spot>> {
        for order in (0..=order_for(page_bytes)).rev().filter(|&order| capacity(page_bytes, order) > 0) {
            let mut spot = self.space.take(order);
            if spot.is_none() && self.grow((page_bytes, UNIT << order), source, growth)? {
                spot = self.space.take(order);
            }
            if let Some(spot) = spot {
                let slab = Slab::new(page_bytes, order);
                self.pages_total += u64::from(slab.pages);
                self.open.entry(page_bytes).or_default().insert((slab.pages, spot));
                self.slabs.insert(spot, slab);
                return Ok(Some(spot));
            }
        }
        Ok(None)
    }

    /// Allocates a chunk that holds `bytes`, a slab for that page size; false if the limit does not allow it.
    ///
    /// Near the limit it leaves room for the table entries of the pages that it will hold.
    fn grow(
        &mut self,
        (page_bytes, bytes): (u32, u64),
        source: &impl ChunkSource<Chunk = C>,
        growth: &mut Growth,
    ) -> Result<bool> {
        let room = growth.limit.saturating_sub(self.chunk_bytes) / UNIT * UNIT;
        if room < bytes {
            return Ok(false);
        }
        let pages = room / (u64::from(page_bytes) + ENTRY_BYTES);
        let filled = pages * u64::from(page_bytes) / UNIT * UNIT;
        let size = self.next_chunk(growth.lacking).min(filled).max(bytes);
        let chunk = source.allocate(size as usize)?;
        let id = self.space.add((size / UNIT) as u32);
        self.chunks.insert(id, (chunk, size));
        self.chunk_bytes += size;
        growth.lacking = growth.lacking.saturating_sub(size);
        Ok(true)
    }

    /// Bytes of the next chunk: as many steps of growth as `lacking` bytes need, up to a huge page, so that a long
    /// prompt lies on huge pages from its first token on and no more is allocated than step by step.
    fn next_chunk(&self, lacking: u64) -> u64 {
        let mut size = growth(self.chunk_bytes);
        while size < lacking {
            let next = size + growth(self.chunk_bytes + size);
            if next > MAX_CHUNK {
                break;
            }
            size = next;
        }
        size
    }

    /// The handle of the chunk that holds `place`.
    pub(super) fn chunk(&self, place: Place) -> &C {
        &self.chunks.get(&place.slab.chunk).expect("an owned page lies in a live chunk").0
    }

    /// Chunk bytes that `wants`, pages by size, ask for beyond what is free inside the chunks.
    pub(super) fn missing(&self, wants: &BTreeMap<u32, u64>) -> u64 {
        let slabs = |(&bytes, &count): (&u32, &u64)| {
            let free = self.open.get(&bytes).map_or(0, |open| open.iter().map(|(n, _)| u64::from(*n)).sum());
            let order = order_for(bytes);
            let slabs = count.saturating_sub(free).div_ceil(u64::from(capacity(bytes, order)));
            slabs.saturating_mul(UNIT << order)
        };
        let bytes = wants.iter().map(slabs).fold(0u64, u64::saturating_add);
        bytes.saturating_sub(self.space.free_units() * UNIT)
    }

    /// Checks every count against what it counts.
    pub(super) fn check(&self) -> Result<()> {
        self.space.check(self.slabs.iter().map(|(spot, slab)| (*spot, slab.order)))?;
        let sum = |f: fn(&Slab) -> u64| self.slabs.values().map(f).sum::<u64>();
        let chunks = self.chunks.values().map(|(_, bytes)| *bytes).sum::<u64>();
        let counts = [
            ("chunk bytes", self.chunk_bytes, chunks),
            ("chunk bytes by space", self.chunk_bytes, self.space.units() * UNIT),
            ("pages", self.pages_total, sum(|s| s.pages.into())),
            ("owned pages", self.pages_owned, sum(|s| (s.pages - s.free).into())),
            (
                "owned bytes",
                self.page_bytes_used,
                sum(|s| u64::from(s.page_bytes) * u64::from(s.pages - s.free)),
            ),
            ("open slabs", self.open.values().map(|o| o.len() as u64).sum(), sum(|s| (s.free > 0).into())),
        ];
        if let Some((what, known, found)) = counts.into_iter().find(|(_, known, found)| known != found) {
            return Err(Error::Internal(format!("{what}: {known} counted, {found} found")));
        }
        for (spot, slab) in &self.slabs {
            let listed =
                self.open.get(&slab.page_bytes).is_some_and(|open| open.contains(&(slab.free, *spot)));
            if !slab.is_consistent() || slab.free == slab.pages || listed != (slab.free > 0) {
                return Err(Error::Internal(format!("slab at {spot:?}: {slab:?}, listed: {listed}")));
            }
        }
        Ok(())
    }
}
