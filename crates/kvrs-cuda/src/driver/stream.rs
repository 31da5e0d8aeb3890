//! The stream that work takes place on: the device's own, or for a while a caller's.

use super::context::Context;
use cudarc::driver::sys::{CUevent, CUstream, CUstream_st};
use kvrs_core::{Error, Result};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const NON_BLOCKING: u32 = 1;
const NOBODY: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    own: CUstream,
    handover: CUevent,
    current: AtomicPtr<CUstream_st>,
    /// The driver's id of the caller's stream that the own one waits for and does nothing else since: work that goes
    /// back there needs no order. Ids, other than handles, are never used twice.
    behind: AtomicU64,
    turn: Mutex<()>,
}

// SAFETY: handles of the driver, which any thread may use; they are never dereferenced here.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Work takes place on a caller's stream as long as this lives.
#[derive(Debug)]
pub struct OnStream<'a> {
    stream: &'a Stream,
    captured: bool,
    _turn: MutexGuard<'a, ()>,
}

impl Stream {
    pub(super) fn new(context: Arc<Context>) -> Result<Self> {
        let mut own = std::ptr::null_mut();
        let current = context.enter()?;
        let handover = context.new_event()?;
        // SAFETY: the function writes a handle.
        let code = unsafe { (context.driver().stream_new)(&raw mut own, NON_BLOCKING) };
        context.check("cuStreamCreate", code)?;
        drop(current);
        let (current, behind) = (AtomicPtr::new(own), AtomicU64::new(NOBODY));
        Ok(Self { context, own, handover, current, behind, turn: Mutex::new(()) })
    }

    /// The stream that work goes to now.
    pub(super) fn current(&self) -> CUstream {
        let current = self.current.load(Ordering::Acquire);
        if current == self.own {
            self.behind.store(NOBODY, Ordering::Release);
        }
        current
    }

    /// Takes turns and goes over to a caller's stream; the context is current.
    pub(super) fn on(&self, stream: u64) -> Result<OnStream<'_>> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = std::ptr::without_provenance_mut(stream as usize);
        self.check_device(stream)?;
        let captured = self.is_capturing(stream)?;
        if !captured && self.behind.load(Ordering::Acquire) != self.id(stream)? {
            self.order(self.own, stream)?;
        }
        self.current.store(stream, Ordering::Release);
        Ok(OnStream { stream: self, captured, _turn: turn })
    }

    /// Comes back to the own stream, whose next work waits for the caller's.
    fn back(&self, captured: bool) -> Result<()> {
        let stream = self.current.swap(self.own, Ordering::AcqRel);
        if captured {
            return Ok(());
        }
        let _current = self.context.enter()?;
        self.order(stream, self.own)?;
        self.behind.store(self.id(stream)?, Ordering::Release);
        Ok(())
    }

    fn id(&self, stream: CUstream) -> Result<u64> {
        let mut id = NOBODY;
        // SAFETY: the stream is alive; the function writes a number.
        let code = unsafe { (self.context.driver().stream_id)(stream, &raw mut id) };
        self.context.check("cuStreamGetId", code)?;
        Ok(id)
    }

    /// Lets what comes on `after` wait for what is on `before`.
    fn order(&self, before: CUstream, after: CUstream) -> Result<()> {
        let driver = self.context.driver();
        // SAFETY: both streams and the event are alive.
        self.context.check("cuEventRecord", unsafe { (driver.event_record)(self.handover, before) })?;
        // SAFETY: as above.
        self.context.check("cuStreamWaitEvent", unsafe { (driver.stream_wait)(after, self.handover, 0) })
    }

    fn check_device(&self, stream: CUstream) -> Result<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the caller's stream is one of the driver's; the function writes a handle.
        let code = unsafe { (self.context.driver().stream_context)(stream, &raw mut context) };
        self.context.check("cuStreamGetCtx", code)?;
        if context == self.context.raw() {
            return Ok(());
        }
        let own = format!("a stream of cuda:{}", self.context.index());
        Err(Error::device("the stream", "another device", own))
    }

    fn is_capturing(&self, stream: CUstream) -> Result<bool> {
        let mut state = 0;
        // SAFETY: the stream is alive; the function writes a number.
        let code = unsafe { (self.context.driver().stream_capturing)(stream, &raw mut state) };
        self.context.check("cuStreamIsCapturing", code)?;
        Ok(state != 0)
    }

    /// Work that goes through host memory cannot be repeated by a graph.
    pub(super) fn refuse_capture(&self) -> Result<()> {
        if !self.is_capturing(self.current())? {
            return Ok(());
        }
        let allowed = "a stream that is not: a call brings its lists of pages from host memory";
        Err(Error::device("the stream", "its way into a CUDA graph", allowed))
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        let code = unsafe { (self.context.driver().stream_synchronize)(self.current()) };
        self.context.check("cuStreamSynchronize", code)
    }
}

impl Drop for OnStream<'_> {
    fn drop(&mut self) {
        // What the driver says of a broken device comes again at the next call.
        let _ = self.stream.back(self.captured);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.context.is_alive() {
            return;
        }
        let Ok(_current) = self.context.enter() else { return };
        let driver = self.context.driver();
        // SAFETY: what was launched here is waited for; the handles are alive and nobody has them any more.
        unsafe {
            (driver.stream_synchronize)(self.own);
            (driver.event_drop)(self.handover);
            (driver.stream_drop)(self.own);
        }
    }
}
