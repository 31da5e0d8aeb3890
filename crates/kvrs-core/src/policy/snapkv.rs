//! `SnapKV` (Li et al., 2024, arXiv:2404.14469): the prompt's last queries vote for what to keep of it.

use super::{
    Attention, BUDGET, Entry, Facts, Fold, MAX_QUERIES, Method, Needs, Parameter, Queries, Reduce, When,
    check_range,
};
use crate::budget::Budget;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

pub(super) const ENTRY: Entry = Entry {
    name: "snapkv",
    paper: "Li et al., 2024, arXiv:2404.14469",
    parameters: &[
        BUDGET,
        Parameter { name: "window", allowed: "1..=4096 queries", default: Some("32") },
        Parameter { name: "kernel", allowed: "an odd number up to window", default: Some("7") },
        Parameter { name: "pooling", allowed: "max, avg", default: Some("\"max\"") },
        Parameter { name: "reduce", allowed: "mean, max, sum", default: Some("\"mean\"") },
    ],
};

/// How the votes of neighbouring tokens become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The largest.
    #[default]
    Max,
    /// The mean of those that exist: at an edge fewer count, and none counts as zero.
    Avg,
}

/// Keeps the tokens with the largest pooled sum of attention of the prompt's last `window` queries.
///
/// Defaults are those of the published experiments (window 32, kernel 7, max). The paper votes per query head; here
/// each query is first reduced over the heads of its group, so that one set is stored per key-value head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SnapKv {
    /// How many tokens are kept, the window and the sinks included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Queries that vote; as many newest tokens are kept.
    pub window: usize,
    /// Tokens that are pooled, odd.
    pub kernel: usize,
    /// How they are pooled.
    pub pooling: Pooling,
    /// How the query heads of a group become one.
    pub reduce: Reduce,
}

impl Default for SnapKv {
    fn default() -> Self {
        Self { budget: None, window: 32, kernel: 7, pooling: Pooling::Max, reduce: Reduce::Mean }
    }
}

impl Method for SnapKv {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        let attention =
            Attention { fold: Fold::Sum, reduce: self.reduce, queries: Queries::Last(self.window) };
        Needs { attention: Some(attention), ..Needs::default() }
    }

    fn when(&self) -> When {
        When::PromptEnd
    }

    fn check(&self, field: &str) -> Result<()> {
        check_range(field, "window", self.window, 1..=MAX_QUERIES)?;
        if self.kernel % 2 == 1 && self.kernel <= self.window {
            return Ok(());
        }
        let allowed = format!("an odd number up to the window of {}", self.window);
        Err(Error::plan(format!("{field}.kernel"), self.kernel, allowed))
    }

    fn own_recent(&self, _: usize) -> usize {
        self.window
    }

    /// The prefix, sinks included, is pooled by itself; the protected window keeps its sums.
    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        let (prefix, window) = facts.attention.split_at(facts.prefix);
        [pool(prefix, self.kernel, self.pooling).as_slice(), window].concat()
    }
}

/// Each number pooled with its `kernel / 2` neighbours on either side, as far as they exist.
///
/// A mean is taken in f64 and rounded once.
#[must_use]
pub fn pool(x: &[f32], kernel: usize, pooling: Pooling) -> Vec<f32> {
    match pooling {
        Pooling::Max => pool_max(x, kernel / 2),
        Pooling::Avg => pool_avg(x, kernel / 2),
    }
}

fn pool_max(x: &[f32], side: usize) -> Vec<f32> {
    // Places of candidates, in falling order of their numbers: the first is the largest of the window.
    let mut falling = VecDeque::new();
    let mut next = 0;
    let one = |i: usize| {
        while next < x.len().min(i + side + 1) {
            while falling.back().is_some_and(|&back: &usize| x[back] <= x[next]) {
                falling.pop_back();
            }
            falling.push_back(next);
            next += 1;
        }
        while falling[0] + side < i {
            falling.pop_front();
        }
        x[falling[0]]
    };
    (0..x.len()).map(one).collect()
}

fn pool_avg(x: &[f32], side: usize) -> Vec<f32> {
    let one = |i: usize| {
        let near = &x[i.saturating_sub(side)..x.len().min(i + side + 1)];
        let sum: f64 = near.iter().map(|&x| f64::from(x)).sum();
        (sum / near.len() as f64) as f32
    };
    (0..x.len()).map(one).collect()
}
