//! The primary context of a device, current only while it is used.

use super::errors;
use crate::api::{Api, Basics};
use crate::probe::attribute;
use crate::status::Missing;
use cudarc::driver::sys::{CUcontext, CUdevice, CUevent};
use kvrs_core::Result;
use std::ffi::c_int;

const NO_TIMING: u32 = 2;

/// The functions of an initialised driver.
#[derive(Debug)]
pub(super) struct Driver {
    pub(super) basics: Basics,
    pub(super) api: Api,
}

impl Driver {
    /// Looks the functions up; `index` is the device of the error.
    pub(super) fn load(index: usize) -> Result<Self> {
        let load = || Ok::<_, Missing>(Self { basics: Basics::load()?, api: Api::load()? });
        load().map_err(|missing| missing.into_error(index))
    }
}

/// A share in the primary context of a device, which torch and all other users of the device share too.
#[derive(Debug)]
pub(super) struct Context {
    driver: Driver,
    raw: CUcontext,
    device: CUdevice,
    index: usize,
    process: u32,
}

// SAFETY: the driver is safe to call from any thread; `raw` is a handle that is never dereferenced here.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the context; the driver has been initialised by the probe that found the device.
    pub(super) fn retain(driver: Driver, index: usize) -> Result<Self> {
        let (mut device, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: the functions check their arguments and write handles.
        let code = unsafe { (driver.basics.device)(&raw mut device, index as c_int) };
        check(&driver, index, "cuDeviceGet", code)?;
        // SAFETY: as above.
        let code = unsafe { (driver.api.retain)(&raw mut raw, device) };
        check(&driver, index, "cuDevicePrimaryCtxRetain", code)?;
        Ok(Self { driver, raw, device, index, process: std::process::id() })
    }

    pub(super) fn driver(&self) -> &Api {
        &self.driver.api
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Whether the driver still knows this context: its state does not survive a fork of the process.
    pub(super) fn is_alive(&self) -> bool {
        self.process == std::process::id()
    }

    /// Makes the context current for as long as the result lives.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained.
        self.check("cuCtxPushCurrent", unsafe { (self.driver.api.push)(self.raw) })?;
        Ok(Entered(self))
    }

    /// The error of a call that gave `code`; 0 is none.
    pub(super) fn check(&self, call: &str, code: u32) -> Result<()> {
        check(&self.driver, self.index, call, code)
    }

    /// An event that orders work and measures no time; the context is current.
    pub(super) fn new_event(&self) -> Result<CUevent> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the function writes a handle.
        let code = unsafe { (self.driver.api.event_new)(&raw mut event, NO_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// Free and all bytes of the device; the context is current.
    pub(super) fn memory_info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function writes two numbers.
        let code = unsafe { (self.driver.api.memory_info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// Whether memory can be given and taken in the order of a stream; some virtual devices cannot.
    pub(super) fn has_memory_pools(&self) -> Result<bool> {
        let value = attribute(&self.driver.basics, self.device, attribute::MEMORY_POOLS);
        value.map(|value| value != 0).map_err(|missing| missing.into_error(self.index))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_alive() {
            // SAFETY: the share was retained once and everything made in it is gone.
            unsafe { (self.driver.api.release)(self.device) };
        }
    }
}

fn check(driver: &Driver, index: usize, call: &str, code: u32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(errors::error(&driver.basics, index, call, code)) }
}

/// A context that is current; the one before comes back when it goes.
#[derive(Debug)]
pub(super) struct Entered<'a>(&'a Context);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: this thread pushed it, and pushes and pops are nested.
        unsafe { (self.0.driver.api.pop)(&raw mut popped) };
    }
}
