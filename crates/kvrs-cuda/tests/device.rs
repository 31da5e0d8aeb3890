//! The CPU backend's own cases by the kernels on a device: `KVRS_TEST_DEVICE=0` names it, without it nothing runs.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]
#![allow(clippy::print_stdout, reason = "a test that does not run says so")]

#[path = "../../kvrs-cpu/tests/common/mod.rs"]
mod common;

use common::case::Case;
use kvrs_codec::Place;
use kvrs_codec::backend::Backend;
use kvrs_core::statistics::Fold;
use kvrs_cuda::{Cuda, Device};
use std::sync::Arc;

/// Seeds of random descriptors, enough to meet all widths, codecs and transforms.
const SEEDS: u64 = 200;

/// The device under test; a device that is named must open.
fn device() -> Option<Arc<Cuda<Device>>> {
    let Ok(index) = std::env::var("KVRS_TEST_DEVICE") else {
        println!("not run: KVRS_TEST_DEVICE names no device");
        return None;
    };
    let device = Device::open(index.parse().expect("KVRS_TEST_DEVICE is a number")).unwrap();
    println!("on {} with code for {}", device.info().name, device.target());
    Some(Arc::new(Cuda::new(device, Place::Host).unwrap()))
}

#[test]
fn attention_on_random_descriptors_equals_attention_on_what_they_decode_to() {
    let Some(home) = device() else { return };
    for seed in 0..SEEDS {
        Case::random(&home, seed, 200, false).check();
    }
}

#[test]
fn bytes_of_dead_slots_change_nothing() {
    let Some(home) = device() else { return };
    for seed in 0..SEEDS {
        let [clean, poisoned] = [false, true].map(|p| Case::random(&home, seed, 150, p).run(&home));
        assert!(clean == poisoned, "seed {seed}");
    }
    home.flush().unwrap();
}

#[test]
fn the_same_call_gives_the_same_bits_again() {
    let Some(home) = device() else { return };
    for seed in 0..SEEDS / 10 {
        let case = Case::random(&home, seed, 300, false);
        let (first, received) = (case.run(&home), case.received(&home, Fold::Above));
        for _ in 0..3 {
            assert!(case.run(&home) == first, "seed {seed}");
            assert_eq!(case.received(&home, Fold::Above), received, "seed {seed}");
        }
    }
}
