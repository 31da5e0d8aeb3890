//! The device of a build without the feature `cuda`: there is none, so that callers need not ask for the feature.

use crate::launcher::{Kernel, Launcher};
use crate::status::{DeviceInfo, Missing};
use kvrs_core::Result;
use std::ffi::c_void;

/// A device, which cannot be had in this build.
#[derive(Debug)]
pub enum Device {}

/// Work on a caller's stream, which cannot be had in this build.
#[derive(Debug)]
pub enum OnStream {}

impl Device {
    /// Says that this build has no devices.
    ///
    /// # Errors
    /// [`kvrs_core::Error::Device`], always.
    pub fn open(index: usize) -> Result<Self> {
        Err(Missing::Feature.into_error(index))
    }

    /// What the driver says of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        match *self {}
    }

    /// What the loaded code was compiled for.
    #[must_use]
    pub fn target(&self) -> String {
        match *self {}
    }

    /// Free and all bytes of the device's memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<(u64, u64)> {
        match *self {}
    }

    /// Lets the work that follows take place on a stream of the caller's.
    ///
    /// # Errors
    /// What the driver says.
    pub fn on_stream(&self, _stream: u64) -> Result<OnStream> {
        match *self {}
    }
}

impl Launcher for Device {
    fn allocate(&self, _bytes: usize) -> Result<u64> {
        match *self {}
    }

    unsafe fn free(&self, _address: u64, _bytes: usize) {
        match *self {}
    }

    unsafe fn upload(&self, _from: &[u8], _to: u64) -> Result<()> {
        match *self {}
    }

    unsafe fn download(&self, _from: u64, _to: &mut [u8]) -> Result<()> {
        match *self {}
    }

    unsafe fn copy(&self, _from: u64, _to: u64, _bytes: usize) -> Result<()> {
        match *self {}
    }

    unsafe fn launch(&self, _kernel: Kernel, _grid: [u32; 3], _args: *const c_void) -> Result<()> {
        match *self {}
    }

    fn synchronize(&self) -> Result<()> {
        match *self {}
    }
}
