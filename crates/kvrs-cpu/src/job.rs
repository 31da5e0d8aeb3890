//! One job of an attention call: some pages of a table, and the call's own tokens, for the queries of a unit.

use crate::attend::{Context, Job, Part, Target, Unit, WORKSPACE};
use crate::block_pass::{BlockPass, PageAt};
use crate::memory::Chunk;
use crate::output::Partial;
use crate::own::OwnHead;
use crate::packed_pass::{PackedPass, PassCall, Workspace};
use crate::received::{Placed, Record};
use crate::softmax::Logits;
use crate::top_k::Stage;
use kvrs_codec::HeadCodec;
use kvrs_core::page::Entry;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

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
        let mut partial = Partial::new(self.rows(unit), self.call.layer.shape.value_dim);
        let (pages, tokens) = self.place(unit, entries.clone());
        let own_tokens = if own { self.call.rows[unit.row].columns.len() } else { 0 };
        let left = part.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut record = left.and_then(|part| part.record);
        if record.is_none() && self.keeps_logits() {
            record = Some(Record::new(self.rows(unit), tokens + own_tokens));
        }
        WORKSPACE.with(|cell| {
            let mut workspace = cell.take().unwrap_or_default();
            self.add_stored(unit, &pages, &mut workspace, &mut partial, (record.as_mut(), stage));
            cell.set(Some(workspace));
        });
        if own {
            self.add_own(unit, &mut partial, (record.as_mut().map(|record| (record, tokens)), stage));
        }
        if unit.jobs.len() == 1 && record.is_none() {
            self.write(unit, &mut partial, &mut target.lock().unwrap_or_else(PoisonError::into_inner));
        } else {
            *part.lock().unwrap_or_else(PoisonError::into_inner) = Some(Part { partial, record });
        }
    }

    /// Entries of a unit's table with their places among the live tokens, whose number follows.
    fn place(&self, unit: &Unit, entries: Range<usize>) -> (Vec<Placed<'a, Chunk>>, usize) {
        let table = self.call.rows[unit.row].tables[unit.group];
        let mut column = 0;
        let mut placed = Vec::with_capacity(entries.len());
        for entry in table.entries().skip(entries.start).take(entries.len()) {
            placed.push(Placed { entry, column });
            column += entry.live().count_ones() as usize;
        }
        (placed, column)
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
        (mut record, stage): (Option<&mut Record>, Stage),
    ) {
        for (class, codec) in self.call.layer.classes[unit.group].iter().enumerate() {
            let pages: Vec<_> = pages.iter().filter(|page| page.entry.class() == class).collect();
            if pages.is_empty() {
                continue;
            }
            let (rows, key_dim) = (self.rows(unit), self.call.layer.shape.key_dim);
            let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
            let pass = self.kernels.and_then(|k| PackedPass::new(k, codec, w, (rows, key_dim), read));
            let record = (record.as_deref_mut(), stage);
            match pass {
                Some(pass) => self.packed(unit, pass, &pages, partial, record),
                None => self.blocks(unit, codec, &pages, partial, record),
            }
        }
    }

    fn packed(
        &self,
        unit: &Unit,
        mut pass: PackedPass<'_>,
        pages: &[&Placed<'_, Chunk>],
        partial: &mut Partial,
        (mut record, stage): (Option<&mut Record>, Stage),
    ) {
        let (start, queries) = (self.call.rows[unit.row].start, unit.queries.len());
        let call = PassCall { logits: self.logits_at(stage), group: self.heads, queries, start, stage };
        let (mut seen, mut masks) = (Vec::with_capacity(pages.len()), Vec::new());
        for page in pages {
            let before = masks.len();
            masks.extend(self.masks(unit, page.entry));
            if let (Stage::Values, Some(record)) = (stage, &mut record) {
                self.narrow_masks(unit, page, record, &mut masks[before..]);
            }
            if masks[before..].iter().all(|&mask| mask == 0) {
                masks.truncate(before);
            } else {
                seen.push(*page);
            }
        }
        pass.add_pages(call, &seen, &masks, record);
        if stage != Stage::Logits {
            pass.finish(partial, self.call.layer.shape.value_dim);
        }
    }

    fn blocks(
        &self,
        unit: &Unit,
        codec: &HeadCodec,
        pages: &[&Placed<'_, Chunk>],
        partial: &mut Partial,
        (mut record, stage): (Option<&mut Record>, Stage),
    ) {
        let (rows, shape) = (self.rows(unit), &self.call.layer.shape);
        let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
        let mut pass = BlockPass::new(self.kernels, codec, rows, shape.key_dim, read);
        let mut masks = Vec::new();
        for placed in pages {
            masks.clear();
            masks.extend(self.masks(unit, placed.entry));
            if let (Stage::Values, Some(record)) = (stage, &mut record) {
                self.narrow_masks(unit, placed, record, &mut masks);
            }
            let page = PageAt { placed, start: self.call.rows[unit.row].start, masks: &masks };
            pass.add_page(page, (self.logits_at(stage), stage), self.heads, record.as_deref_mut());
        }
        if stage != Stage::Logits {
            pass.finish(partial, shape.value_dim);
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
    fn masks(&self, unit: &Unit, entry: &Entry<Chunk>) -> impl Iterator<Item = u64> {
        let first = self.call.rows[unit.row].first_index;
        unit.queries.clone().map(move |query| self.visibility.mask(entry, first + query))
    }

    /// Adds the call's own tokens; their logits go behind the first `.1` ones of a record.
    fn add_own(
        &self,
        unit: &Unit,
        result: &mut Partial,
        (mut record, stage): (Option<(&mut Record, usize)>, Stage),
    ) {
        let (layer, per_head) = (self.call.layer, self.heads * unit.queries.len());
        let dim = layer.shape.key_dim;
        let mut q = vec![0.0; per_head * dim];
        for part in 0..layer.heads_per_group {
            for (i, q) in q.chunks_exact_mut(dim).enumerate() {
                self.read_query(unit, part * per_head + i, q);
            }
            let head = unit.group * layer.heads_per_group + part;
            let keep = |row: usize, token: usize, logits: &mut [f32]| {
                let Some((record, stored)) = &mut record else { return };
                let kept = &mut record.row(part * per_head + row, *stored + token)[..logits.len()];
                let (to, from) = if stage == Stage::Values { (logits, kept) } else { (kept, logits) };
                to.copy_from_slice(from);
            };
            let (queries, sliding) = (unit.queries.clone(), layer.shape.sliding);
            let partial = self.own_head(unit.row, head).attend(&q, queries, sliding, self.logits, keep);
            if stage != Stage::Logits {
                result.merge(part * per_head, &partial);
            }
        }
    }

    fn own_head(&self, row: usize, head: usize) -> &OwnHead {
        self.own[row * self.call.layer.shape.kv_heads + head].get_or_init(|| {
            let own = self.call.own.expect("asked for only when the call brings tokens");
            OwnHead::new(own, row, head, &self.call.rows[row].columns)
        })
    }

    /// Writes a unit's outputs; returns the log-sum-exps of its rows if attention received is asked for.
    pub(crate) fn write(&self, unit: &Unit, result: &mut Partial, target: &mut Target<'_, '_>) -> Vec<f32> {
        let [_, heads, columns, _] = target.out.shape();
        let mut all_lse = Vec::new();
        for row in 0..self.rows(unit) {
            let (head, query) = self.heads_of(unit, row);
            let column = self.call.rows[unit.row].columns[query];
            let (out, lse) = result.finish(row, self.call.sink_logits.map(|sinks| sinks[head]));
            target.out.write_row([unit.row, head, column], out);
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
