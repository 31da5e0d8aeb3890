//! What runs kernels: a device, or the emulator.

use kvrs_core::Result;
use std::ffi::c_void;
use std::fmt::Debug;

/// A kernel of `kernels_cu/`, named as in the compiled code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// The `extern "C"` name.
    pub name: &'static str,
    /// Threads of a block.
    pub threads: u32,
}

/// Device memory and the kernels that work on it, in the order in which they are called.
///
/// Addresses are the device's. All calls of one launcher take effect in order, as on one stream.
pub trait Launcher: Debug + Send + Sync + 'static {
    /// Allocates `bytes` zeroed bytes, aligned to 256.
    ///
    /// # Errors
    /// [`kvrs_core::Error::Capacity`] if the device has not that much memory.
    fn allocate(&self, bytes: usize) -> Result<u64>;

    /// Frees what [`Launcher::allocate`] gave, once everything that was called before is done with it.
    ///
    /// # Safety
    /// `address` and `bytes` are those of one live allocation, which nothing uses any more.
    unsafe fn free(&self, address: u64, bytes: usize);

    /// Copies host bytes to the device; `from` may be reused at once.
    ///
    /// # Safety
    /// `to .. to + from.len()` lies in one allocation.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()>;

    /// Copies device bytes to the host, after everything that was called before.
    ///
    /// # Safety
    /// `from .. from + to.len()` lies in one allocation.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Copies bytes on the device.
    ///
    /// # Safety
    /// Both ranges lie in an allocation each and do not overlap.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()>;

    /// Runs `kernel` on `grid` blocks; its only parameter is the structure at `args`.
    ///
    /// # Safety
    /// `args` points to the structure that the kernel takes, and the addresses in it to what the kernel reads and
    /// writes.
    ///
    /// # Errors
    /// What the driver says, or what the emulator found wrong with the kernel.
    unsafe fn launch(&self, kernel: Kernel, grid: [u32; 3], args: *const c_void) -> Result<()>;

    /// Multiprocessors, among which long tables are divided.
    fn processors(&self) -> usize {
        1
    }

    /// Waits until everything that was called is done.
    ///
    /// # Errors
    /// What the driver says.
    fn synchronize(&self) -> Result<()>;
}
