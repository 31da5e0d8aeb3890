//! The emulated device's memory: host allocations of exactly the size asked for, so that a sanitizer sees their ends,
//! and without one with margins that tell of a write.

use kvrs_core::{Error, Result};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};

/// A device's allocations start at multiples of this.
const ALIGN: usize = 256;

/// Freed memory that is kept, full of 0xFF, so that a kernel which still reads it gets no number. Under the
/// address sanitizer nothing is kept here: that keeps it itself, and reports the read.
const QUARANTINE_BYTES: usize = if cfg!(kvrs_emu_address) { 0 } else { 64 << 20 };

const FREED: u8 = 0xff;

/// Bytes of 0xFF on both sides of an allocation, which are no number to a kernel that reads them, and must stay.
/// The address sanitizer has its own.
const MARGIN: usize = if cfg!(kvrs_emu_address) { 0 } else { ALIGN };

const MARGIN_BYTE: u8 = 0xff;

/// All allocations of one device.
#[derive(Debug)]
pub(super) struct Memory {
    live: BTreeMap<u64, usize>,
    allocated: usize,
    limit: usize,
    fill: u8,
    freed: VecDeque<(u64, usize)>,
    freed_bytes: usize,
}

impl Default for Memory {
    fn default() -> Self {
        let (live, freed) = (BTreeMap::new(), VecDeque::new());
        Self { live, allocated: 0, limit: usize::MAX, fill: 0, freed, freed_bytes: 0 }
    }
}

/// The layout of an allocation with its margins.
fn layout(bytes: usize) -> Option<Layout> {
    let all = bytes.max(1).checked_add(2 * MARGIN)?;
    Layout::from_size_align(all, ALIGN).ok()
}

/// Allocates with margins; null if the host has no such memory.
fn allocate_host(bytes: usize, fill: u8) -> *mut u8 {
    let Some(layout) = layout(bytes) else { return std::ptr::null_mut() };
    // SAFETY: the layout is not empty.
    let start = unsafe { alloc(layout) };
    if start.is_null() {
        return start;
    }
    // SAFETY: the memory was just allocated with room for the bytes and both margins.
    unsafe {
        start.write_bytes(MARGIN_BYTE, MARGIN);
        start.add(MARGIN).write_bytes(fill, bytes);
        start.add(MARGIN + bytes).write_bytes(MARGIN_BYTE, MARGIN);
        start.add(MARGIN)
    }
}

/// Gives back what [`allocate_host`] gave.
///
/// # Safety
/// `address` is of such an allocation of `bytes` bytes, which nothing uses any more.
unsafe fn deallocate_host(address: u64, bytes: usize) {
    let layout = layout(bytes).expect("it was allocated");
    // SAFETY: the caller says so.
    unsafe { dealloc(pointer(address).sub(MARGIN), layout) };
}

/// The host's pointer for a device's address.
fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

impl Memory {
    pub(super) fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    pub(super) fn set_fill(&mut self, byte: u8) {
        self.fill = byte;
    }

    pub(super) fn allocated(&self) -> usize {
        self.allocated
    }

    pub(super) fn allocate(&mut self, bytes: usize) -> Result<u64> {
        let free = self.limit.saturating_sub(self.allocated);
        let memory = if bytes <= free { allocate_host(bytes, self.fill) } else { std::ptr::null_mut() };
        if memory.is_null() {
            let what = format!("an allocation of {bytes} bytes on the emulated device");
            let (needed, free, capacity) = (bytes as u64, free as u64, self.limit as u64);
            return Err(Error::Capacity { what, needed, free, capacity });
        }
        let address = memory.expose_provenance() as u64;
        self.live.insert(address, bytes);
        self.allocated += bytes;
        Ok(address)
    }

    /// Frees an allocation; anything else is a bug of the caller.
    pub(super) fn free(&mut self, address: u64, bytes: usize) {
        let found = self.live.remove(&address);
        assert_eq!(found, Some(bytes), "free({address:#x}, {bytes}) is of no live allocation");
        self.allocated -= bytes;
        // SAFETY: it was a live allocation of this size, and nothing else refers to it any more.
        unsafe { pointer(address).write_bytes(FREED, bytes) };
        self.freed.push_back((address, bytes));
        self.freed_bytes += bytes;
        while self.freed_bytes > QUARANTINE_BYTES {
            self.release_oldest();
        }
    }

    fn release_oldest(&mut self) {
        let (address, bytes) = self.freed.pop_front().expect("there are freed bytes");
        self.freed_bytes -= bytes;
        // SAFETY: allocated with this size, and released once: it leaves the list here.
        unsafe { deallocate_host(address, bytes) };
    }

    /// The size of an allocation whose margins were written to.
    pub(super) fn overrun(&self) -> Option<usize> {
        let intact = |&(&address, &bytes): &(&u64, &usize)| {
            // SAFETY: margins lie on both sides of every live allocation.
            let margins = unsafe {
                let start = pointer(address);
                [start.sub(MARGIN), start.add(bytes)].map(|margin| std::slice::from_raw_parts(margin, MARGIN))
            };
            margins.into_iter().flatten().all(|&byte| byte == MARGIN_BYTE)
        };
        self.live.iter().find(|allocation| !intact(allocation)).map(|(_, &bytes)| bytes)
    }

    /// Finds out whether a range lies in one live allocation.
    fn check(&self, what: &str, address: u64, bytes: usize) -> Result<()> {
        let inside = self.live.range(..=address).next_back().is_some_and(|(&start, &size)| {
            let offset = (address - start) as usize;
            offset <= size && bytes <= size - offset
        });
        if inside || bytes == 0 {
            return Ok(());
        }
        Err(Error::Internal(format!(
            "{what} of {bytes} bytes at {address:#x}, which lie in no live allocation"
        )))
    }

    pub(super) fn write(&mut self, from: &[u8], to: u64) -> Result<()> {
        self.check("upload", to, from.len())?;
        // SAFETY: the range is allocated; the host's bytes are elsewhere.
        unsafe { pointer(to).copy_from(from.as_ptr(), from.len()) };
        Ok(())
    }

    pub(super) fn read(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.check("download", from, to.len())?;
        // SAFETY: the range is allocated, and was filled when it was.
        unsafe { to.as_mut_ptr().copy_from(pointer(from), to.len()) };
        Ok(())
    }

    pub(super) fn copy(&mut self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.check("copy", from, bytes)?;
        self.check("copy", to, bytes)?;
        let overlap = from < to + bytes as u64 && to < from + bytes as u64;
        if overlap && bytes > 0 {
            return Err(Error::Internal(format!(
                "copy of {bytes} bytes from {from:#x} to {to:#x}, which overlap"
            )));
        }
        // SAFETY: both ranges are allocated and apart.
        unsafe { pointer(to).copy_from_nonoverlapping(pointer(from), bytes) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.freed.extend(std::mem::take(&mut self.live));
        self.freed_bytes = self.freed.iter().map(|&(_, bytes)| bytes).sum();
        while !self.freed.is_empty() {
            self.release_oldest();
        }
    }
}
