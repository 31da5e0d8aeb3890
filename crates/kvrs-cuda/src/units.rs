//! An attention call as kernels see it: units of query rows, splits of pages, and the numbers of both.

use crate::args::{ACC, DECODE_ROWS, Entry as EntryArgs, NONE, OWN, ROWS, Receiver, Sequence, Split, Unit};
use crate::codec::DeviceCodec;
use crate::launcher::Launcher;
use crate::memory::{Chunk, address};
use kvrs_codec::backend::{AttendCall, AttendRow};
use kvrs_codec::desc::Path;
use kvrs_core::page::{Entry, Slots, Table};
use std::ops::Range;
use std::sync::Arc;

/// Slots of a split at most and at least: long tables are cut so that every warp of the device gets some, by the data
/// and the device alone.
const SPLIT_SLOTS: usize = 2048;
const LEAST_SLOTS: usize = 256;
/// Warps that a multiprocessor keeps busy.
const WARPS: usize = 12;
/// Slots of an entry of own tokens.
const OWN_SLOTS: usize = 64;
/// Queries that are prepared and scored at a time.
const WAVE_QUERIES: usize = 1024;
/// Logits that are kept at a time.
const KEPT_LOGITS: usize = 1 << 26;

/// The kernels that pass over pages: for any descriptor, and for up to 64, 128 and 256 stored channels.
pub(crate) const PASSES: usize = 4;

/// What all waves of a call share.
#[derive(Debug)]
pub(crate) struct Shape {
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    pub(crate) heads_per_group: usize,
    pub(crate) classes: usize,
    /// Channels of a prepared query at most.
    pub(crate) query_stride: usize,
    /// Channels of a sum at most.
    pub(crate) acc_stride: usize,
    /// Query rows of a unit.
    pub(crate) rows: usize,
    /// Whether logits are kept.
    pub(crate) records: bool,
    /// Which of the kernels takes a class, `[head group][class]`.
    passes: Vec<usize>,
    /// Slots of a split.
    split_slots: usize,
}

impl Shape {
    /// `codecs`: those of the call, `[head group][class]`; `None` where a group has fewer classes.
    pub(crate) fn new<L: Launcher>(
        call: &AttendCall<'_, Chunk<L>>,
        records: bool,
        device: &[Option<Arc<DeviceCodec<L>>>],
        processors: usize,
    ) -> Self {
        let shape = &call.layer.shape;
        let codecs = call.layer.classes.iter().flatten();
        let query_stride = codecs.clone().map(|codec| codec.desc.key.vec_len as usize).max();
        let sums = codecs.map(|codec| &codec.desc.value);
        let sums = sums.map(|side| if side.path == Path::Dot { side.vec_len } else { side.d } as usize).max();
        let acc_stride = sums.unwrap_or(0).max(shape.value_dim);
        let pass = |codec: &Option<Arc<DeviceCodec<L>>>| match codec.as_ref().and_then(|codec| codec.decode) {
            Some(channels) if !records => (channels / 64).ilog2() as usize + 1,
            _ => 0,
        };
        let passes: Vec<usize> = device.iter().map(pass).collect();
        let limit = if passes.iter().any(|pass| *pass > 0) { DECODE_ROWS } else { ROWS };
        let (group, most) = (shape.group(), (ACC / acc_stride).clamp(1, limit));
        let slots: usize = call.rows.iter().flat_map(|row| &row.tables).map(|table| table.kept()).sum();
        Self {
            group,
            kv_heads: shape.kv_heads,
            heads_per_group: call.layer.heads_per_group,
            classes: call.layer.classes.iter().map(Vec::len).max().unwrap_or(1),
            query_stride: query_stride.unwrap_or(0).max(shape.key_dim),
            acc_stride,
            // Whole queries where they fit, so that neighbours share what a unit loads.
            rows: if group <= most { most / group * group } else { most },
            records,
            passes,
            split_slots: (slots / (WARPS * processors))
                .next_multiple_of(OWN_SLOTS)
                .clamp(LEAST_SLOTS, SPLIT_SLOTS),
        }
    }

