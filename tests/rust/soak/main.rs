//! A long life: thousands of random calls with random faults, against a store that keeps everything in plain vectors.
//!
//! `KVRS_SOAK_SEEDS` says how many lives there are (6), `KVRS_SOAK_FIRST` with which seed they begin (0), and
//! `KVRS_SOAK_STEPS` how long each is (10,000 calls).
#![allow(clippy::unwrap_used, reason = "a test may")]

mod life;
mod model;

use life::Life;
use proptest::test_runner::TestRng;
use std::sync::atomic::{AtomicU64, Ordering};

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number")))
}

#[test]
fn long_lives_with_faults_lose_no_page_and_answer_as_plain_vectors_do() {
    let (seeds, steps) = (setting("KVRS_SOAK_SEEDS", 6), setting("KVRS_SOAK_STEPS", 10_000));
    let first = setting("KVRS_SOAK_FIRST", 0);
    let next = AtomicU64::new(first);
    let lives = || {
        while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < first + seeds)
        {
            Life::new(seed).live(steps);
            println!("seed {seed}: {steps} calls");
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(lives))));
}

/// Random numbers of a seed.
fn rng(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &bytes)
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 48, ..Default::default() })]

    /// Short lives, which shrink to the calls that matter.
    #[test]
    fn short_lives_answer_as_plain_vectors_do(
        seed in 0u64..36, turns in proptest::collection::vec(model::turn(), 1..50),
    ) {
        let mut life = Life::new(seed);
        for turn in &turns {
            life.turn(turn).unwrap();
        }
        life.die();
    }
}
