//! A device behind the driver: memory, copies and kernels in the order of one stream.

mod context;
mod errors;
mod modules;
mod staging;
mod stream;

pub use stream::OnStream;

use crate::embedded::{Archive, Target};
use crate::launcher::{Kernel, Launcher};
use crate::status::{DeviceInfo, MINIMUM_DRIVER_OF_PTX, Missing, Status};
use context::{Context, Driver};
use kvrs_core::{Error, Result};
use modules::Modules;
use staging::Staging;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use stream::Stream;

/// A device, its primary context and the kernels for it.
///
/// All work takes effect in order on one stream: its own, or the one that a call named by [`Device::on_stream`].
/// Every method makes the device current and leaves the thread as it was.
#[derive(Debug)]
pub struct Device {
    // In the order in which they must go.
    staging: Mutex<Staging>,
    modules: Modules,
    stream: Stream,
    context: Arc<Context>,
    info: DeviceInfo,
    pools: bool,
}

impl Device {
    /// Opens device `index` with the embedded kernels.
    ///
    /// # Errors
    /// [`Error::Device`] naming what is missing: kernels, driver, device or code for it; what the driver says.
    pub fn open(index: usize) -> Result<Self> {
        let status = Status::now();
        let info = status.device(index).map_err(|missing| missing.into_error(index))?;
        let archive = Archive::embedded().map_err(|why| Missing::Kernels(why.clone()).into_error(index))?;
        Self::with_kernels(info.clone(), &status, archive)
    }

    /// Opens device `index` with the kernels of an archive.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open_with(index: usize, archive: &'static Archive) -> Result<Self> {
        let mut status = Status::now();
        if matches!(status.missing, Some(Missing::Kernels(_))) {
            status.missing = crate::probe::probe().missing;
        }
        let info = status.device(index).map_err(|missing| missing.into_error(index))?;
        Self::with_kernels(info.clone(), &status, archive)
    }

    fn with_kernels(info: DeviceInfo, status: &Status, archive: &'static Archive) -> Result<Self> {
        let index = info.index;
        let target = target(&info, status, archive).map_err(|missing| missing.into_error(index))?;
        let driver = Driver::load(index)?;
        let context = Arc::new(Context::retain(driver, index)?);
        Ok(Self {
            staging: Mutex::new(Staging::new(context.clone())?),
            modules: Modules::new(context.clone(), archive, target),
            stream: Stream::new(context.clone())?,
            pools: context.has_memory_pools()?,
            context,
            info,
        })
    }

    /// What the driver says of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What the loaded code was compiled for, as `sm_90`.
    #[must_use]
    pub fn target(&self) -> String {
        self.modules.target().to_string()
    }

    /// Free and all bytes of the device's memory, over all processes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let _current = self.context.enter()?;
        self.context.memory_info()
    }

    /// Lets the work that follows take place on a stream of the caller's, as long as the result lives.
    ///
    /// It comes after all earlier work of this device and before all later work, by events: nothing waits on the
    /// host. The stream is a `CUstream` as a number: 0 and 1 are the legacy default stream, 2 the thread's; it must
    /// live as long as the result. Threads that name streams take turns, so one that holds a result must not ask
    /// for another.
    ///
    /// A stream that is being captured into a graph is ordered neither behind nor before work outside of the graph.
    ///
    /// # Errors
    /// [`Error::Device`] if it is a stream of another device; what the driver says.
    pub fn on_stream(&self, stream: u64) -> Result<OnStream<'_>> {
        let _current = self.context.enter()?;
        self.stream.on(stream)
    }

    /// Memory that is not zeroed yet.
    fn allocate_raw(&self, bytes: usize) -> Result<u64> {
        let (driver, stream, mut address) = (self.context.driver(), self.stream.current(), 0);
        // SAFETY: the context is current, and both functions write an address.
        let (call, code) = unsafe {
            if self.pools {
                ("cuMemAllocAsync", (driver.allocate_async)(&raw mut address, bytes, stream))
            } else {
                ("cuMemAlloc", (driver.allocate)(&raw mut address, bytes))
            }
        };
        if code == errors::OUT_OF_MEMORY {
            let (free, total) = self.context.memory_info()?;
            let what = format!("memory of cuda:{}", self.info.index);
            return Err(Error::Capacity { what, needed: bytes as u64, free, capacity: total });
        }
        self.context.check(call, code)?;
        Ok(address)
    }

    /// # Safety
    /// As [`Launcher::free`]; the context is current.
    unsafe fn free_raw(&self, address: u64) -> u32 {
        let (driver, stream) = (self.context.driver(), self.stream.current());
        // SAFETY: the caller's promise; without pools the memory goes at once, so the stream is waited for.
        unsafe {
            if self.pools {
                return (driver.free_async)(address, stream);
            }
            (driver.stream_synchronize)(stream);
            (driver.free)(address)
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Kernels may still run, on memory and modules that go now. A device that cannot say so is lost anyway.
        if self.context.is_alive() {
            let _ = self.synchronize();
        }
    }
}

