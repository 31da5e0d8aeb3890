//! Pinned memory that uploads pass through, so that the caller's bytes may go at once and nothing waits.

use super::context::Context;
use cudarc::driver::sys::{CUevent, CUstream};
use kvrs_core::Result;
use std::ffi::c_void;
use std::sync::Arc;

/// Bytes that one copy takes along; longer uploads take several.
const SLOT: usize = 64 << 10;
/// Copies that may be under way before an upload waits for the oldest.
const SLOTS: usize = 32;

/// A ring of slots, each with an event that says when its copy is done.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<Context>,
    memory: *mut c_void,
    events: Vec<CUevent>,
    next: usize,
}

// SAFETY: the memory is owned, and the events are handles that any thread may use.
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let mut made = Self { context, memory: std::ptr::null_mut(), events: Vec::new(), next: 0 };
        let context = made.context.clone();
        let _current = context.enter()?;
        // SAFETY: the function writes an address.
        let code = unsafe { (context.driver().pin)(&raw mut made.memory, SLOT * SLOTS, 0) };
        context.check("cuMemHostAlloc", code)?;
        for _ in 0..SLOTS {
            made.events.push(context.new_event()?);
        }
        Ok(made)
    }

    /// Copies host bytes to the device, in the order of the stream; the context is current.
    ///
    /// # Safety
    /// `to .. to + from.len()` lies in one allocation.
    pub(super) unsafe fn upload(&mut self, from: &[u8], to: u64, stream: CUstream) -> Result<()> {
        for (piece, bytes) in from.chunks(SLOT).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { self.upload_piece(bytes, to + (piece * SLOT) as u64, stream)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Staging::upload`], with at most [`SLOT`] bytes.
    unsafe fn upload_piece(&mut self, from: &[u8], to: u64, stream: CUstream) -> Result<()> {
        let (driver, event) = (self.context.driver(), self.events[self.next]);
        // SAFETY: an event that was never recorded counts as done.
        self.context.check("cuEventSynchronize", unsafe { (driver.event_synchronize)(event) })?;
        let slot = self.memory.wrapping_byte_add(self.next * SLOT);
        // SAFETY: the slot has room, and the copy that used it last is done.
        unsafe { slot.cast::<u8>().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        // SAFETY: the caller's promise; the slot stays until the event is done.
        self.context.check("cuMemcpyHtoDAsync", unsafe { (driver.upload)(to, slot, from.len(), stream) })?;
        self.next = (self.next + 1) % SLOTS;
        // SAFETY: both handles are alive.
        self.context.check("cuEventRecord", unsafe { (driver.event_record)(event, stream) })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.context.is_alive() {
            return;
        }
        let Ok(_current) = self.context.enter() else { return };
        for event in self.events.drain(..) {
            // SAFETY: the event is alive, and so is the memory until its copy is done.
            unsafe {
                (self.context.driver().event_synchronize)(event);
                (self.context.driver().event_drop)(event);
            }
        }
        if !self.memory.is_null() {
            // SAFETY: all copies out of it are done.
            unsafe { (self.context.driver().unpin)(self.memory) };
        }
    }
}
