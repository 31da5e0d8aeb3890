//! Device memory: chunks of pages, constants, and working memory that grows with the calls.

use crate::args::{Number, Plain, bytes_of, bytes_of_mut};
use crate::launcher::Launcher;
use crate::queue::Queue;
use kvrs_core::Result;
use kvrs_core::page::Page;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Device bytes that are freed with their last handle.
#[derive(Debug)]
pub(crate) struct Allocation<L: Launcher> {
    launcher: Arc<L>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl<L: Launcher> Allocation<L> {
    pub(crate) fn new(launcher: &Arc<L>, bytes: usize) -> Result<Self> {
        let address = launcher.allocate(bytes)?;
        Ok(Self { launcher: Arc::clone(launcher), address, bytes })
    }

    /// Device memory with these bytes.
    pub(crate) fn of(launcher: &Arc<L>, bytes: &[u8]) -> Result<Self> {
        let new = Self::new(launcher, bytes.len().max(1))?;
        new.fill(bytes)?;
        Ok(new)
    }

    /// Copies host bytes to its beginning.
    pub(crate) fn fill(&self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "an allocation has room for what is put there");
        // SAFETY: it has, by the check above.
        unsafe { self.launcher.upload(bytes, self.address) }
    }
}

impl<L: Launcher> Drop for Allocation<L> {
    fn drop(&mut self) {
        // SAFETY: the allocation is this one's alone, and freed once.
        unsafe { self.launcher.free(self.address, self.bytes) };
    }
}

/// A launcher, and the jobs that wait to be launched on it: everything takes effect in the order of the calls.
#[derive(Debug)]
pub(crate) struct Stream<L: Launcher> {
    pub(crate) launcher: Arc<L>,
    queue: Mutex<Queue<L>>,
    /// Vectors that were not finite and became zeros.
    refused: Allocation<L>,
}

impl<L: Launcher> Stream<L> {
    pub(crate) fn new(launcher: L) -> Result<Self> {
        let launcher = Arc::new(launcher);
        let refused = Allocation::of(&launcher, &[0; 4])?;
        let queue = Mutex::new(Queue::new(&launcher)?);
        Ok(Self { launcher, queue, refused })
    }

    /// The queue, to add jobs to.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue<L>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches what waits; once something that was to be written is lost, every call is told so.
    pub(crate) fn start(&self) -> Result<()> {
        self.queue().flush(&self.launcher, self.refused.address)
    }

    /// What came of writing outside the queue.
    pub(crate) fn written(&self, result: Result<()>) {
        if let Err(error) = result {
            self.queue().lose(&error);
        }
    }

    /// Numbers on the device, after everything that was called before.
    pub(crate) fn download<T: Number>(&self, from: u64, to: &mut [T]) -> Result<()> {
        self.start()?;
        // SAFETY: the callers ask for what a kernel or an upload left there, with its own length.
        unsafe { self.launcher.download(from, bytes_of_mut(to)) }
    }

    /// The bytes of a page.
    pub(crate) fn read(&self, page: &Page<Chunk<L>>, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), page.bytes(), "the bytes of a page");
        self.download(address(page), out)
    }

    /// Fills a page.
    pub(crate) fn fill(&self, page: &mut Page<Chunk<L>>, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), page.bytes(), "the bytes of a page");
        self.start()?;
        // SAFETY: the page has as many bytes, and `&mut` makes them this call's alone.
        unsafe { self.launcher.upload(bytes, address(page)) }
    }

    /// Copies all bytes of a page to another of the same size.
    pub(crate) fn copy_page(&self, from: &Page<Chunk<L>>, to: &mut Page<Chunk<L>>) -> Result<()> {
        assert_eq!(from.bytes(), to.bytes(), "pages of one size");
        self.start()?;
        // SAFETY: both pages have that many bytes, and pages never overlap.
        unsafe { self.launcher.copy(address(from), address(to), from.bytes()) }
    }

    /// Vectors that were stored as zeros.
    pub(crate) fn refused(&self) -> Result<u32> {
        let mut count = [0u32];
        self.download(self.refused.address, &mut count)?;
        Ok(count[0])
    }
}

/// A chunk of device memory, zeroed; freed when its last handle is dropped.
#[derive(Debug)]
pub struct Chunk<L: Launcher>(Arc<Pages<L>>);

#[derive(Debug)]
struct Pages<L: Launcher> {
    memory: Allocation<L>,
    stream: Arc<Stream<L>>,
}

impl<L: Launcher> Drop for Pages<L> {
    fn drop(&mut self) {
        // Jobs on pages of this chunk may still wait; the memory itself is freed after them, in order.
        // What went wrong in them, the next call is told.
        let _ = self.stream.start();
    }
}

impl<L: Launcher> Chunk<L> {
    pub(crate) fn new(stream: &Arc<Stream<L>>, bytes: usize) -> Result<Self> {
        let memory = Allocation::new(&stream.launcher, bytes)?;
        Ok(Self(Arc::new(Pages { memory, stream: Arc::clone(stream) })))
    }
}

impl<L: Launcher> Clone for Chunk<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The device address of a page.
///
/// # Panics
/// If the page does not lie inside its chunk.
pub(crate) fn address<L: Launcher>(page: &Page<Chunk<L>>) -> u64 {
    let chunk = &page.chunk().0.memory;
    let end = page.offset().checked_add(page.bytes());
    assert!(end.is_some_and(|end| end <= chunk.bytes), "pages lie inside their chunk");
    chunk.address + page.offset() as u64
}

/// Working memory that is kept from call to call.
#[derive(Debug)]
pub(crate) struct Buffer<L: Launcher>(Option<Allocation<L>>);

impl<L: Launcher> Default for Buffer<L> {
    fn default() -> Self {
        Self(None)
    }
}

impl<L: Launcher> Buffer<L> {
    /// The address of at least `bytes` bytes, whose content is anything.
    pub(crate) fn of(&mut self, launcher: &Arc<L>, bytes: usize) -> Result<u64> {
        Ok(self.hold(launcher, bytes)?.address)
    }

    /// At least `bytes` bytes, whose content is anything.
    pub(crate) fn hold(&mut self, launcher: &Arc<L>, bytes: usize) -> Result<&Allocation<L>> {
        let held = match self.0.take() {
            Some(held) if held.bytes >= bytes => held,
            // What was too small is free before more is asked for.
            small => {
                drop(small);
                Allocation::new(launcher, bytes.next_power_of_two().max(4096))?
            }
        };
        Ok(self.0.insert(held))
    }
}

/// Host data on its way to the device in one piece, every part aligned to 16 bytes.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    bytes: Vec<u8>,
}

/// Where a part of a [`Parcel`] will stand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part(usize);

impl Part {
    /// Its address, once the parcel is at `base`.
    pub(crate) fn at(self, base: u64) -> u64 {
        base + self.0 as u64
    }
}

impl Parcel {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn add<T: Plain>(&mut self, data: &[T]) -> Part {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let part = Part(self.bytes.len());
        self.bytes.extend_from_slice(bytes_of(data));
        part
    }

    /// Sends everything into `buffer`; its base.
    pub(crate) fn send<L: Launcher>(&self, launcher: &Arc<L>, buffer: &mut Buffer<L>) -> Result<u64> {
        let memory = buffer.hold(launcher, self.bytes.len())?;
        memory.fill(&self.bytes)?;
        Ok(memory.address)
    }
}
