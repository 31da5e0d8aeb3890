//! One job of an attention call: some pages of a table, and the call's own tokens, for the queries of a unit.

use crate::attend::{Context, Job, Part, Target, Unit, WORKSPACE};
use crate::block_pass::{BlockPass, PageAt};
use crate::memory::Chunk;
use crate::output::Partial;
use crate::own::{OwnCall, OwnHead};
use crate::packed_pass::{PackedPass, PassCall, Workspace};
use crate::received::{Placed, Weights};
use crate::softmax::Logits;
use crate::top_k::{Record, Stage};
use kvrs_codec::HeadCodec;
use kvrs_codec::desc::TILE;
use kvrs_core::page::Entry;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// What a job computes, and what of each row and token it keeps.
pub(crate) struct Keep<'r> {
    pub(crate) stage: Stage,
    pub(crate) record: Option<&'r mut Record>,
    pub(crate) weights: Option<&'r mut Weights>,
}

/// Tokens and chunks of 16 slots of a job that are stored.
#[derive(Clone, Copy)]
struct Stored {
    tokens: usize,
    chunks: usize,
}

impl<'a> Context<'a> {
    /// Runs a job; the only job of a unit writes its result, others leave theirs in `part`.
    pub(crate) fn run(
        &self,
        job: usize,
        stage: Stage,
        part: &Mutex<Option<Part>>,
        target: &Mutex<Target<'_, '_>>,
    ) {
        let Job { unit, ref entries, own } = self.jobs[job];
        let unit = &self.units[unit];
        let mut partial = Partial::new(self.rows(unit), self.dim);
        let (pages, stored) = self.place(unit, entries.clone());
        let left = part.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut record = left.and_then(|part| part.record);
        if record.is_none() && self.call.top_k.is_some() {
            let own_tokens = if own { self.call.rows[unit.row].columns.len() } else { 0 };
            record = Some(Record::new(self.rows(unit), stored.tokens + own_tokens));
        }
        let mut workspace = WORKSPACE.take().unwrap_or_default();
        let mut weights = self.asked.map(|_| std::mem::take(&mut workspace.received));
        if let Some(weights) = &mut weights {
            self.clear_weights(unit, &pages, own, weights);
        }
        let mut keep = Keep { stage, record: record.as_mut(), weights: weights.as_mut() };
        self.add_stored(unit, &pages, &mut workspace, &mut partial, &mut keep);
        if own {
            self.add_own(unit, &mut partial, &mut keep, stored);
        }
        let mut given = Vec::new();
        if self.alone(unit) {
            let target = &mut target.lock().unwrap_or_else(PoisonError::into_inner);
            let lse = self.write(unit, &mut partial, target);
            if let Some(mut weights) = weights.take() {
                given = self.fold(unit, &mut weights, &lse);
                workspace.received = weights;
            }
        }
        WORKSPACE.set(Some(workspace));
        if !self.alone(unit) || self.asked.is_some() {
            let left = Part { partial, record, weights, given };
            *part.lock().unwrap_or_else(PoisonError::into_inner) = Some(left);
        }
    }

    /// Entries of a unit's table with their places, and how much they hold.
    fn place(&self, unit: &Unit, entries: Range<usize>) -> (Vec<Placed<'a, Chunk>>, Stored) {
        let table = self.call.rows[unit.row].tables[unit.group];
        let mut stored = Stored { tokens: 0, chunks: 0 };
        let mut placed = Vec::with_capacity(entries.len());
        for entry in table.entries().skip(entries.start).take(entries.len()) {
            placed.push(Placed { entry, column: stored.tokens, chunk: stored.chunks });
            stored.tokens += entry.live().count_ones() as usize;
            stored.chunks += self.page_chunks(unit, entry);
        }
        (placed, stored)
    }

    /// Chunks of 16 slots of an entry's page.
    fn page_chunks(&self, unit: &Unit, entry: &Entry<Chunk>) -> usize {
        self.call.layer.classes[unit.group][entry.class()].desc.slots as usize / TILE
    }

