//! Chunks of host memory, and the bytes of the pages that the arena cuts from them.

mod huge;

use huge::HUGE;
use kvrs_core::page::{ChunkSource, Page};
use kvrs_core::{Error, Result};
use rayon::ThreadPool;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::threads;

const SMALL_ALIGN: usize = 64 << 10;

/// The CPU: where chunks lie and which threads work on them.
#[derive(Debug)]
pub struct Cpu {
    /// `None`: the threads that all backends without their own share.
    pool: Option<Arc<ThreadPool>>,
    /// Whose kernels it uses; the error is reported when a store is made.
    isa: Result<Isa>,
    held: Arc<Held>,
}

/// Bytes of live chunks.
#[derive(Debug, Default)]
struct Held {
    total: AtomicUsize,
    /// Of these, in chunks that begin with a huge page.
    huge: AtomicUsize,
}

impl Held {
    /// The error for a chunk that the system did not give: what is held is all that there is to have.
    fn refused(&self, bytes: usize) -> Error {
        let what = format!("a chunk of {bytes} bytes, which the system refused,");
        let capacity = self.total.load(Ordering::Relaxed) as u64;
        Error::Capacity { what, needed: bytes as u64, free: 0, capacity }
    }
}

impl Cpu {
    /// A backend with `threads` threads of its own; `None`: the ones that [`crate::set_num_threads`] sets.
    ///
    /// # Errors
    /// [`Error::Argument`] for 0 or more than 1024 threads, [`Error::Internal`] if they cannot be started.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        Ok(Self::on(threads.map(threads::build).transpose()?))
    }

    /// This backend with the kernels of `isa` instead of those that `KVRS_ISA` or the CPU choose.
    ///
    /// # Errors
    /// [`Error::Argument`] if this CPU has not that instruction set.
    pub fn with_isa(self, isa: Isa) -> Result<Self> {
        Ok(Self { isa: Ok(Isa::parse(Some(isa.name()), Isa::detected())?), ..self })
    }

    fn on(pool: Option<Arc<ThreadPool>>) -> Self {
        Self { pool, isa: Isa::chosen(), held: Arc::default() }
    }

    /// A backend that runs on the caller's own threads.
    #[must_use]
    pub fn with_pool(pool: Arc<ThreadPool>) -> Self {
        Self::on(Some(pool))
    }

    /// The backend of this process, on the threads that [`crate::set_num_threads`] sets.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<Cpu>> = OnceLock::new();
        Arc::clone(SHARED.get_or_init(|| Arc::new(Self::on(None))))
    }

    /// The instruction set that its kernels use.
    ///
    /// # Errors
    /// [`Error::Argument`] if `KVRS_ISA` names none, or one that this CPU has not.
    pub fn isa(&self) -> Result<Isa> {
        self.isa.clone()
    }

    /// The kernels of its instruction set; `None`: the scalar code.
    pub(crate) fn kernels(&self) -> Option<Kernels> {
        self.isa.as_ref().ok().and_then(|isa| Kernels::of(*isa))
    }

    /// Threads that work for this backend.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or_else(threads::get_num_threads, |pool| pool.current_num_threads())
    }

    /// This backend's threads; `None` if the system refuses to start any.
    pub(crate) fn pool(&self) -> Option<Arc<ThreadPool>> {
        self.pool.clone().or_else(threads::global)
    }

    /// Runs `work` on this backend's threads.
    pub(crate) fn on_pool<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self.pool() {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Whether the system gave huge pages for most bytes of this backend's chunks.
    ///
    /// Chunks below 2 MiB, the first 16 MiB of a store that grows token by token, never lie on them.
    pub(crate) fn on_huge_pages(&self) -> bool {
        self.held.huge.load(Ordering::Relaxed) > self.held.total.load(Ordering::Relaxed) / 2
    }
}

/// A chunk: zeroed memory that is freed when its last handle is dropped.
#[derive(Debug, Clone)]
pub struct Chunk(Arc<Memory>);

#[derive(Debug)]
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
    /// Whether it is a mapping of its own, not a piece of the heap.
    mapped: bool,
    /// Whether it begins with a huge page.
    huge: bool,
    held: Arc<Held>,
}

// SAFETY: the memory belongs to the handle alone; its bytes are reached only through `bytes` and `bytes_mut`, which
// borrow the page that owns them.
unsafe impl Send for Memory {}
// SAFETY: as above: shared access goes through `&Page`, exclusive access through `&mut Page`.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(layout: Layout, held: &Arc<Held>) -> Option<Self> {
        let mapping = if layout.size() >= HUGE { huge::map(layout.size()) } else { None };
        let (start, mapped, huge) = if let Some(start) = mapping {
            // SAFETY: just mapped, with at least a huge page of bytes.
            (start, true, unsafe { huge::is_huge(start) })
        } else {
            // SAFETY: callers ask for at least one byte.
            (NonNull::new(unsafe { alloc_zeroed(layout) })?, false, false)
        };
        held.total.fetch_add(layout.size(), Ordering::Relaxed);
        held.huge.fetch_add(if huge { layout.size() } else { 0 }, Ordering::Relaxed);
        Some(Self { start, layout, mapped, huge, held: Arc::clone(held) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = self.layout.size();
        self.held.total.fetch_sub(bytes, Ordering::Relaxed);
        self.held.huge.fetch_sub(if self.huge { bytes } else { 0 }, Ordering::Relaxed);
        // SAFETY: `start` came from `map` with these bytes or from `alloc_zeroed` with this layout, and is freed
        // once, here.
        unsafe {
            if self.mapped {
                huge::unmap(self.start, bytes);
            } else {
                dealloc(self.start.as_ptr(), self.layout);
            }
        }
    }
}

