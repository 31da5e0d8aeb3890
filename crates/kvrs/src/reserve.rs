//! Pages for tokens to come: the worst case of all layers, taken before anything changes.

use crate::compile::{Compiled, LayerPlan, PACKED};
use crate::evict::{LayerEvict, Prompt, spare_pages};
use crate::sequence::{LayerState, Place, Sequence, Want};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::layout::movable;
use kvrs_core::Result;
use kvrs_core::page::{Entry, PACKED_SLOTS, RAW_SLOTS, Supply, Table};
use kvrs_core::window::{Need, WindowRule};
use std::collections::BTreeMap;
use std::ops::DerefMut;

/// Pages on top of those that eviction leaves at most: the one being filled, and one before the next is freed.
const UNDER_WAY: usize = 2;

impl<B: Backend> KvStore<B> {
    /// Takes the pages that let every layer of each row grow to its target, all or none.
    pub(crate) fn reserve_to(
        &self,
        rows: &mut [impl DerefMut<Target = Sequence<B::Chunk>>],
        targets: &[usize],
        prompts: &[Prompt],
    ) -> Result<()> {
        let asked = targets.iter().copied().zip(prompts.iter().copied());
        let asked: Vec<_> = rows.iter().map(|s| (s.target, s.prompt)).zip(asked).enumerate().collect();
        let open = asked.into_iter().filter(|(_, (known, asked))| asked.0 > known.0 || asked.1 != known.1);
        let open: Vec<(usize, usize, Prompt)> =
            open.map(|(row, (_, asked))| (row, asked.0, asked.1)).collect();
        if open.is_empty() {
            return Ok(());
        }
        let plan = self.compiled()?;
        let mut wants = Vec::new();
        for &(row, target, prompt) in &open {
            let sequence = &rows[row];
            let target = target.max(sequence.known_target(prompt));
            wants.extend(sequence.wants(plan, prompt, target)?.into_iter().map(|want| (row, want)));
        }
        // What outlives a prompt lies together, so that the chunks of its raw pages become free as a whole.
        let (kept, others): (Vec<_>, Vec<_>) =
            wants.into_iter().partition(|(_, want)| matches!(want.place, Place::Kept(_)));
        let supplies = [self.supply(&kept)?, self.supply(&others)?];
        for (mut supply, wants) in supplies.into_iter().zip([kept, others]) {
            for (row, Want { place, pages }) in wants {
                let part = supply.split(&pages);
                match place {
                    Place::Kept(layer) => rows[row].layers[layer].kept.merge(part),
                    Place::Head(layer, group) => rows[row].layers[layer].supplies[group].merge(part),
                    Place::Shared => rows[row].shared.merge(part),
                }
            }
        }
        for (row, target, prompt) in open {
            let sequence = &mut rows[row];
            sequence.target = target.max(sequence.known_target(prompt));
            sequence.prompt = prompt;
        }
        Ok(())
    }

    fn supply(&self, wants: &[(usize, Want)]) -> Result<Supply<B::Chunk>> {
        let pages = wants.iter().flat_map(|(_, want)| want.pages);
        let all: Vec<(u32, usize)> = pages.filter(|(_, n)| *n > 0).collect();
        if all.is_empty() {
            return Ok(Supply::default());
        }
        self.pages("the tokens of this step, in all layers,", &all)
    }

    /// Takes what a layer of a whole prompt lacks out of the shared pages, or, if other layers still hold them, out of
    /// the arena.
    pub(crate) fn lend(
        &self,
        layer: usize,
        plan: &LayerPlan,
        sequence: &mut Sequence<B::Chunk>,
        target: usize,
    ) -> Result<()> {
        if !(matches!(sequence.prompt, Prompt::Whole { .. }) && sequence.held(plan)) {
            return Ok(());
        }
        let bytes = plan.raw_page_bytes();
        let state = &mut sequence.layers[layer];
        let tables = state.tables.iter();
        let lacking: Vec<usize> = tables.map(|table| raw_need(plan.rule, table, state, target)).collect();
        let total: usize = lacking.iter().sum();
        let missing = total.saturating_sub(sequence.shared.count(bytes));
        if missing > 0 {
            sequence.shared.merge(self.pages("the prompt of this layer", &[(bytes, missing)])?);
        }
        for (supply, n) in state.supplies.iter_mut().zip(lacking) {
            supply.merge(sequence.shared.split(&[(bytes, n)]));
        }
        state.evict.borrowed += total;
        Ok(())
    }
}

