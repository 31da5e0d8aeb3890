//! Eviction: what a policy is told, when it acts, and how its choice becomes freed pages.
//!
//! Policies and budgets are pure functions in `kvrs_core`; here are the numbers they ask for ([`facts`], [`tail`],
//! [`observe`]), the moments at which they act ([`prompt`], [`group`]), and the moving of what they keep ([`settle`], [`gather`]).

mod choose;
mod demand;
pub(crate) mod facts;
mod gather;
mod group;
mod joint;
pub(crate) mod observe;
pub(crate) mod plan;
mod prompt;
pub(crate) mod report;
mod settle;
pub(crate) mod tail;

use facts::HeadFacts;
pub(crate) use gather::{Move, spare_pages};
pub(crate) use group::Acting;
use kvrs_core::Result;
use kvrs_core::policy::Facts;
use std::sync::Arc;
use tail::Tail;

pub(crate) use plan::LayerEvict;

/// Scores of the kept tokens of a head, in place of a [`kvrs_core::policy::Custom`] policy's own; higher is kept.
pub type ScoreFn = dyn Fn(&Facts<'_>) -> Result<Vec<f32>> + Send + Sync;

/// The caller's own scores.
#[derive(Clone, Default)]
pub(crate) struct Score(pub(crate) Option<Arc<ScoreFn>>);

impl std::fmt::Debug for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Score(..)" } else { "Score(None)" })
    }
}

/// Where a sequence stands in its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Prompt {
    /// Outside of one.
    #[default]
    Closed,
    /// Between `begin_prompt` at this length and `end_prompt`.
    Open { from: usize },
    /// A prompt of so many tokens that came in one call: each layer ends it when it has them.
    Whole { to: usize },
}

/// What a layer's policy has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Outcome {
    /// No prompt has ended yet.
    #[default]
    Waiting,
    /// The last prompt was not longer than the budget.
    KeptAll,
    /// Tokens went.
    Evicted,
}

/// The part of a layer's state that only eviction needs.
#[derive(Debug, Default)]
pub(crate) struct EvictState {
    /// Tokens per head on average over the layers; known from the end of the first prompt on, or from the plan.
    pub(crate) budget: Option<usize>,
    pub(crate) outcome: Outcome,
    /// The last queries of an open prompt.
    pub(crate) tail: Tail,
    /// One per head group.
    pub(crate) heads: Vec<HeadFacts>,
    /// Raw pages that belong to the sequence's shared supply.
    pub(crate) borrowed: usize,
}

impl EvictState {
    pub(crate) fn new(groups: usize) -> Self {
        Self { heads: (0..groups).map(|_| HeadFacts::default()).collect(), ..Self::default() }
    }

    /// What another sequence with the same tokens knows.
    pub(crate) fn share(&self) -> Self {
        let Self { budget, outcome, ref tail, ref heads, .. } = *self;
        Self { budget, outcome, tail: tail.clone(), heads: heads.clone(), borrowed: 0 }
    }

    /// Bytes of statistics.
    pub(crate) fn bytes(&self) -> u64 {
        (self.tail.bytes() + self.heads.iter().map(HeadFacts::bytes).sum::<usize>()) as u64
    }

    /// Forgets the tokens from `n` on, of `length`; `kept(head)` counts what a head still has.
    pub(crate) fn truncate(&mut self, n: usize, length: usize, kept: impl Fn(usize) -> usize) {
        if n == 0 {
            *self = Self { borrowed: self.borrowed, ..Self::new(self.heads.len()) };
            return;
        }
        self.tail.drop_last(length.saturating_sub(n));
        let known = self.heads.iter_mut().enumerate().filter(|(_, facts)| !facts.fits(0));
        known.for_each(|(head, facts)| facts.truncate(kept(head)));
    }
}
