//! Eviction when a group of tokens has left the window.

use super::facts::HeadFacts;
use crate::compile::LayerPlan;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::layout::movable;
use kvrs_core::page::{Supply, Table};
use kvrs_core::policy::{Facts, droppable, select};

/// What a policy needs to act on one head in the middle of an append.
pub(crate) struct Acting<'a> {
    /// Tokens that the head keeps.
    pub(crate) budget: usize,
    pub(crate) facts: &'a mut HeadFacts,
}

impl<B: Backend> KvStore<B> {
    /// Drops what is above the budget after `length` tokens, and gives the freed pages to `supply`.
    pub(crate) fn evict_group(
        &self,
        (layer, head): (usize, usize),
        plan: &LayerPlan,
        (table, supply): (&mut Table<B::Chunk>, &mut Supply<B::Chunk>),
        acting: &mut Acting<'_>,
        (start, length): (i64, usize),
    ) {
        let Some(evict) = &plan.evict else { return };
        if table.kept() <= acting.budget {
            return;
        }
        let (policy, tokens) = (&evict.policy, table.live_indices());
        let range = droppable(&tokens, length, plan.rule.sinks, evict.recent(acting.budget));
        let attention = acting.facts.attention(tokens.len());
        let key_norms = acting.facts.norms.get(..tokens.len()).unwrap_or(&[]);
        let facts = Facts {
            layer,
            head,
            tokens: &tokens,
            prefix: range.end,
            attention: &attention,
            key_norms,
            distances: &[],
        };
        let distances = self.distances(plan, policy, (head, table), start, &facts);
        let scores = policy.scores(&Facts { distances: &distances, ..facts });
        let outside = tokens.len() - range.len();
        let left = policy.left(acting.budget, tokens.len());
        let kept = select(&scores, range, left.saturating_sub(outside));
        acting.facts.keep(&kept, tokens.len());
        acting.facts.evicted = length;
        let kept: Vec<usize> = kept.into_iter().map(|place| tokens[place]).collect();
        self.thin(plan, head, (table, supply), &kept);
    }

    /// Kills the sealed tokens that are not among the ascending `kept`, and merges pages that have become thin.
    pub(crate) fn thin(
        &self,
        plan: &LayerPlan,
        head: usize,
        (table, supply): (&mut Table<B::Chunk>, &mut Supply<B::Chunk>),
        kept: &[usize],
    ) {
        for page in table.evict_sealed(kept) {
            supply.put(page);
        }
        let class = plan.target();
        let codec = plan.class(head, class);
        if !movable(&codec.desc) {
            return;
        }
        let copy = |from: &_, a, to: &mut _, b| self.backend.copy_slot(codec, (from, a), (to, b));
        for page in table.compact_near(class, codec.desc.slots as usize, copy) {
            supply.put(page);
        }
    }
}
