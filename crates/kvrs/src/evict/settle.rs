//! After the choice: tokens move, statistics follow, and what was reserved for the prompt goes back.

use super::choose::Ended;
use super::gather::Move;
use super::{HeadFacts, LayerEvict, Outcome};
use crate::compile::{LayerPlan, PACKED};
use crate::sequence::{LayerState, Sequence};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::Result;
use kvrs_core::page::{PACKED_SLOTS, RAW_SLOTS, Supply};
use rayon::prelude::*;
use std::ops::Range;

impl<B: Backend> KvStore<B> {
    /// Moves a layer's tokens as chosen; fails only if the store is broken.
    pub(crate) fn settle(
        &self,
        layer: usize,
        sequence: &mut Sequence<B::Chunk>,
        chosen: Option<(usize, Vec<Ended>)>,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        let (Some((budget, ended)), Some(evict)) = (chosen, &plan.evict) else { return Ok(()) };
        let all = ended.iter().all(Ended::keeps_all);
        self.move_tokens(layer, plan, sequence, &ended, all);
        let length = sequence.layers[layer].length;
        let state = &mut sequence.layers[layer].evict;
        state.budget = Some(budget);
        state.outcome = if all { Outcome::KeptAll } else { Outcome::Evicted };
        state.tail.clear();
        for (facts, ended) in state.heads.iter_mut().zip(ended) {
            facts.follow(evict, ended);
            facts.evicted = if all { facts.evicted } else { length };
        }
        Ok(())
    }

    /// Moves what stays of every head to its place; the window starts where it now has to.
    fn move_tokens(
        &self,
        layer: usize,
        plan: &LayerPlan,
        sequence: &mut Sequence<B::Chunk>,
        ended: &[Ended],
        all: bool,
    ) {
        let (start, rule) = (sequence.start(), plan.rule);
        let state = &mut sequence.layers[layer];
        let (origin, length) = (state.origin, state.length);
        // Groups leave the window as they are only where none of their tokens has been removed: pages are reserved for
        // tokens that are there.
        let end = rule.sealed_end(origin, length);
        let all = all && ended.iter().all(|ended| ended.has_all(origin..end));
        let first = if all { end } else { origin.max(length.saturating_sub(rule.recent)) };
        let pages = ended.iter().map(|ended| ended.pages(plan, origin..first, length, all));
        let mut kept: Vec<_> =
            pages.enumerate().map(|(head, pages)| state.take_kept(plan, head, pages)).collect();
        let heads = state.tables.iter_mut().zip(&mut state.supplies).zip(&mut kept).zip(ended).enumerate();
        let tasks: Vec<_> = heads
            .map(|(head, (((table, supply), kept), ended))| {
                (Move { layer, head, plan, table, supply, kept, start, first }, ended)
            })
            .collect();
        let run = |(mut task, ended): (Move<'_, B::Chunk>, &Ended)| {
            self.look(&task);
            if all {
                task.supply.merge(std::mem::take(task.kept));
                self.seal_up(&mut task, origin);
            } else {
                let [kept, low] = [&ended.kept, &ended.low]
                    .map(|places| places.iter().map(|place| ended.tokens[*place]).collect::<Vec<usize>>());
                self.gather(&mut task, &kept, &low);
            }
        };
        self.backend.install(|| tasks.into_par_iter().for_each(run));
        state.origin = first;
        let mut rest = std::mem::take(&mut state.kept);
        let supplies = state.supplies.iter_mut().map(std::mem::take);
        kept.into_iter().chain(supplies).for_each(|supply| rest.merge(supply));
        let borrowed = std::mem::take(&mut state.evict.borrowed);
        sequence.shared.merge(rest.split(&[(plan.raw_page_bytes(), borrowed)]));
    }

    /// Lets the groups from `origin` on leave the window as if the prompt had never been open.
    fn seal_up(&self, task: &mut Move<'_, B::Chunk>, origin: usize) {
        for _ in (origin..task.first).step_by(task.plan.rule.group) {
            if task.plan.target() == PACKED {
                self.seal(task.plan, task.head, task.start, task.table, task.supply);
            } else {
                (0..task.plan.rule.group / RAW_SLOTS).for_each(|_| task.table.seal_raw());
            }
        }
    }

    /// Looks for a constant in the keys that are about to be encoded.
    fn look(&self, task: &Move<'_, B::Chunk>) {
        if task.plan.target() == PACKED {
            let groups = (crate::constant::TOKENS / task.plan.rule.group).min(task.table.window().len());
            for group in 0..groups {
                let place = (task.layer, task.head);
                self.constants.look(self, task.plan, place, (task.table, group), task.start);
            }
        }
    }
}

impl<C> LayerState<C> {
    /// Raw, packed and low-rate pages for one head out of those for what stays; raw ones as far as they are there.
    fn take_kept(&mut self, plan: &LayerPlan, head: usize, [raw, packed, low]: [usize; 3]) -> Supply<C> {
        let bytes = plan.raw_page_bytes();
        let raw = raw.min(self.kept.count(bytes));
        let low = (plan.low_page_bytes(), low);
        self.kept.split(&[(bytes, raw), (plan.packed_page_bytes(head), packed), low])
    }
}

impl Ended {
    /// Whether none of the tokens in `indices` is missing.
    fn has_all(&self, indices: Range<usize>) -> bool {
        self.tokens.iter().filter(|index| indices.contains(index)).count() == indices.len()
    }

    /// Raw, packed and low-rate pages that a head takes whose tokens in `moved` leave a window of `length` tokens in all;
    /// if all heads keep everything, raw pages stay where they are.
    fn pages(&self, plan: &LayerPlan, moved: Range<usize>, length: usize, all: bool) -> [usize; 3] {
        let tokens = self.kept.iter().map(|place| self.tokens[*place]);
        let count = tokens.filter(|index| moved.contains(index)).count() - self.low.len();
        let low = self.low.len().div_ceil(PACKED_SLOTS);
        let sinks = plan.rule.sinks.min(length).div_ceil(RAW_SLOTS);
        let window = length.saturating_sub(moved.end).div_ceil(RAW_SLOTS);
        match (plan.target(), all) {
            (PACKED, true) => [0, count.div_ceil(PACKED_SLOTS), low],
            (PACKED, false) => [sinks + window, count.div_ceil(PACKED_SLOTS), low],
            (_, true) => [0, 0, 0],
            (_, false) => [sinks + window + count.div_ceil(RAW_SLOTS), 0, 0],
        }
    }
}

impl HeadFacts {
    /// What a policy goes on with after a choice.
    fn follow(&mut self, evict: &LayerEvict, ended: Ended) {
        if !evict.acts_later() {
            *self = Self::default();
            return;
        }
        if evict.remembers() > 0 {
            self.attention = if ended.history.is_some() { Vec::new() } else { ended.attention };
            self.history = ended.history;
        }
        self.keep(&ended.kept, ended.tokens.len());
    }
}