impl<C> Sequence<C> {
    /// The length that is reserved for, as far as it still counts in `prompt`.
    fn known_target(&self, prompt: Prompt) -> usize {
        if prompt == self.prompt { self.target } else { 0 }
    }

    /// Pages that are missing so that every layer can grow to `target` in `prompt`.
    fn wants(&self, plan: &Compiled, prompt: Prompt, target: usize) -> Result<Vec<Want>> {
        let (mut wants, mut shared) = (Vec::new(), (0, 0));
        for (i, (state, layer)) in self.layers.iter().zip(&plan.layers).enumerate() {
            let evict = layer.evict.as_ref().filter(|evict| prompt != Prompt::Closed && evict.holds());
            if matches!(prompt, Prompt::Whole { .. }) && state.length >= target {
                continue;
            }
            for (group, table) in state.tables.iter().enumerate() {
                let need = match (evict, prompt) {
                    (Some(_), Prompt::Whole { .. }) => {
                        Need { raw_pages: spare_pages(layer), packed_pages: 0 }
                    }
                    (Some(_), _) => {
                        let raw_pages = raw_need(layer.rule, table, state, target) + spare_pages(layer);
                        Need { raw_pages, packed_pages: 0 }
                    }
                    _ => flowing(layer, plan, (table, state), target),
                };
                wants.push(state.missing(layer, i, group, need));
            }
            if let Some(evict) = evict {
                let budget = evict.resolve(&plan.layers, target)?;
                let again = matches!(prompt, Prompt::Open { from: 1.. });
                let most = if again { evict.most_again(budget, target) } else { evict.most(budget, target) };
                wants.extend(state.missing_kept(layer, i, &after(layer, evict.ragged(), most, target)));
            }
            if let (Some(_), Prompt::Whole { .. }) = (evict, prompt) {
                let pages: usize =
                    state.tables.iter().map(|table| raw_need(layer.rule, table, state, target)).sum();
                let bytes = layer.raw_page_bytes();
                // Layers end one after the other and hand the pages on; the largest needs most.
                if pages as u64 * u64::from(bytes) > shared.1 as u64 * u64::from(shared.0) {
                    shared = (bytes, pages);
                }
            }
        }
        let missing = shared.1.saturating_sub(self.shared.count(shared.0));
        wants.push(Want { place: Place::Shared, pages: [(shared.0, missing), (0, 0)] });
        wants.retain(|want| want.pages.iter().any(|(_, n)| *n > 0));
        Ok(wants)
    }
}

impl<C> LayerState<C> {
    fn missing(&self, plan: &LayerPlan, layer: usize, group: usize, need: Need) -> Want {
        let supply = &self.supplies[group];
        let missing = |bytes: u32, pages: usize| {
            (bytes, if pages == 0 { 0 } else { pages.saturating_sub(supply.count(bytes)) })
        };
        let raw = missing(plan.raw_page_bytes(), need.raw_pages);
        let packed = missing(plan.packed_page_bytes(group), need.packed_pages);
        Want { place: Place::Head(layer, group), pages: [raw, packed] }
    }

