//! Attention by the kernels, run by the emulator, against its definition in f64: the CPU backend's own cases.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

#[path = "../../kvrs-cpu/tests/common/mod.rs"]
mod common;

use common::case::Case;
use kvrs_codec::Place;
use kvrs_codec::backend::Backend;
use kvrs_core::statistics::Fold;
use kvrs_cuda::{Cuda, Emulator};
use proptest::prelude::*;
use std::sync::Arc;

type Emulated = Cuda<Emulator>;

fn emulated(seed: u64) -> Arc<Emulated> {
    Arc::new(Cuda::new(Emulator::new(seed).with_poison().with_threads(2), Place::Host).unwrap())
}

/// `PROPTEST_CASES`, or enough to meet most combinations.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").map_or(24, |cases| cases.parse().unwrap());
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn attention_on_random_descriptors_equals_attention_on_what_they_decode_to(seed: u64) {
        Case::random(&emulated(seed), seed, 200, false).check();
    }

    #[test]
    fn bytes_of_dead_slots_change_nothing(seed: u64) {
        let home = emulated(seed);
        let [clean, poisoned] = [false, true].map(|p| Case::random(&home, seed, 150, p).run(&home));
        home.flush().unwrap();
        prop_assert!(clean == poisoned);
    }
}

#[test]
fn results_do_not_depend_on_the_order_of_threads() {
    for seed in 0..3 {
        let home = emulated(0);
        let case = Case::random(&home, seed, 300, false);
        let (first, received) = (case.run(&home), case.received(&home, Fold::Above));
        for order in [1, 2] {
            let other = emulated(order);
            assert!(case.run(&other) == first, "seed {seed}, order {order}");
            assert_eq!(case.received(&other, Fold::Above), received, "seed {seed}, order {order}");
            other.flush().unwrap();
        }
    }
}
