//! Attention on packed pages against its definition in f64 over decoded slots.

#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod common;

use common::case::Case;
use kvrs_codec::backend::Backend;
use kvrs_core::statistics::Fold;
use kvrs_cpu::Cpu;
use proptest::prelude::*;
use std::sync::Arc;

/// `PROPTEST_CASES`, or enough to meet most combinations.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").map_or(150, |cases| cases.parse().unwrap());
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn attention_on_random_descriptors_equals_attention_on_what_they_decode_to(seed: u64) {
        Case::random(&Cpu::shared(), seed, 300, false).check();
    }

    #[test]
    fn bytes_of_dead_slots_change_nothing(seed: u64) {
        let [clean, poisoned] = [false, true].map(|p| Case::random(&Cpu::shared(), seed, 200, p).run(&Cpu::shared()));
        prop_assert!(clean == poisoned);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let cpus = [1, 2, 4].map(|threads| Cpu::new(Some(threads)).unwrap());
    for seed in 0..4 {
        let case = Case::random(&Cpu::shared(), seed, 3000, false);
        let first = case.run(&cpus[0]);
        for cpu in cpus.iter().chain(&cpus) {
            assert!(case.run(cpu) == first, "seed {seed} with {} threads", cpu.threads());
        }
    }
}

#[test]
fn attention_received_does_not_depend_on_the_number_of_threads() {
    let cpus = [1, 2, 4].map(|threads| Cpu::new(Some(threads)).unwrap());
    for seed in 0..4 {
        let case = Case::random(&Cpu::shared(), seed, 3000, false);
        for fold in [Fold::Sum, Fold::Above, Fold::Last] {
            let first = case.received(&cpus[0], fold);
            assert!(cpus.iter().all(|cpu| case.received(cpu, fold) == first), "seed {seed}, {fold:?}");
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let cases = (0..40).map(|seed| Case::random(&Cpu::shared(), seed, 300, false));
    for mut case in cases.filter(|case| case.lengths.len() == 2) {
        let (whole, _) = case.run(&Cpu::shared());
        case.columns[0].clear();
        let (alone, _) = case.run(&Cpu::shared());
        let half = whole.len() / 2;
        assert!(whole[half..] == alone[half..]);
        assert!(alone[..half].iter().all(|&b| b == 0), "a row without queries is zero");
    }
}

#[test]
fn a_pool_of_the_caller_is_used() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let cpu = Cpu::with_pool(Arc::new(pool));
    assert_eq!(cpu.install(rayon::current_num_threads), 3);
}

#[test]
fn absurd_numbers_of_threads_are_refused() {
    let message = Cpu::new(Some(0)).unwrap_err().to_string();
    assert_eq!(message, "threads is 0; allowed: 1..=1024");
}
