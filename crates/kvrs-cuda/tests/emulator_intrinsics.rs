//! Each operation that kernels use, against what the PTX manual says: integers, floats, the exchange of lanes, matrices
//! and memory. The kernels are `kernels_cu/emu/tests/intrinsics.cu`, in the emulator and on the device that
//! `KVRS_TEST_DEVICE` numbers.
#![cfg(any(feature = "emulate", feature = "cuda"))]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]
#![allow(clippy::print_stdout, reason = "a test that does not run says so")]

mod emulator_common;
#[path = "emulator_intrinsics/floats.rs"]
mod floats;
#[path = "emulator_intrinsics/integers.rs"]
mod integers;
#[path = "emulator_intrinsics/lanes.rs"]
mod lanes;
#[path = "emulator_intrinsics/matrices.rs"]
mod matrices;
#[path = "emulator_intrinsics/memory.rs"]
mod memory;

use emulator_common::{Array, launch};
use kvrs_cuda::Launcher;

/// What the kernels run on: the emulator, first in first out and in a random order, and a device if one is named.
fn launchers() -> Vec<Box<dyn Launcher>> {
    let launchers: Vec<_> = emulators().into_iter().chain(device()).collect();
    if launchers.is_empty() {
        println!("not run: there is no emulator, and KVRS_TEST_DEVICE names no device");
    }
    launchers
}

#[cfg(feature = "emulate")]
fn emulators() -> Vec<Box<dyn Launcher>> {
    use kvrs_cuda::Emulator;
    vec![Box::new(Emulator::new(0)), Box::new(Emulator::new(7).with_threads(2))]
}

#[cfg(not(feature = "emulate"))]
fn emulators() -> Vec<Box<dyn Launcher>> {
    Vec::new()
}

#[cfg(feature = "cuda")]
fn device() -> Option<Box<dyn Launcher>> {
    let index = std::env::var("KVRS_TEST_DEVICE").ok()?;
    let device = kvrs_cuda::Device::open(index.parse().expect("KVRS_TEST_DEVICE is a number")).unwrap();
    Some(Box::new(device))
}

#[cfg(not(feature = "cuda"))]
fn device() -> Option<Box<dyn Launcher>> {
    None
}

#[repr(C)]
struct Words {
    input: u64,
    out: u64,
    count: u32,
}

/// What a kernel that takes `Words` writes, on each launcher.
fn words(
    name: &'static str,
    threads: u32,
    grid: [u32; 3],
    input: &[u32],
    count: usize,
    results: usize,
    check: impl Fn(&[u32]),
) {
    for launcher in launchers() {
        let input = Array::of(launcher.as_ref(), input);
        let out = Array::<u32>::new(launcher.as_ref(), results);
        let args = Words { input: input.address, out: out.address, count: count as u32 };
        launch(launcher.as_ref(), name, threads, grid, &args).unwrap();
        check(&out.read());
    }
}

/// Numbers without a pattern (`SplitMix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn word(&mut self) -> u32 {
        (self.next() >> 32) as u32
    }
}

/// Words with every corner of signs and carries, and words without a pattern.
fn corners(random: usize, seed: u64) -> Vec<u32> {
    let mut generator = Random(seed);
    let fixed = [0, 1, 2, 0x7f, 0x80, 0xff, 0x100, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, 0xffff_ffff];
    let bytes = [0x8080_8080, 0x7f7f_7f7f, 0x80ff_007f, 0x0102_0408];
    fixed.into_iter().chain(bytes).chain((0..random).map(|_| generator.word())).collect()
}
