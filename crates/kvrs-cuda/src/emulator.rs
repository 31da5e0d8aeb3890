//! Runs the kernels on the CPU: each thread of a block in turn, with everything checked that a device does not check.
//!
//! `kernels_cu/emu/README.md` says what is modelled. Launches are done when they return, and an error names kernel,
//! block, thread and line.

mod memory;

use crate::{Kernel, Launcher};
use kvrs_core::{Error, Result};
use memory::Memory;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

unsafe extern "C" {
    fn kvrs_emu_launch(
        kernel: *const c_char,
        grid: *const u32,
        threads: u32,
        args: *const c_void,
        seed: u64,
        os_threads: u32,
        loaded: *mut u64,
        error: *mut c_char,
        error_bytes: usize,
    ) -> c_int;
}

const MESSAGE_BYTES: usize = 2048;

/// A device that is a program: host memory, and kernels run by the emulator.
#[derive(Debug)]
pub struct Emulator {
    seed: u64,
    threads: u32,
    memory: Mutex<Memory>,
    /// Held for the length of a launch: launches take effect in order.
    launched: Mutex<Launched>,
}

#[derive(Debug, Default)]
struct Launched {
    count: u64,
    /// Bytes that each kernel has read from pages.
    loaded: BTreeMap<&'static str, u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Emulator {
    /// A device whose threads run in an order that follows from `seed`, another one in each launch; 0: always first
    /// in, first out.
    ///
    /// # Panics
    /// If the CPU lacks AVX2, FMA or F16C, which the kernels are compiled for.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let has_all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2");
        assert!(has_all, "the emulator runs on CPUs with AVX2, FMA, F16C and BMI2 only");
        Self { seed, threads: 1, memory: Mutex::default(), launched: Mutex::default() }
    }

    /// The same with blocks on `threads` OS threads at a time; 1 unless said otherwise.
    #[must_use]
    pub fn with_threads(self, threads: u32) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// The same with room for `bytes` bytes of memory; more is [`Error::Capacity`].
    #[must_use]
    pub fn with_limit(self, bytes: usize) -> Self {
        lock(&self.memory).set_limit(bytes);
        self
    }

    /// The same with new memory full of 0xFF (not a number in every format) instead of zeros, for tests that nothing
    /// unwritten is read.
    #[must_use]
    pub fn with_poison(self) -> Self {
        lock(&self.memory).set_fill(0xff);
        self
    }

    /// Changes the limit of [`Emulator::with_limit`] from now on; what is allocated stays.
    pub fn set_limit(&self, bytes: usize) {
        lock(&self.memory).set_limit(bytes);
    }

    /// Bytes that `kernel` has read from pages (`kv_load` and `kv_cp_async`) in all launches on this device.
    #[must_use]
    pub fn loaded(&self, kernel: &str) -> u64 {
        lock(&self.launched).loaded.get(kernel).copied().unwrap_or(0)
    }

    /// Sets [`Emulator::loaded`] of all kernels to 0.
    pub fn reset_loaded(&self) {
        lock(&self.launched).loaded.clear();
    }

    /// Bytes in live allocations.
    #[must_use]
    pub fn allocated(&self) -> usize {
        lock(&self.memory).allocated()
    }

    fn launch_seed(&self, count: u64) -> u64 {
        if self.seed == 0 {
            0
        } else {
            self.seed.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15)).max(1)
        }
    }
}

impl Launcher for Emulator {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        lock(&self.memory).allocate(bytes)
    }

    unsafe fn free(&self, address: u64, bytes: usize) {
        lock(&self.memory).free(address, bytes);
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        lock(&self.memory).write(from, to)
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        lock(&self.memory).read(from, to)
    }

    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        lock(&self.memory).copy(from, to, bytes)
    }

    unsafe fn launch(&self, kernel: Kernel, grid: [u32; 3], args: *const c_void) -> Result<()> {
        let name = CString::new(kernel.name).expect("kernels' names are C identifiers");
        let mut launched = lock(&self.launched);
        let seed = self.launch_seed(launched.count);
        launched.count += 1;
        let loaded = launched.loaded.entry(kernel.name).or_default();
        let mut message: [c_char; MESSAGE_BYTES] = [0; MESSAGE_BYTES];
        // SAFETY: the caller answers for `args` and what it points to; the other pointers are to live values of the
        // sizes that the function is told, and the message ends in a NUL.
        let error = unsafe {
            let (grid, text) = (grid.as_ptr(), message.as_mut_ptr());
            let failed = kvrs_emu_launch(
                name.as_ptr(),
                grid,
                kernel.threads,
                args,
                seed,
                self.threads,
                loaded,
                text,
                MESSAGE_BYTES,
            );
            (failed != 0).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let name = kernel.name;
        let overrun = |bytes| format!("kernel {name} wrote outside of an allocation of {bytes} bytes");
        let error = error.or_else(|| lock(&self.memory).overrun().map(overrun));
        error.map_or(Ok(()), |message| Err(Error::Internal(message)))
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
