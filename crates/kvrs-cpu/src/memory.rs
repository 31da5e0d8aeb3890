//! Chunks of host memory, and the bytes of the pages that the arena cuts from them.

use kvrs_core::page::{ChunkSource, Page};
use kvrs_core::{Error, Result};
use rayon::ThreadPool;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::threads;

const HUGE: usize = 2 << 20;
const SMALL_ALIGN: usize = 64 << 10;

/// The CPU: where chunks lie and which threads work on them.
#[derive(Debug)]
pub struct Cpu {
    /// `None`: the threads that all backends without their own share.
    pool: Option<Arc<ThreadPool>>,
}

impl Cpu {
    /// A backend with `threads` threads of its own; `None`: the ones that [`crate::set_num_threads`] sets.
    ///
    /// # Errors
    /// [`Error::Argument`] for 0 or more than 1024 threads, [`Error::Internal`] if they cannot be started.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        Ok(Self { pool: threads.map(threads::build).transpose()? })
    }

    /// A backend that runs on the caller's own threads.
    #[must_use]
    pub fn with_pool(pool: Arc<ThreadPool>) -> Self {
        Self { pool: Some(pool) }
    }

    /// The backend of this process, on the threads that [`crate::set_num_threads`] sets.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Cpu>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(|| Arc::new(Self { pool: None })))
    }

    /// Threads that work for this backend.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(threads::get_num_threads, |pool| pool.current_num_threads())
    }

    /// Runs `work` on this backend's threads.
    pub(crate) fn on_pool<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self.pool.clone().or_else(threads::global) {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }
}

/// A chunk: zeroed memory that is freed when its last handle is dropped.
#[derive(Debug, Clone)]
pub struct Chunk(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to the handle alone; its bytes are reached only through `bytes` and `bytes_mut`, which
// borrow the page that owns them.
unsafe impl Send for Memory {}
// SAFETY: as above: shared access goes through `&Page`, exclusive access through `&mut Page`.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with this layout and is freed once, here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl ChunkSource for Cpu {
    type Chunk = Chunk;

    fn allocate(&self, bytes: usize) -> Result<Chunk> {
        let align = if bytes >= HUGE { HUGE } else { SMALL_ALIGN };
        let failed = || Error::Internal(format!("no chunk of {bytes} bytes could be allocated"));
        let layout =
            Layout::from_size_align(bytes, align).ok().filter(|l| l.size() > 0).ok_or_else(failed)?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(failed)?;
        Ok(Chunk(Arc::new(Memory { start, layout })))
    }
}

fn start(page: &Page<Chunk>) -> NonNull<u8> {
    let memory = &page.chunk().0;
    let end = page.offset().checked_add(page.bytes());
    assert!(end.is_some_and(|end| end <= memory.layout.size()), "pages lie inside their chunk");
    // SAFETY: the offset is inside the allocation, as just checked.
    unsafe { memory.start.add(page.offset()) }
}

/// The bytes of a page.
///
/// # Panics
/// If the page does not lie inside its chunk.
#[must_use]
pub fn bytes(page: &Page<Chunk>) -> &[u8] {
    // SAFETY: `start` checked the range; the memory is initialised (allocated zeroed) and lives as long as the page,
    // which holds its chunk. The arena never makes overlapping pages, so no `bytes_mut` can alias.
    unsafe { std::slice::from_raw_parts(start(page).as_ptr(), page.bytes()) }
}

/// The bytes of a page, to write.
///
/// # Panics
/// If the page does not lie inside its chunk.
#[must_use]
pub fn bytes_mut(page: &mut Page<Chunk>) -> &mut [u8] {
    // SAFETY: as for `bytes`; the exclusive borrow of the page is exclusive access to its bytes, as the arena never
    // makes overlapping pages.
    unsafe { std::slice::from_raw_parts_mut(start(page).as_ptr(), page.bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvrs_core::page::Arena;

    #[test]
    fn chunks_are_zeroed_and_aligned() {
        for (bytes, align) in [(64 << 10, 64 << 10), (2 << 20, 2 << 20), (4 << 20, 2 << 20)] {
            let chunk = Cpu::shared().allocate(bytes).unwrap();
            assert_eq!(chunk.0.start.as_ptr().addr() % align, 0);
        }
        assert!(Cpu::shared().allocate(0).is_err());
    }

    #[test]
    fn neighbouring_pages_do_not_touch() {
        let arena = Arena::new(Cpu::shared(), None).unwrap();
        let mut supply = arena.reserve("test", &[(8448, 4)]).unwrap();
        let mut pages: Vec<_> = (0..4).map(|_| supply.take(8448)).collect();
        for (i, page) in pages.iter_mut().enumerate() {
            assert!(bytes(page).iter().all(|&b| b == 0));
            bytes_mut(page).fill(i as u8 + 1);
        }
        for (i, page) in pages.iter().enumerate() {
            assert_eq!(bytes(page), vec![i as u8 + 1; 8448]);
        }
    }
}
