//! The arena: pages of several sizes out of large chunks, under a hard limit of bytes.

use super::link::Grant;
use super::pool::{ENTRY_BYTES, Growth, Place, Pool};
use super::space::UNIT;
use super::supply::{Page, Supply};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where chunks of memory come from.
pub trait ChunkSource {
    /// Handle of a chunk; the memory is given back when its last clone is dropped.
    type Chunk: Clone + Send + Sync + std::fmt::Debug + 'static;

    /// Allocates a chunk of `bytes`, a multiple of 64 KiB.
    ///
    /// # Errors
    /// Whatever keeps the memory from being allocated.
    fn allocate(&self, bytes: usize) -> Result<Self::Chunk>;
}

/// What all clones of an arena and all its pages share.
#[derive(Debug)]
pub(super) struct Shared<C> {
    pool: Mutex<Pool<C>>,
    /// Table entries beyond the first of each page; grows only under the pool's lock.
    links: AtomicU64,
    capacity: Option<u64>,
}

impl<C> Shared<C> {
    fn lock(&self) -> Result<MutexGuard<'_, Pool<C>>> {
        self.pool.lock().map_err(|_| Error::Internal("a thread panicked inside the arena".into()))
    }

    /// Counts `entries` table entries less.
    pub(super) fn unlink(&self, entries: u64) {
        self.links.fetch_sub(entries, Ordering::Relaxed);
    }

    /// Bytes of all table entries while `pages` pages are owned.
    fn table_bytes(&self, pages: u64) -> u64 {
        pages.saturating_add(self.links.load(Ordering::Relaxed)).saturating_mul(ENTRY_BYTES)
    }

    /// Frees a page, whatever happened before: a drop cannot fail.
    pub(super) fn put(&self, place: Place) {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner).put(place);
    }
}

/// Hands out pages of any size that is a multiple of 64 bytes.
///
/// Chunks grow with use, from 256 KiB to 2 MiB, or have 2 MiB at once where a reservation needs them, are cut in slabs of 64, 128 or 256 KiB, and a slab serves one
/// page size while any page lives in it. Empty slabs and chunks are given back at once.
pub struct Arena<S: ChunkSource> {
    source: Arc<S>,
    shared: Arc<Shared<S::Chunk>>,
}

/// What an arena holds, in bytes and pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaStats {
    /// Bytes of all chunks.
    pub chunk_bytes: u64,
    /// Upper bound of `chunk_bytes + table_bytes`.
    pub capacity: Option<u64>,
    /// Pages cut in live slabs.
    pub pages_total: u64,
    /// Those of them that nobody owns.
    pub pages_free: u64,
    /// Bytes of owned pages.
    pub page_bytes_used: u64,
    /// [`ENTRY_BYTES`] for each owned page, and for each further entry that shares one.
    pub table_bytes: u64,
}

impl<S: ChunkSource> Clone for Arena<S> {
    fn clone(&self) -> Self {
        Self { source: Arc::clone(&self.source), shared: Arc::clone(&self.shared) }
    }
}

impl<S: ChunkSource> std::fmt::Debug for Arena<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl<S: ChunkSource> Arena<S> {
    /// An empty arena; `capacity` bounds the bytes of chunks and table entries, `None` lets it grow.
    ///
    /// # Errors
    /// [`Error::Argument`] for a capacity below 64 KiB.
    pub fn new(source: Arc<S>, capacity: Option<u64>) -> Result<Self> {
        if let Some(bytes) = capacity.filter(|&bytes| bytes < UNIT) {
            let allowed = format!("None or at least {UNIT} bytes");
            return Err(Error::argument("capacity", format!("{bytes} bytes"), allowed));
        }
        Ok(Self {
            source,
            shared: Arc::new(Shared { pool: Mutex::default(), links: AtomicU64::new(0), capacity }),
        })
    }

