//! The emulator runs correct kernels as a device does.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod emulator_common;

use emulator_common::{Array, launch};
use kvrs_core::Error;
use kvrs_cuda::{Emulator, Launcher};
use std::time::Instant;

#[repr(C)]
struct InOut {
    input: u64,
    out: u64,
}

#[repr(C)]
struct Turns {
    out: u64,
    rounds: u32,
}

#[repr(C)]
struct Stage {
    input: u64,
    out: u64,
    valid: u32,
}

fn sum_rows(emulator: &Emulator) -> (Vec<f32>, Vec<f32>) {
    let values: Vec<f32> = (0..60 * 256).map(|i| (i % 97) as f32 - 40.0).collect();
    let expected = values.chunks(256).map(|row| row.iter().sum()).collect();
    let (input, out) = (Array::of(emulator, &values), Array::<f32>::new(emulator, 60));
    let args = InOut { input: input.address, out: out.address };
    launch(emulator, "emu_sum_rows", 128, [3, 4, 5], &args).unwrap();
    (out.read(), expected)
}

#[test]
fn a_correct_kernel_gives_the_same_result_in_any_order_of_threads_and_blocks() {
    let seeds = if cfg!(kvrs_emu_thread) { 3 } else { 30 };
    for seed in 0..seeds {
        for threads in [1, 2, 5] {
            let emulator = Emulator::new(seed).with_threads(threads);
            let (sums, expected) = sum_rows(&emulator);
            assert_eq!(sums, expected, "seed {seed}, {threads} threads");
        }
    }
}

#[test]
fn bytes_read_from_pages_are_counted_by_kernel() {
    let emulator = Emulator::new(1).with_threads(2);
    sum_rows(&emulator);
    assert_eq!(emulator.loaded("emu_sum_rows"), 60 * 256 * 4);
    sum_rows(&emulator);
    assert_eq!(emulator.loaded("emu_sum_rows"), 2 * 60 * 256 * 4);
    assert_eq!(emulator.loaded("emu_turns"), 0);
    emulator.reset_loaded();
    assert_eq!(emulator.loaded("emu_sum_rows"), 0);
}

#[test]
fn parts_of_a_warp_have_collectives_of_their_own() {
    for seed in 0..20 {
        let emulator = Emulator::new(seed);
        let out = Array::<u32>::new(&emulator, 32);
        launch(&emulator, "emu_halves", 32, [1, 1, 1], &out.address).unwrap();
        let pair = |lane: u32| lane + (lane ^ 1);
        let expected: Vec<u32> =
            (0..32).map(|lane| 7 + if lane < 16 { 2 * pair(lane) } else { 4 * pair(lane) }).collect();
        assert_eq!(out.read(), expected, "seed {seed}");
    }
}

#[test]
fn asynchronous_copies_land_at_the_wait_and_invalid_ones_write_zeros() {
    let values: Vec<[u32; 4]> = (0..3 * 256).map(|i| [i, i + 1, i + 2, i + 3]).collect();
    for (seed, valid) in [(0, 64), (1, 64), (2, 40), (3, 0)] {
        let emulator = Emulator::new(seed);
        let (input, out) = (Array::of(&emulator, &values), Array::<[u32; 4]>::new(&emulator, values.len()));
        let args = Stage { input: input.address, out: out.address, valid };
        launch(&emulator, "emu_stage", 64, [3, 1, 1], &args).unwrap();
        for (i, got) in out.read().into_iter().enumerate() {
            let (tile, slot) = (i / 64, 63 - i % 64);
            let expected = if slot < valid as usize { values[64 * tile + slot] } else { [0; 4] };
            assert_eq!(got, expected, "seed {seed}, {valid} valid, element {i}");
        }
        assert_eq!(emulator.loaded("emu_stage"), u64::from(3 * 4 * valid * 16));
    }
}

#[test]
fn memory_is_zero_unless_it_is_asked_to_be_poisoned() {
    assert_eq!(Array::<u8>::new(&Emulator::new(0), 999).read(), vec![0; 999]);
    assert_eq!(Array::<u8>::new(&Emulator::new(0).with_poison(), 999).read(), vec![0xff; 999]);
}

#[test]
fn more_memory_than_the_limit_is_refused_and_nothing_changes() {
    let emulator = Emulator::new(0).with_limit(1000);
    let first = emulator.allocate(600).unwrap();
    assert_eq!(first % 256, 0);
    let refused = emulator.allocate(401).unwrap_err();
    let Error::Capacity { needed, free, capacity, .. } = refused else { panic!("{refused}") };
    assert_eq!((needed, free, capacity), (401, 400, 1000));
    assert_eq!(emulator.allocated(), 600);
    // SAFETY: the only allocation, which nothing uses.
    unsafe { emulator.free(first, 600) };
    assert_eq!(emulator.allocated(), 0);
    assert!(emulator.allocate(1000).is_ok());
}

#[test]
fn copies_outside_of_an_allocation_are_refused() {
    let emulator = Emulator::new(0);
    let array = Array::<u8>::new(&emulator, 100);
    let other = Array::<u8>::new(&emulator, 100);
    let mut room = [0; 101];
    // SAFETY: the emulator checks ranges itself, which is what is tried here.
    unsafe {
        assert!(emulator.upload(&room, array.address).is_err());
        assert!(emulator.download(array.address + 1, &mut room[..100]).is_err());
        assert!(emulator.copy(array.address, other.address, 101).is_err());
        assert!(emulator.copy(array.address, array.address + 50, 51).is_err());
        assert!(emulator.copy(array.address, array.address + 50, 50).is_ok());
        assert!(emulator.copy(array.address, other.address, 100).is_ok());
    }
}

#[test]
fn what_a_driver_refuses_is_refused() {
    let emulator = Emulator::new(0);
    let out = Array::<u32>::new(&emulator, 32);
    let message =
        |name, threads, grid| launch(&emulator, name, threads, grid, &out.address).unwrap_err().to_string();
    assert!(message("emu_absent", 32, [1, 1, 1]).contains("no kernel is called emu_absent"));
    assert!(message("emu_halves", 64, [1, 1, 1]).contains("64 threads; allowed: 32"));
    assert!(message("emu_halves", 32, [1, 0, 1]).contains("a grid of (1, 0, 1) blocks"));
    assert!(message("emu_halves", 32, [1, 1, 65536]).contains("a grid of (1, 1, 65536) blocks"));
}

#[test]
fn changes_of_threads_are_fast_enough_for_thousands_of_blocks() {
    let emulator = Emulator::new(0);
    let (blocks, rounds) = (8, 200);
    let out = Array::<u32>::new(&emulator, blocks * 256);
    let start = Instant::now();
    launch(&emulator, "emu_turns", 256, [blocks as u32, 1, 1], &Turns { out: out.address, rounds }).unwrap();
    let changes = (blocks * 256 * 2 * rounds as usize) as f64;
    println!("{:.1} million changes a second", changes / start.elapsed().as_secs_f64() / 1e6);
    assert!(start.elapsed().as_secs() < 30, "{:?} for {changes} changes of threads", start.elapsed());
}
