//! Budgets by the entropy of attention (Kim and Jung, 2025, doi:10.3390/math13152366): who looks widely gets more.

use super::{ATTENTION_SCORES, HEAD_SHARING, Sharing, apportion, check_floor};
use crate::Result;
use crate::policy::{Entry, Facts, Method, PolicySpec, When};
use crate::policy::{check_scores, default_scores};
use serde::{Deserialize, Serialize};

pub(crate) const ENTRY: Entry = Entry {
    name: "entropy",
    paper: "Kim and Jung, 2025, doi:10.3390/math13152366",
    parameters: &HEAD_SHARING,
};

/// Divides a layer's budget among its heads by [`entropy()`]; the budget and the scores are those of another policy.
///
/// The paper divides among layers by the mean entropy of their heads, and the heads of a layer keep the same tokens.
/// Here each layer keeps its budget, so that it may choose as soon as its own prompt has ended; a layer with one head
/// has nothing to divide.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Entropy {
    /// Whose scores are taken.
    pub scores: Box<PolicySpec>,
    /// Share of the mean that each head has at least.
    pub floor: f64,
}

impl Default for Entropy {
    fn default() -> Self {
        Self { scores: Box::new(default_scores()), floor: 0.2 }
    }
}

impl Method for Entropy {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn wrapped(&self) -> Option<&PolicySpec> {
        Some(&self.scores)
    }

    fn when(&self) -> When {
        When::PromptEnd
    }

    fn check(&self, field: &str) -> Result<()> {
        check_scores(field, &self.scores, &ATTENTION_SCORES)?;
        check_floor(field, self.floor)
    }

    fn sharing(&self) -> Sharing {
        Sharing::Entropy { floor: self.floor }
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        self.scores.method().scores(facts)
    }
}

/// Entropy in nats of attention `[kept]`, whatever it sums to; 0 if all of it is zero.
#[must_use]
pub fn entropy_of(attention: &[f32]) -> f64 {
    let sum: f64 = attention.iter().map(|&a| f64::from(a)).sum();
    let part = |&a: &f32| {
        let p = f64::from(a) / sum;
        if p > 0.0 { -p * p.ln() } else { 0.0 }
    };
    attention.iter().map(part).sum::<f64>().max(0.0)
}

/// Tokens of each head (or layer and head), in proportion to the entropies, at least `floor` and at most `lens[i]`,
/// of sum `min(total, sum of lens)`.
#[must_use]
pub fn entropy(entropies: &[f64], total: usize, floor: usize, lens: &[usize]) -> Vec<usize> {
    apportion(entropies, total, floor, lens)
}
