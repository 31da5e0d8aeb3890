//! Moving what stays of a prompt: from raw pages straight into gathered pages, and the window to a new start.

use crate::compile::{LOW, LayerPlan, RAW};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::{Entry, Page, RAW_SLOTS, Supply, Table, Zone};
use std::sync::atomic::Ordering;

/// Raw pages that moving takes before it frees one: a stage for each part of a group, and a page under way in the
/// window and in the gathered pages each.
pub(crate) fn spare_pages(plan: &LayerPlan) -> usize {
    (1 + usize::from(plan.joint())) * plan.rule.group / RAW_SLOTS + 2
}

/// The moving of one head.
pub(crate) struct Move<'a, C> {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) plan: &'a LayerPlan,
    pub(crate) table: &'a mut Table<C>,
    /// Pages to work with; freed ones go there.
    pub(crate) supply: &'a mut Supply<C>,
    /// Pages for what stays.
    pub(crate) kept: &'a mut Supply<C>,
    /// Position of index 0.
    pub(crate) start: i64,
    /// Where the window starts afterwards.
    pub(crate) first: usize,
}

/// Gathered tokens of one class on their way.
struct Target<C> {
    class: u8,
    /// Raw pages that collect a group, if it is to be encoded.
    stage: Vec<Page<C>>,
    page: Option<Page<C>>,
    indices: Vec<u32>,
    /// Full pages with their tokens.
    full: Vec<(Page<C>, Vec<u32>)>,
}

impl<C> Move<'_, C> {
    /// A page for what stays; without one at hand, one that has become free.
    fn page(&mut self, bytes: u32) -> Page<C> {
        if self.kept.count(bytes) > 0 { self.kept.take(bytes) } else { self.supply.take(bytes) }
    }
}

impl<B: Backend> KvStore<B> {
    /// Keeps the ascending indices `kept`: sealed tokens where they are, window tokens before `first` in gathered pages
    /// behind them, those in `low` at the low rate behind all others; the window starts at `first` then.
    pub(crate) fn gather(&self, task: &mut Move<'_, B::Chunk>, kept: &[usize], low: &[usize]) {
        self.thin(task.plan, task.head, (task.table, task.supply), kept);
        let (codec, bytes) = (task.plan.class(task.head, RAW), task.plan.raw_page_bytes());
        let mut targets = vec![Target::new(task, task.plan.target())];
        if !low.is_empty() {
            targets.push(Target::new(task, LOW));
        }
        let mut dead = Vec::new();
        for (zone, entry) in task.table.take_raw() {
            for (slot, index) in (0..entry.count()).map(|slot| (slot, entry.index(slot))) {
                let live = entry.live() >> slot & 1 == 1;
                if zone == Zone::Sinks || index >= task.first {
                    // What was removed keeps its place, so that the tokens behind it do.
                    dead.extend((!live).then_some(index));
                    let (kept, supply) = (&mut task.kept, &mut task.supply);
                    let page = || if kept.count(bytes) > 0 { kept.take(bytes) } else { supply.take(bytes) };
                    let copy = |from: &_, to: &mut _| self.backend.copy_page(from, to);
                    let (page, to) = task.table.push_raw(zone, index, page, copy);
                    self.backend.copy_slot(codec, (entry.page(), slot), (page, to));
                } else if live && kept.binary_search(&index).is_ok() {
                    let target = &mut targets[usize::from(low.binary_search(&index).is_ok())];
                    self.push(task, target, (&entry, slot, index));
                }
            }
            if let Some(page) = entry.into_page() {
                task.supply.put(page);
            }
        }
        task.table.kill_raw(|index| dead.binary_search(&index).is_ok());
        for target in targets {
            self.finish(task, target);
        }
    }

