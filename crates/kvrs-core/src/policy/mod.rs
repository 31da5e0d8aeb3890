//! Which tokens to keep: each file in this folder is one method, a pure function of small arrays.
//!
//! A policy says which numbers it wants known ([`Needs`]) and when it acts ([`When`]); given the numbers
//! ([`Facts`]) it scores the kept tokens of one key-value head, and [`select()`] keeps the best. How many each head
//! keeps is said in [`crate::budget`]. Nothing here knows where keys and values lie.

mod caote;
mod custom;
mod h2o;
mod knorm;
mod metrics;
mod random;
mod scissorhands;
mod select;
mod snapkv;
mod spec;
mod streamingllm;
#[cfg(test)]
mod tests;
mod tova;

pub use caote::Caote;
pub use custom::Custom;
pub use h2o::H2o;
pub use knorm::KNorm;
pub use metrics::{Hits, hits, overlap, recall};
pub use random::Random;
pub use scissorhands::{History, Scissorhands};
pub(crate) use select::rank;
pub use select::{droppable, select};
pub use snapkv::{Pooling, SnapKv, pool};
pub use spec::PolicySpec;
pub use streamingllm::StreamingLlm;
pub use tova::Tova;

pub use crate::statistics::{Attention, Centre, Fold, Needs, Queries, Reduce};

use crate::budget::{Budget, Sharing};
use crate::{Error, Result};

/// When a policy acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// Once, at the end of the prompt, before anything of it is encoded.
    PromptEnd,
    /// At the end of the prompt, and whenever a group of tokens leaves the window while more than the budget is kept.
    EveryGroup,
    /// As [`When::EveryGroup`], but half of the budget goes at once.
    Batches,
}

/// What is known of one key-value head; arrays have one number per kept token, in ascending order of index, and are
/// empty where the policy did not ask.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts<'a> {
    /// The layer.
    pub layer: usize,
    /// The key-value head.
    pub head: usize,
    /// Index of each kept token in its sequence.
    pub tokens: &'a [usize],
    /// How many of the kept tokens stand before the protected window: the end of [`droppable`].
    pub prefix: usize,
    /// Attention, as [`Needs::attention`] asks.
    pub attention: &'a [f32],
    /// Norms of the keys.
    pub key_norms: &'a [f32],
    /// Distances of the values from the centre, as [`Needs::distances`] asks.
    pub distances: &'a [f32],
}

/// A setting of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What is allowed, for people.
    pub allowed: &'static str,
    /// The default as JSON; `None`: the setting must be given.
    pub default: Option<&'static str>,
}

/// A policy of the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Name in plans.
    pub name: &'static str,
    /// Where the method is described.
    pub paper: &'static str,
    /// Its settings.
    pub parameters: &'static [Parameter],
}

static ENTRIES: [Entry; 12] = [
    streamingllm::ENTRY,
    h2o::ENTRY,
    scissorhands::ENTRY,
    snapkv::ENTRY,
    tova::ENTRY,
    knorm::ENTRY,
    caote::ENTRY,
    random::ENTRY,
    custom::ENTRY,
    crate::budget::PYRAMIDKV,
    crate::budget::ADAKV,
    crate::budget::ENTROPY,
];

/// Every policy, by name.
#[must_use]
pub fn entries() -> &'static [Entry] {
    &ENTRIES
}

/// The setting that nearly every policy has.
pub(crate) const BUDGET: Parameter = Parameter {
    name: "budget",
    allowed: "tokens per head, a share of the prompt in (0, 1], or bytes per sequence like \"512MiB\"",
    default: None,
};

/// What a method must say of itself; each implementation is the method's file. What it leaves out is what the policy
/// that it wraps says, or nothing.
pub(crate) trait Method {
    /// Its entry in the registry.
    fn entry(&self) -> &'static Entry;

    /// The budget among its own settings.
    fn own_budget(&self) -> Option<Budget> {
        None
    }

    /// What it asks to know.
    fn needs(&self) -> Needs {
        self.wrapped().map_or_else(Needs::default, PolicySpec::needs)
    }

    /// When it acts.
    fn when(&self) -> When;

    /// Scores of the kept tokens of a head, higher is kept.
    fn scores(&self, facts: &Facts<'_>) -> Vec<f32>;

    /// The policy whose scores it takes, if it wraps one.
    fn wrapped(&self) -> Option<&PolicySpec> {
        None
    }

    /// Checks its own settings; `field` is its place in the plan.
    fn check(&self, _field: &str) -> Result<()> {
        Ok(())
    }

    /// Newest tokens that it never drops itself, of a budget of `budget` tokens.
    fn own_recent(&self, budget: usize) -> usize {
        self.wrapped().map_or(0, |wrapped| wrapped.method().own_recent(budget))
    }

    /// How a layer's budget is divided.
    fn sharing(&self) -> Sharing {
        Sharing::Uniform
    }

    /// Weights of the values whose mean is the centre of the distances.
    fn weights(&self, facts: &Facts<'_>) -> Vec<f32> {
        self.wrapped().map_or_else(Vec::new, |wrapped| wrapped.method().weights(facts))
    }
}

/// The policy that a wrapper takes its scores from, if none is given.
pub(crate) fn default_scores() -> PolicySpec {
    PolicySpec::SnapKv(SnapKv::default())
}

/// Checks that a wrapper takes its scores from one of the policies `allowed`.
pub(crate) fn check_scores(field: &str, scores: &PolicySpec, allowed: &[&str]) -> Result<()> {
    let field = format!("{field}.scores");
    if !allowed.contains(&scores.name()) {
        return Err(Error::plan(field, scores.name(), allowed.join(", ")));
    }
    scores.method().check(&field)
}

/// Most queries at the end of a prompt that a policy may look at: the store keeps them until the prompt has ended.
pub(crate) const MAX_QUERIES: usize = 4096;

/// Checks that a whole-number setting lies in `range`.
pub(crate) fn check_range(
    field: &str,
    name: &str,
    got: usize,
    range: std::ops::RangeInclusive<usize>,
) -> Result<()> {
    if range.contains(&got) {
        return Ok(());
    }
    Err(Error::plan(format!("{field}.{name}"), got, format!("{}..={}", range.start(), range.end())))
}
