//! `AdaKV` (Feng et al., 2024, arXiv:2407.11550): the heads of a layer share one budget by score.

use super::{ATTENTION_SCORES, HEAD_SHARING, Sharing, check_floor};
use crate::Result;
use crate::policy::{Entry, Facts, Method, PolicySpec, When};
use crate::policy::{check_scores, default_scores, rank};
use serde::{Deserialize, Serialize};

pub(crate) const ENTRY: Entry =
    Entry { name: "adakv", paper: "Feng et al., 2024, arXiv:2407.11550", parameters: &HEAD_SHARING };

/// Divides a layer's budget among its heads by [`ada()`]; the budget and the scores are those of another policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaKv {
    /// Whose scores are taken.
    pub scores: Box<PolicySpec>,
    /// Share of the mean that each head has at least.
    pub floor: f64,
}

impl Default for AdaKv {
    fn default() -> Self {
        Self { scores: Box::new(default_scores()), floor: 0.2 }
    }
}

impl Method for AdaKv {
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
        Sharing::Ada { floor: self.floor }
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        self.scores.method().scores(facts)
    }
}

/// Tokens of each head, of sum `min(total, tokens of all heads)`: `floor` for each (or all it has), and the rest to
/// the highest scores of all heads together.
///
/// `scores` are those of the tokens that may go, one array a head. Equal scores go to the lower place, then to the
/// lower head. The paper mixes each head's share with the mean, weighted by the floor; here the floor is a bound, so
/// that what is kept has the largest sum of scores that it allows.
#[must_use]
pub fn ada(scores: &[&[f32]], total: usize, floor: usize) -> Vec<usize> {
    let floor = floor.min(total.checked_div(scores.len()).unwrap_or(0));
    let mut counts: Vec<usize> = scores.iter().map(|head| floor.min(head.len())).collect();
    let mut rest: Vec<(u64, usize)> = Vec::new();
    for (h, head) in scores.iter().enumerate() {
        let mut ranks: Vec<u64> = head.iter().enumerate().map(|(i, &score)| rank(score, i)).collect();
        if counts[h] > 0 && counts[h] < ranks.len() {
            ranks.select_nth_unstable_by(counts[h], |a, b| b.cmp(a));
        }
        rest.extend(ranks[counts[h]..].iter().map(|&rank| (rank, usize::MAX - h)));
    }
    let left = rest.len().min(total.saturating_sub(counts.iter().sum()));
    if left > 0 && left < rest.len() {
        rest.select_nth_unstable_by(left, |a, b| b.cmp(a));
    }
    rest[..left].iter().for_each(|&(_, h)| counts[usize::MAX - h] += 1);
    counts
}