    /// Adds a token of a raw page to the gathered ones.
    fn push(
        &self,
        task: &mut Move<'_, B::Chunk>,
        target: &mut Target<B::Chunk>,
        (entry, slot, index): (&Entry<B::Chunk>, usize, usize),
    ) {
        let raw = task.plan.class(task.head, RAW);
        let at = target.indices.len();
        target.indices.push(u32::try_from(index).expect("token indices stay below 2^32"));
        if target.stage.is_empty() {
            let page = target.page.get_or_insert_with(|| task.page(raw.desc.page_bytes));
            self.backend.copy_slot(raw, (entry.page(), slot), (page, at));
            if at + 1 == RAW_SLOTS {
                target.close();
            }
            return;
        }
        let group = task.plan.rule.group;
        let (part, to) = (at % group / RAW_SLOTS, at % RAW_SLOTS);
        self.backend.copy_slot(raw, (entry.page(), slot), (&mut target.stage[part], to));
        if (at + 1) % group == 0 {
            self.encode(task, target);
        }
    }

    /// Encodes the staged group, and closes its page if that is full.
    fn encode(&self, task: &mut Move<'_, B::Chunk>, target: &mut Target<B::Chunk>) {
        let (raw, packed) = (task.plan.class(task.head, RAW), task.plan.class(task.head, target.class));
        let group = task.plan.rule.group;
        let page = target.page.get_or_insert_with(|| task.page(packed.desc.page_bytes));
        let slot = (target.indices.len() - 1) / group * group;
        let tokens = &target.indices[slot..];
        let last = *tokens.last().expect("a group has tokens");
        let filled = tokens.iter().copied().chain(std::iter::repeat(last)).take(group);
        let positions: Vec<i64> = filled.map(|index| task.start + i64::from(index)).collect();
        let stage: Vec<&Page<B::Chunk>> = target.stage.iter().collect();
        self.backend.seal((raw, packed), &stage, &positions, page, slot);
        self.encoded.fetch_add(tokens.len() as u64, Ordering::Relaxed);
        if target.indices.len() == packed.desc.slots as usize {
            target.close();
        }
    }

    /// Encodes the last, partial group, filled up with copies of its last token that stay dead.
    fn finish(&self, task: &mut Move<'_, B::Chunk>, mut target: Target<B::Chunk>) {
        let (group, n) = (task.plan.rule.group, target.indices.len());
        if !target.stage.is_empty() && !n.is_multiple_of(group) {
            self.pad(task, &mut target, n % group);
            self.encode(task, &mut target);
        }
        if target.page.is_some() {
            target.close();
        }
        for (page, indices) in target.full {
            task.table.push_gathered(target.class, page, &indices);
        }
        target.stage.into_iter().for_each(|page| task.supply.put(page));
    }

    /// Repeats the last of `filled` staged tokens up to the end of the group.
    fn pad(&self, task: &mut Move<'_, B::Chunk>, target: &mut Target<B::Chunk>, filled: usize) {
        let raw = task.plan.class(task.head, RAW);
        // Slots are copied between pages only, so the token goes through one of the supply.
        let mut spare = task.supply.take(raw.desc.page_bytes);
        let last = filled - 1;
        self.backend.copy_slot(raw, (&target.stage[last / RAW_SLOTS], last % RAW_SLOTS), (&mut spare, 0));
        for slot in filled..task.plan.rule.group {
            self.backend.copy_slot(raw, (&spare, 0), (&mut target.stage[slot / RAW_SLOTS], slot % RAW_SLOTS));
        }
        task.supply.put(spare);
    }
}

impl<C> Target<C> {
    /// With raw pages to collect a group if the class is encoded.
    fn new(task: &mut Move<'_, C>, class: u8) -> Self {
        let staged = if class == RAW { 0 } else { task.plan.rule.group / RAW_SLOTS };
        let bytes = task.plan.raw_page_bytes();
        let stage = (0..staged).map(|_| task.supply.take(bytes)).collect();
        Self { class, stage, page: None, indices: Vec::new(), full: Vec::new() }
    }

    fn close(&mut self) {
        let page = self.page.take().expect("a page is under way");
        self.full.push((page, std::mem::take(&mut self.indices)));
    }
}