impl ChunkSource for Cpu {
    type Chunk = Chunk;

    fn allocate(&self, bytes: usize) -> Result<Chunk> {
        if bytes == 0 {
            return Err(Error::Internal("a chunk without bytes was asked for".into()));
        }
        let align = if bytes >= HUGE { HUGE } else { SMALL_ALIGN };
        let layout = Layout::from_size_align(bytes, align).ok();
        let memory = layout.and_then(|layout| Memory::new(layout, &self.held));
        memory.map(|memory| Chunk(Arc::new(memory))).ok_or_else(|| self.held.refused(bytes))
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

    fn all(chunk: &Chunk) -> &[u8] {
        let memory = &chunk.0;
        // SAFETY: the chunk's own bytes, zeroed when allocated; no page of it exists.
        unsafe { std::slice::from_raw_parts(memory.start.as_ptr(), memory.layout.size()) }
    }

    #[test]
    fn chunks_are_zeroed_and_aligned() {
        let cpu = Cpu::new(None).unwrap();
        for (bytes, align) in
            [(64 << 10, 64 << 10), (2 << 20, 2 << 20), (4 << 20, 2 << 20), ((2 << 20) + (64 << 10), 2 << 20)]
        {
            let chunk = cpu.allocate(bytes).unwrap();
            assert_eq!(chunk.0.start.as_ptr().addr() % align, 0);
            assert!(all(&chunk).len() == bytes && all(&chunk).iter().all(|&b| b == 0));
        }
        assert!(matches!(cpu.allocate(0), Err(Error::Internal(_))));
    }

    #[test]
    fn memory_that_the_system_refuses_is_a_capacity_error_that_names_its_bytes() {
        let cpu = Cpu::new(None).unwrap();
        let held = cpu.allocate(1 << 20).unwrap();
        for bytes in [1 << 62, isize::MAX as usize / SMALL_ALIGN * SMALL_ALIGN, usize::MAX] {
            let error = cpu.allocate(bytes).unwrap_err();
            let Error::Capacity { needed, free, capacity, .. } = error else { panic!("{error}") };
            assert_eq!((needed, free, capacity), (bytes as u64, 0, 1 << 20));
            assert!(error.to_string().contains(&bytes.to_string()));
        }
        drop(held);
        assert_eq!(cpu.held.total.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn small_chunks_lie_on_small_pages_and_are_counted() {
        let cpu = Cpu::new(None).unwrap();
        assert!(!cpu.on_huge_pages());
        let small = cpu.allocate(1 << 20).unwrap();
        assert!(!cpu.on_huge_pages() && cpu.held.total.load(Ordering::Relaxed) == 1 << 20);
        let handle = small.clone();
        drop(small);
        assert_eq!(cpu.held.total.load(Ordering::Relaxed), 1 << 20);
        drop(handle);
        assert_eq!(cpu.held.total.load(Ordering::Relaxed), 0);
    }

    /// What the kernel says of the mapping that holds `address`.
    #[cfg(target_os = "linux")]
    fn huge_kib(address: usize) -> Option<usize> {
        let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut inside = false;
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let first = words.next()?;
            if let Some((low, high)) = first.split_once('-') {
                let ends = [low, high].map(|hex| usize::from_str_radix(hex, 16).ok());
                inside = matches!(ends, [Some(low), Some(high)] if (low..high).contains(&address));
            } else if inside && first == "AnonHugePages:" {
                return words.next()?.parse().ok();
            }
        }
        None
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_said_of_huge_pages_is_what_the_kernel_says() {
        let cpu = Cpu::new(None).unwrap();
        let chunks: Vec<_> = (0..4).map(|_| cpu.allocate(2 << 20).unwrap()).collect();
        assert!(chunks.iter().all(|chunk| all(chunk).iter().all(|&b| b == 0)));
        for chunk in &chunks {
            let Some(kib) = huge_kib(chunk.0.start.as_ptr().addr()) else { return };
            assert_eq!(chunk.0.huge, kib >= 2048, "{kib} KiB of the mapping are huge");
        }
        assert_eq!(cpu.on_huge_pages(), chunks.iter().filter(|chunk| chunk.0.huge).count() > 2);
        drop(chunks);
        assert!(!cpu.on_huge_pages());
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
