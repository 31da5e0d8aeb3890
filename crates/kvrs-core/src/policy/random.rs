//! Random choice: the baseline that every comparison needs.

use super::{BUDGET, Entry, Facts, Method, Parameter, When};
use crate::budget::Budget;
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "random",
    paper: "baseline",
    parameters: &[
        BUDGET,
        Parameter { name: "seed", allowed: "a whole number of 64 bits", default: Some("0") },
    ],
};

/// Keeps tokens by a hash of (seed, layer, head, index).
///
/// A token's number never changes, so what is kept of a text does not depend on how it was fed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Random {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Another choice for another seed.
    pub seed: u64,
}

impl Method for Random {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn when(&self) -> When {
        When::EveryGroup
    }

    /// The upper 24 bits of each token's hash, as a number in [0, 1).
    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        let key = [facts.layer, facts.head].iter().fold(mix(self.seed), |key, &x| mix(key ^ x as u64));
        facts.tokens.iter().map(|&index| (mix(key ^ index as u64) >> 40) as f32 / 16_777_216.0).collect()
    }
}

/// The first output of `SplitMix64` (Steele et al., 2014) for the seed `x`.
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_generator() {
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
    }

    #[test]
    fn scores_are_those_of_the_numpy_reference() {
        let facts = Facts { layer: 1, head: 2, tokens: &[0, 1, 399], ..Facts::default() };
        let scores = Random { budget: None, seed: 7 }.scores(&facts);
        assert_eq!(scores, [4_643_520.0, 7_371_396.0, 10_238_285.0].map(|x: f32| x / 16_777_216.0));
    }

    #[test]
    fn scores_depend_on_seed_layer_head_and_index_only() {
        let scores = |seed, layer, head, tokens: &[usize]| {
            Random { budget: None, seed }.scores(&Facts { layer, head, tokens, ..Facts::default() })
        };
        let all: Vec<usize> = (0..500).collect();
        let one = scores(1, 2, 3, &all);
        assert_eq!(scores(1, 2, 3, &[7, 99, 400]), [one[7], one[99], one[400]]);
        for other in
            [scores(0, 2, 3, &all), scores(1, 3, 3, &all), scores(1, 2, 4, &all), scores(1, 3, 2, &all)]
        {
            assert!(one.iter().zip(&other).filter(|(a, b)| a == b).count() < 3);
        }
        let mean = one.iter().sum::<f32>() / 500.0;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
    }
}