fn target(info: &DeviceInfo, status: &Status, archive: &Archive) -> std::result::Result<Target, Missing> {
    let device = (info.name.clone(), info.capability);
    let target =
        archive.target_for(info.capability).ok_or(Missing::Code { device, targets: archive.targets() })?;
    match (target, status.driver) {
        (Target::Ptx(_), Some(found)) if found < MINIMUM_DRIVER_OF_PTX => {
            Err(Missing::Driver { found, needed: MINIMUM_DRIVER_OF_PTX })
        }
        _ => Ok(target),
    }
}

impl Launcher for Device {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        let _current = self.context.enter()?;
        self.stream.refuse_capture()?;
        let address = self.allocate_raw(bytes.max(1))?;
        // SAFETY: the memory was just given, and whatever uses it comes later on the stream.
        let code = unsafe { (self.context.driver().fill)(address, 0, bytes, self.stream.current()) };
        let zeroed = self.context.check("cuMemsetD8Async", code);
        if zeroed.is_err() {
            // SAFETY: as above; nobody has the address.
            unsafe { self.free_raw(address) };
        }
        zeroed.map(|()| address)
    }

    unsafe fn free(&self, address: u64, _bytes: usize) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: the caller's promise. What the driver says cannot be passed on, and comes again at the next call.
        unsafe { self.free_raw(address) };
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        let _current = self.context.enter()?;
        self.stream.refuse_capture()?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { staging.upload(from, to, self.stream.current()) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        let _current = self.context.enter()?;
        self.stream.refuse_capture()?;
        let (driver, stream) = (self.context.driver(), self.stream.current());
        // SAFETY: the caller's promise; `to` is borrowed until the copy is done.
        let code = unsafe { (driver.download)(to.as_mut_ptr().cast(), from, to.len(), stream) };
        self.context.check("cuMemcpyDtoHAsync", code)?;
        self.stream.synchronize()
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (self.context.driver().copy)(to, from, bytes, self.stream.current()) };
        self.context.check("cuMemcpyDtoDAsync", code)
    }

    unsafe fn launch(&self, kernel: Kernel, grid: [u32; 3], args: *const c_void) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let _current = self.context.enter()?;
        let function = self.modules.function(kernel.name)?;
        let ([x, y, z], stream, mut parameter) = (grid, self.stream.current(), args.cast_mut());
        let (parameters, extra) = (&raw mut parameter, std::ptr::null_mut());
        // SAFETY: the caller's promise; the driver copies the structure before it returns, by the size that the
        // kernel was compiled with.
        let code = unsafe {
            (self.context.driver().launch)(
                function,
                x,
                y,
                z,
                kernel.threads,
                1,
                1,
                0,
                stream,
                parameters,
                extra,
            )
        };
        self.context.check(kernel.name, code)
    }

    fn processors(&self) -> usize {
        self.info.multiprocessors as usize
    }

    fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        self.stream.refuse_capture()?;
        self.stream.synchronize()
    }
}