    /// Takes `(page bytes, count)` pages, all or none; `what` names the caller in the error. The supply hands out the
    /// pages of a size by ascending address.
    ///
    /// # Errors
    /// [`Error::Capacity`] if they do not fit, or the error of the source; nothing has changed then.
    /// [`Error::Internal`] for a page size that is not a multiple of 64.
    pub fn reserve(&self, what: &str, wants: &[(u32, usize)]) -> Result<Supply<S::Chunk>> {
        if let Some((bytes, _)) = wants.iter().find(|(bytes, _)| *bytes == 0 || bytes % 64 != 0) {
            return Err(Error::Internal(format!("{what}: a page of {bytes} bytes, not a multiple of 64")));
        }
        let mut sizes = BTreeMap::new();
        for &(bytes, count) in wants {
            let sum: &mut u64 = sizes.entry(bytes).or_default();
            *sum = sum.saturating_add(count as u64);
        }
        let mut pool = self.shared.lock()?;
        let mut places = Vec::new();
        match self.fill(&mut pool, &sizes, &mut places) {
            Ok(true) => {}
            failed => {
                for place in places {
                    pool.put(place);
                }
                return Err(failed.err().unwrap_or_else(|| self.refusal(&pool, what, &sizes)));
            }
        }
        places.sort_unstable();
        let mut supply = Supply::default();
        for place in places.into_iter().rev() {
            supply.put(Page::new(pool.chunk(place).clone(), place, Arc::clone(&self.shared)));
        }
        Ok(supply)
    }

    /// Takes room for `entries` table entries that share pages; `what` names the caller in the error.
    ///
    /// # Errors
    /// [`Error::Capacity`] if it is not there; nothing has changed then.
    pub fn grant(&self, what: &str, entries: u64) -> Result<Grant<S::Chunk>> {
        let pool = self.shared.lock()?;
        let held = pool.chunk_bytes.saturating_add(self.shared.table_bytes(pool.pages_owned));
        let needed = entries.saturating_mul(ENTRY_BYTES);
        let capacity = self.shared.capacity.unwrap_or(u64::MAX);
        if entries > 0 && held.saturating_add(needed) > capacity {
            let free = capacity.saturating_sub(held);
            return Err(Error::Capacity { what: what.into(), needed, free, capacity });
        }
        self.shared.links.fetch_add(entries, Ordering::Relaxed);
        Ok(Grant::new(entries, Arc::clone(&self.shared)))
    }

    /// Takes pages into `places` until done (true) or the capacity is reached (false).
    fn fill(
        &self,
        pool: &mut Pool<S::Chunk>,
        wants: &BTreeMap<u32, u64>,
        places: &mut Vec<Place>,
    ) -> Result<bool> {
        let count = wants.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
        let tables = self.shared.table_bytes(count.saturating_add(pool.pages_owned));
        let limit = self.shared.capacity.map_or(u64::MAX, |capacity| capacity.saturating_sub(tables));
        let bytes = wants.iter().map(|(&bytes, &count)| u64::from(bytes).saturating_mul(count));
        if count > 0 && bytes.fold(pool.page_bytes_used, u64::saturating_add).max(pool.chunk_bytes) > limit {
            return Ok(false);
        }
        let mut growth = Growth { limit, lacking: pool.missing(wants) };
        for (&bytes, &count) in wants.iter().rev() {
            for _ in 0..count {
                match pool.take(bytes, &*self.source, &mut growth)? {
                    Some(place) => places.push(place),
                    None => return Ok(false),
                }
            }
        }
        Ok(true)
    }

    fn refusal(&self, pool: &Pool<S::Chunk>, what: &str, wants: &BTreeMap<u32, u64>) -> Error {
        let capacity = self.shared.capacity.unwrap_or(u64::MAX);
        let free = capacity.saturating_sub(pool.chunk_bytes + self.shared.table_bytes(pool.pages_owned));
        let tables = wants.values().map(|count| count.saturating_mul(ENTRY_BYTES));
        // Free space in pieces that are too small counts for nothing, so the sum may understate.
        let needed = tables.fold(pool.missing(wants), u64::saturating_add).max(free.saturating_add(1));
        Error::Capacity { what: what.into(), needed, free, capacity }
    }

    /// Bytes and pages in use; all zero but the capacity after a panic inside the arena.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let capacity = self.shared.capacity;
        let Ok(pool) = self.shared.lock() else { return ArenaStats { capacity, ..ArenaStats::default() } };
        ArenaStats {
            chunk_bytes: pool.chunk_bytes,
            capacity,
            pages_total: pool.pages_total,
            pages_free: pool.pages_total - pool.pages_owned,
            page_bytes_used: pool.page_bytes_used,
            table_bytes: self.shared.table_bytes(pool.pages_owned),
        }
    }

    /// Checks that no page is both free and owned, nothing overlaps and every count adds up.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the first fault.
    pub fn check(&self) -> Result<()> {
        let pool = self.shared.lock()?;
        pool.check()?;
        let held = pool.chunk_bytes + self.shared.table_bytes(pool.pages_owned);
        match self.shared.capacity {
            Some(capacity) if held > capacity => {
                Err(Error::Internal(format!("{held} bytes held, capacity {capacity}")))
            }
            _ => Ok(()),
        }
    }
}
