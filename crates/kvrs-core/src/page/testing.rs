//! A chunk source that counts.

use super::ChunkSource;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that only exists as a number.
#[derive(Debug)]
pub(crate) struct Bytes {
    id: u64,
    size: u64,
    live: Arc<AtomicU64>,
}

impl Bytes {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }
    pub(crate) fn len(&self) -> u64 {
        self.size
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.live.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// Counts live bytes and the most there ever were; refuses beyond `limit`.
#[derive(Debug)]
pub(crate) struct Counting {
    pub(crate) live: Arc<AtomicU64>,
    pub(crate) peak: AtomicU64,
    pub(crate) limit: u64,
    next: AtomicU64,
}

impl Counting {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        let (live, peak, next) = Default::default();
        Arc::new(Self { live, peak, limit, next })
    }

    pub(crate) fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }
}

impl ChunkSource for Counting {
    type Chunk = Arc<Bytes>;

    fn allocate(&self, bytes: usize) -> Result<Self::Chunk> {
        let bytes = bytes as u64;
        assert_eq!(bytes % (64 << 10), 0);
        if self.live() + bytes > self.limit {
            return Err(Error::Internal("out of memory".into()));
        }
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(Bytes { id, size: bytes, live: Arc::clone(&self.live) }))
    }
}
