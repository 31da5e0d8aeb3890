//! What policies did, for people.

use super::{EvictState, LayerEvict, Outcome};
use crate::compile::Compiled;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Result, SeqId};
use serde::Serialize;
use std::collections::BTreeMap;

/// What one head keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeadSelection {
    /// The layer.
    pub layer: usize,
    /// The key-value head.
    pub head: usize,
    /// Its policy; `None`: everything stays.
    pub policy: Option<&'static str>,
    /// Tokens per head on average over layers and heads; `None` until it is known.
    pub budget: Option<usize>,
    /// Tokens that it keeps.
    pub kept: usize,
    /// Tokens that were appended.
    pub logical: usize,
}

/// What one policy did, over all sequences and its layers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PolicyStats {
    /// The policy.
    pub policy: String,
    /// Pairs of sequence and layer that wait for the end of a prompt.
    pub waiting: u64,
    /// Pairs that kept everything, since the prompt was not longer than the budget.
    pub kept_all: u64,
    /// Pairs from which tokens went.
    pub evicted: u64,
    /// Tokens that went, summed over heads.
    pub tokens_evicted: u64,
}

impl<B: Backend> KvStore<B> {
    /// What each layer and head of a sequence keeps, of what budget and by which policy.
    ///
    /// # Errors
    /// [`kvrs_core::Error::Sequence`] for an unknown id.
    pub fn selection_report(&self, seq: SeqId) -> Result<Vec<HeadSelection>> {
        let layers = &self.compiled()?.layers;
        let row = self.row(seq)?;
        let sequence = row.read()?;
        let layers = sequence.layers.iter().zip(layers).enumerate();
        let heads = layers.flat_map(|(layer, (state, plan))| {
            let policy = plan.evict.as_ref().map(LayerEvict::name);
            state.tables.iter().enumerate().map(move |(head, table)| HeadSelection {
                layer,
                head,
                policy,
                budget: state.evict.budget,
                kept: table.kept(),
                logical: state.length,
            })
        });
        Ok(heads.collect())
    }
}

/// Adds a sequence to what its policies did, by name.
pub(crate) fn add<C>(
    plan: &Compiled,
    sequence: &Sequence<C>,
    policies: &mut BTreeMap<&'static str, PolicyStats>,
) {
    for (state, plan) in sequence.layers.iter().zip(&plan.layers) {
        let Some(evict) = &plan.evict else { continue };
        let (name, outcome) = (evict.name(), state.evict.outcome);
        let stats = policies
            .entry(name)
            .or_insert_with(|| PolicyStats { policy: name.into(), ..PolicyStats::default() });
        if state.length == 0 {
            continue;
        }
        let gone: usize = state.tables.iter().map(|table| state.length.saturating_sub(table.kept())).sum();
        stats.tokens_evicted += gone as u64;
        if evict.waits(&state.evict, sequence.held(plan)) {
            stats.waiting += 1;
        } else if gone > 0 {
            stats.evicted += 1;
        } else if outcome == Outcome::KeptAll {
            stats.kept_all += 1;
        }
    }
}

impl LayerEvict {
    /// Whether its policy still waits for the end of a prompt.
    fn waits(&self, state: &EvictState, held: bool) -> bool {
        let idle =
            if self.acts_later() { state.budget.is_none() && self.holds() && self.shares() } else { true };
        held || (state.outcome == Outcome::Waiting && idle)
    }
}

/// One line for each policy that waits.
pub(crate) fn waiting(policies: &[PolicyStats]) -> Vec<String> {
    let waiting = policies.iter().filter(|stats| stats.waiting > 0);
    waiting
        .map(|stats| {
            format!(
                "{} waits for the end of a prompt in {} layers of sequences (begin_prompt, end_prompt, or more than \
                 one token in the first call)",
                stats.policy, stats.waiting
            )
        })
        .collect()
}