    /// Pages that are missing for what stays of a prompt, of each size that the layer's heads need.
    fn missing_kept(&self, plan: &LayerPlan, layer: usize, needs: &[Need]) -> Vec<Want> {
        let mut sizes = BTreeMap::<u32, usize>::new();
        for (group, need) in needs.iter().enumerate() {
            *sizes.entry(plan.raw_page_bytes()).or_default() += need.raw_pages;
            *sizes.entry(plan.packed_page_bytes(group)).or_default() += need.packed_pages;
        }
        if plan.joint() {
            let packed: usize = needs.iter().map(|need| need.packed_pages).sum();
            let bytes = packed * plan.packed_page_bytes(0) as usize;
            let low = plan.low_page_bytes();
            *sizes.entry(low).or_default() += bytes.div_ceil(low.max(1) as usize) + needs.len();
        }
        let missing = |(bytes, pages): (u32, usize)| (bytes, pages.saturating_sub(self.kept.count(bytes)));
        let want = |size| Want { place: Place::Kept(layer), pages: [missing(size), (0, 0)] };
        sizes.into_iter().filter(|(_, pages)| *pages > 0).map(want).collect()
    }
}

/// Raw pages for growing to `target` while nothing leaves the window.
fn raw_need<C>(rule: WindowRule, table: &Table<C>, state: &LayerState<C>, target: usize) -> usize {
    let rule = WindowRule { seals: false, ..rule };
    rule.need(&rule.holding(table, state.length, state.origin), target).raw_pages
}

/// What stays of a layer's prompt, per head group, in pages that nothing else uses: sinks, window, and gathered tokens of
/// heads that keep `most` tokens each, or on average if they are `ragged` (then the pages of all heads have one size, and
/// only the sum counts).
fn after(plan: &LayerPlan, ragged: bool, most: usize, target: usize) -> Vec<Need> {
    let (rule, heads) = (&plan.rule, plan.codec.classes.len());
    let (sinks, window) = (rule.sinks.min(target), rule.recent.min(target));
    let moved = most.min(target).saturating_sub(sinks + window);
    let raw_pages = sinks.div_ceil(RAW_SLOTS) + window.div_ceil(RAW_SLOTS);
    let pages = |slots: usize, head: usize| {
        if ragged { 1 + if head == 0 { heads * moved / slots } else { 0 } } else { moved.div_ceil(slots) }
    };
    let need = |head: usize| {
        if plan.target() == PACKED {
            Need { raw_pages, packed_pages: pages(PACKED_SLOTS, head) }
        } else {
            Need { raw_pages: raw_pages + pages(RAW_SLOTS, head), packed_pages: 0 }
        }
    };
    (0..heads).map(need).collect()
}

/// Outside of prompts groups leave the window, and a policy may make room for them.
fn flowing<C>(
    plan: &LayerPlan,
    all: &Compiled,
    (table, state): (&Table<C>, &LayerState<C>),
    target: usize,
) -> Need {
    if target <= state.length {
        return Need::default();
    }
    let need = plan.rule.need(&plan.rule.holding(table, state.length, state.origin), target);
    let packed = plan.target() == PACKED;
    let leaving = plan.rule.sealed_end(state.origin, target.max(state.length)) - state.origin;
    let sealed = if packed { need.packed_pages } else { leaving / RAW_SLOTS };
    let slots = if packed { PACKED_SLOTS } else { RAW_SLOTS };
    let pages = match plan.evict.as_ref().and_then(|evict| budget_now(evict, all, state)) {
        // Pages that other tables use too are neither packed together nor free when they are left.
        Some(budget)
            if movable(&plan.class(0, plan.target()).desc) && !table.sealed().iter().any(Entry::shared) =>
        {
            sealed.min(room(budget + plan.rule.group, slots, table.sealed().len()))
        }
        _ => sealed,
    };
    if packed {
        Need { packed_pages: pages, ..need }
    } else {
        Need { raw_pages: need.raw_pages + pages, packed_pages: 0 }
    }
}

/// The budget by which a policy acts when groups leave the window.
pub(crate) fn budget_now<C>(evict: &LayerEvict, all: &Compiled, state: &LayerState<C>) -> Option<usize> {
    let acts = evict.acts_later();
    acts.then(|| state.evict.budget.or_else(|| evict.early(&all.layers))).flatten()
}

/// Pages that `kept` tokens take at most beyond `held` ones: four neighbouring pages are at least three quarters full.
fn room(kept: usize, slots: usize, held: usize) -> usize {
    let most = kept.div_ceil(slots / 4 * 3) + 4;
    most.saturating_sub(held) + UNDER_WAY
}