    /// Queries of a wave.
    pub(crate) fn wave<C>(&self, rows: &[AttendRow<'_, C>]) -> usize {
        let heads = self.kv_heads * self.group;
        let tokens: usize = rows.iter().map(|row| (row.length + row.columns.len()) * heads).sum();
        let kept = if self.records { KEPT_LOGITS / tokens.max(1) } else { WAVE_QUERIES };
        (WAVE_QUERIES / rows.len().max(1)).min(kept).max(1)
    }
}

/// The lists of one wave.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) units: Vec<Unit>,
    pub(crate) splits: Vec<Split>,
    pub(crate) entries: Vec<EntryArgs>,
    pub(crate) indices: Vec<u32>,
    /// Column of each query of the call, row by row.
    pub(crate) columns: Vec<u32>,
    /// Row and column of each query of the wave.
    pub(crate) prepared: [Vec<u32>; 2],
    pub(crate) receivers: Vec<Receiver>,
    /// Splits for each of the kernels.
    pub(crate) chosen: [Vec<u32>; PASSES],
    /// Logits and sums of receivers that are kept.
    pub(crate) logits: u64,
    pub(crate) sums: u64,
}

/// Entries of one class.
#[derive(Debug, Clone)]
struct Pages {
    group_class: u32,
    entries: Range<usize>,
    slots: usize,
}

impl Work {
    /// The queries `wave` of every row.
    pub(crate) fn new<L: Launcher>(
        call: &AttendCall<'_, Chunk<L>>,
        shape: &Shape,
        wave: &Range<usize>,
    ) -> Self {
        let mut all = Self::default();
        for (row, queries) in call.rows.iter().enumerate() {
            let of_row = wave.start.min(queries.columns.len())..wave.end.min(queries.columns.len());
            all.add_row(call, shape, (row, queries), of_row);
        }
        all
    }