    /// Weights of a job that has none yet, its own tokens as far as the unit's queries see them.
    fn clear_weights(&self, unit: &Unit, pages: &[Placed<'_, Chunk>], own: bool, weights: &mut Weights) {
        weights.clear();
        for page in pages {
            weights.add_page(page.entry.live(), self.page_chunks(unit, page.entry));
        }
        let tokens = if own { unit.queries.end } else { 0 };
        for first in (0..tokens).step_by(TILE) {
            weights.add_page(u64::MAX >> (64 - TILE.min(tokens - first)), 1);
        }
    }

    /// Query head and query of a row of a unit: rows are `[head of the group][query][query head]`.
    fn heads_of(&self, unit: &Unit, row: usize) -> (usize, usize) {
        let per_head = self.heads * unit.queries.len();
        let kv_head = unit.group * self.call.layer.heads_per_group + row / per_head;
        let (query, head) = (row % per_head / self.heads, row % self.heads);
        (kv_head * self.heads + head, unit.queries.start + query)
    }

    fn read_query(&self, unit: &Unit, row: usize, q: &mut [f32]) {
        let (head, query) = self.heads_of(unit, row);
        self.call.q.read_row([unit.row, head, self.call.rows[unit.row].columns[query]], q);
    }

    /// Adds pages, class by class.
    fn add_stored(
        &self,
        unit: &Unit,
        pages: &[Placed<'_, Chunk>],
        w: &mut Workspace,
        partial: &mut Partial,
        keep: &mut Keep<'_>,
    ) {
        for (class, codec) in self.call.layer.classes[unit.group].iter().enumerate() {
            let pages: Vec<_> = pages.iter().filter(|page| page.entry.class() == class).collect();
            if pages.is_empty() {
                continue;
            }
            let (rows, key_dim) = (self.rows(unit), self.call.layer.shape.key_dim);
            let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
            let pass = self.kernels.and_then(|k| PackedPass::new(k, codec, w, (rows, key_dim), read));
            match pass {
                Some(pass) => self.packed(unit, pass, &pages, partial, keep),
                None => self.blocks(unit, codec, &pages, partial, keep),
            }
        }
    }

    fn packed(
        &self,
        unit: &Unit,
        mut pass: PackedPass<'_>,
        pages: &[&Placed<'_, Chunk>],
        partial: &mut Partial,
        keep: &mut Keep<'_>,
    ) {
        let (start, queries) = (self.call.rows[unit.row].start, unit.queries.len());
        let (logits, values) = (self.logits_at(keep.stage), self.dim > 0);
        let call = PassCall { logits, group: self.heads, queries, start, stage: keep.stage, values };
        let (mut seen, mut masks) = (Vec::with_capacity(pages.len()), Vec::new());
        for page in pages {
            let before = masks.len();
            masks.extend(self.masks(unit, page.entry));
            if let (Stage::Values, Some(record)) = (keep.stage, &mut keep.record) {
                self.narrow_masks(unit, page, record, &mut masks[before..]);
            }
            if masks[before..].iter().all(|&mask| mask == 0) {
                masks.truncate(before);
            } else {
                seen.push(*page);
            }
        }
        pass.add_pages(call, &seen, &masks, keep);
        if keep.stage != Stage::Logits {
            pass.finish(partial, self.dim);
        }
    }

    fn blocks(
        &self,
        unit: &Unit,
        codec: &HeadCodec,
        pages: &[&Placed<'_, Chunk>],
        partial: &mut Partial,
        keep: &mut Keep<'_>,
    ) {
        let (rows, shape) = (self.rows(unit), &self.call.layer.shape);
        let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
        let mut pass = BlockPass::new(self.kernels, codec, rows, shape.key_dim, read);
        let mut masks = Vec::new();
        for placed in pages {
            masks.clear();
            masks.extend(self.masks(unit, placed.entry));
            if let (Stage::Values, Some(record)) = (keep.stage, &mut keep.record) {
                self.narrow_masks(unit, placed, record, &mut masks);
            }
            let page = PageAt { placed, start: self.call.rows[unit.row].start, masks: &masks };
            pass.add_page(page, self.logits_at(keep.stage), (self.heads, self.dim > 0), keep);
        }
        if keep.stage != Stage::Logits {
            pass.finish(partial, self.dim);
        }
    }

    /// What happens to scores: nothing more to those that come as logits.
    fn logits_at(&self, stage: Stage) -> Logits {
        if stage == Stage::Values { Logits { scale: 1.0, softcap: None } } else { self.logits }
    }

    /// Takes the slots of a page from the masks of the queries that none of their rows kept.
    fn narrow_masks(&self, unit: &Unit, page: &Placed<'_, Chunk>, record: &mut Record, masks: &mut [u64]) {
        let tiles = |masks: &[u64]| {
            let all = masks.iter().fold(0, |all, mask| all | mask);
            (0..4).filter(|tile| all >> (16 * tile) & 0xffff != 0).count() as u64
        };
        let before = tiles(masks);
        for (query, mask) in masks.iter_mut().enumerate() {
            let parts = 0..self.call.layer.heads_per_group;
            let first = |part: usize| (part * unit.queries.len() + query) * self.heads;
            *mask &= parts.fold(0, |all, part| all | record.seen((first(part), self.heads), page));
        }
        self.value_tiles.count(before, tiles(masks));
    }

    /// Visible slots of an entry per query.
    pub(crate) fn masks(&self, unit: &Unit, entry: &Entry<Chunk>) -> impl Iterator<Item = u64> {
        let first = self.call.rows[unit.row].first_index;
        unit.queries.clone().map(move |query| self.visibility.mask(entry, first + query))
    }

    /// Adds the call's own tokens, which stand behind the stored ones.
    fn add_own(&self, unit: &Unit, result: &mut Partial, keep: &mut Keep<'_>, stored: Stored) {
        let (layer, per_head) = (self.call.layer, self.heads * unit.queries.len());
        let dim = layer.shape.key_dim;
        let mut q = vec![0.0; per_head * dim];
        for part in 0..layer.heads_per_group {
            for (i, q) in q.chunks_exact_mut(dim).enumerate() {
                self.read_query(unit, part * per_head + i, q);
            }
            let call = OwnCall {
                kernels: self.kernels,
                q: &q,
                queries: unit.queries.clone(),
                sliding: layer.shape.sliding,
                logits: self.logits,
                first_row: part * per_head,
                stored: (stored.tokens, stored.chunks),
            };
            let partial =
                self.own_head(unit.row, unit.group * layer.heads_per_group + part).attend(&call, keep);
            if keep.stage != Stage::Logits {
                result.merge(part * per_head, &partial);
            }
        }
    }

    fn own_head(&self, row: usize, head: usize) -> &OwnHead {
        self.own[row * self.call.layer.shape.kv_heads + head].get_or_init(|| {
            let own = self.call.own.expect("asked for only when the call brings tokens");
            OwnHead::new(own, row, head, &self.call.rows[row].columns, self.dim)
        })
    }

    /// Writes a unit's outputs; returns the log-sum-exps of its rows if attention received is asked for.
    pub(crate) fn write(&self, unit: &Unit, result: &mut Partial, target: &mut Target<'_, '_>) -> Vec<f32> {
        let [_, heads, columns, _] = self.call.q.shape();
        let mut all_lse = Vec::new();
        for row in 0..self.rows(unit) {
            let (head, query) = self.heads_of(unit, row);
            let column = self.call.rows[unit.row].columns[query];
            let (out, lse) = result.finish(row, self.call.sink_logits.map(|sinks| sinks[head]));
            if let Some(to) = &mut target.out {
                to.write_row([unit.row, head, column], out);
            }
            if let Some(all) = &mut target.lse {
                all[(unit.row * heads + head) * columns + column] = lse;
            }
            if self.asked.is_some() {
                all_lse.push(lse);
            }
        }
        all_lse
    }
}
