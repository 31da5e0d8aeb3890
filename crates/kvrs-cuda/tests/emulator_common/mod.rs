//! Arrays on a launcher, and launches with arguments of any type.
#![allow(dead_code, reason = "each test file uses its part")]

use kvrs_core::Result;
use kvrs_cuda::{Kernel, Launcher};
use std::marker::PhantomData;

/// Plain numbers and structures of numbers: any bytes are a value.
///
/// # Safety
/// The type has no padding and no invalid bit patterns.
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ty),*) => {$(
        // SAFETY: a number.
        unsafe impl Plain for $name {}
    )*};
}
plain!(u8, i8, u16, u32, i32, u64, f32, f64);

// SAFETY: elements lie one after the other.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: plain values have no padding, and bytes no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// `len` elements in a launcher's memory, which is given back at the end.
pub(crate) struct Array<'a, T: Plain> {
    launcher: &'a dyn Launcher,
    pub(crate) address: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<'a, T: Plain> Array<'a, T> {
    pub(crate) fn new(launcher: &'a dyn Launcher, len: usize) -> Self {
        let address = launcher.allocate(len * size_of::<T>()).unwrap();
        Self { launcher, address, len, element: PhantomData }
    }

    pub(crate) fn of(launcher: &'a dyn Launcher, values: &[T]) -> Self {
        let array = Self::new(launcher, values.len());
        // SAFETY: the array has room for the values.
        unsafe { launcher.upload(bytes(values), array.address).unwrap() };
        array
    }

    pub(crate) fn read(&self) -> Vec<T> {
        let mut raw = vec![0; self.len * size_of::<T>()];
        // SAFETY: the array has as many bytes; any bytes are a value of a plain type.
        unsafe {
            self.launcher.download(self.address, &mut raw).unwrap();
            (0..self.len).map(|i| raw.as_ptr().cast::<T>().add(i).read_unaligned()).collect()
        }
    }
}

impl<T: Plain> Drop for Array<'_, T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and launches are over.
        unsafe { self.launcher.free(self.address, self.len * size_of::<T>()) };
    }
}

/// Launches a kernel of `kernels_cu/emu/tests` with the structure that it takes.
pub(crate) fn launch<A>(
    launcher: &dyn Launcher,
    name: &'static str,
    threads: u32,
    grid: [u32; 3],
    args: &A,
) -> Result<()> {
    // SAFETY: each test passes the structure of its kernel, with addresses of arrays as long as the kernel expects.
    unsafe { launcher.launch(Kernel { name, threads }, grid, std::ptr::from_ref(args).cast())? };
    launcher.synchronize()
}