    fn add_row<L: Launcher>(
        &mut self,
        call: &AttendCall<'_, Chunk<L>>,
        shape: &Shape,
        (row, queries): (usize, &AttendRow<'_, Chunk<L>>),
        wave: Range<usize>,
    ) {
        let prepared = self.prepared[0].len() as u32;
        self.sequences.push(Sequence {
            start: queries.start,
            first_index: queries.first_index as u32,
            first_query: self.columns.len() as u32,
            prepared: prepared.wrapping_sub(wave.start as u32),
            pad: 0,
        });
        self.columns.extend(queries.columns.iter().map(|&column| column as u32));
        for &column in &queries.columns[wave.clone()] {
            self.prepared[0].push(row as u32);
            self.prepared[1].push(column as u32);
        }
        let own = call.own.map_or(0, |_| queries.columns.len());
        for (group, table) in queries.tables.iter().enumerate() {
            let stored = table.kept();
            let pages = self.add_table(call, group, table);
            let own = self.add_own(own, stored);
            for head in group * shape.heads_per_group..(group + 1) * shape.heads_per_group {
                self.add_head(shape, (row, head), (&pages, &own), &wave, stored + own.tokens);
            }
        }
    }

    /// The entries of a table, class by class.
    fn add_table<L: Launcher>(
        &mut self,
        call: &AttendCall<'_, Chunk<L>>,
        group: usize,
        table: &Table<Chunk<L>>,
    ) -> Vec<Pages> {
        let classes = call.layer.classes[group].iter().enumerate();
        let mut pages = Vec::with_capacity(classes.len());
        for (class, codec) in classes {
            let (first, mut column) = (self.entries.len(), 0);
            for entry in table.entries() {
                if entry.class() == class && entry.live() != 0 {
                    let entry = self.entry(entry, column);
                    self.entries.push(entry);
                }
                column += entry.live().count_ones();
            }
            let (group_class, slots) = (class as u32, codec.desc.slots as usize);
            pages.push(Pages { group_class, entries: first..self.entries.len(), slots });
        }
        pages
    }

    fn entry<L: Launcher>(&mut self, entry: &Entry<Chunk<L>>, column: u32) -> EntryArgs {
        let (first, gathered) = match entry.slots() {
            Slots::Run { first } => (*first, NONE),
            Slots::Gathered(indices) => {
                let at = self.indices.len() as u32;
                self.indices.extend_from_slice(indices);
                (0, at)
            }
        };
        EntryArgs { page: address(entry.page()), live: entry.live(), first, gathered, column, pad: 0 }
    }

    fn add_own(&mut self, tokens: usize, stored: usize) -> Own {
        let first = self.entries.len();
        for at in (0..tokens).step_by(OWN_SLOTS) {
            let live = u64::MAX >> (OWN_SLOTS - OWN_SLOTS.min(tokens - at));
            let (first, column) = (at as u32, (stored + at) as u32);
            self.entries.push(EntryArgs { page: 0, live, first, gathered: NONE, column, pad: 0 });
        }
        Own { first, tokens }
    }

    fn add_head(
        &mut self,
        shape: &Shape,
        (row, head): (usize, usize),
        (pages, own): (&[Pages], &Own),
        wave: &Range<usize>,
        tokens: usize,
    ) {
        let rows = wave.start * shape.group..wave.end * shape.group;
        let record = self.logits;
        for first_row in rows.clone().step_by(shape.rows) {
            let count = shape.rows.min(rows.end - first_row);
            let before = if shape.records { (first_row - rows.start) * tokens } else { 0 };
            let first_split = self.splits.len();
            let unit = self.units.len() as u32;
            let last_query = (first_row + count - 1) / shape.group;
            // Where logits are kept, every token has one, seen or not.
            let own = own.pages(if shape.records { own.tokens } else { last_query });
            for pages in pages.iter().chain([&own]) {
                self.split(shape, (unit, head), pages);
            }
            self.units.push(Unit {
                record: record + before as u64,
                sequence: row as u32,
                head: head as u32,
                first_row: first_row as u32,
                rows: count as u32,
                first_split: first_split as u32,
                splits: (self.splits.len() - first_split) as u32,
                tokens: tokens as u32,
                pad: 0,
            });
        }
        if shape.records {
            self.receivers.push(Receiver {
                record,
                sums: self.sums,
                sequence: row as u32,
                head: head as u32,
                tokens: tokens as u32,
                first_query: wave.start as u32,
                queries: wave.len() as u32,
                pad: 0,
            });
            self.logits += (rows.len() * tokens) as u64;
            self.sums += tokens as u64;
        }
    }

    fn split(&mut self, shape: &Shape, (unit, head): (u32, usize), pages: &Pages) {
        let step = shape.split_slots / pages.slots;
        let group = head / shape.heads_per_group * shape.classes;
        let pass =
            if pages.group_class == OWN { 0 } else { shape.passes[group + pages.group_class as usize] };
        for first in pages.entries.clone().step_by(step) {
            self.chosen[pass].push(self.splits.len() as u32);
            self.splits.push(Split {
                unit,
                first_entry: first as u32,
                entries: step.min(pages.entries.end - first) as u32,
                group_class: pages.group_class,
            });
        }
    }
}

/// The call's own tokens of a row.
#[derive(Debug)]
struct Own {
    /// First of their entries.
    first: usize,
    tokens: usize,
}

impl Own {
    /// The entries that queries up to `last` see.
    fn pages(&self, last: usize) -> Pages {
        let seen = self.tokens.min(last + 1).div_ceil(OWN_SLOTS);
        Pages { group_class: OWN, entries: self.first..self.first + seen, slots: OWN_SLOTS }
    }
}
