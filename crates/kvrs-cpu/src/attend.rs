//! An attention call cut into jobs, their partial results merged in a fixed order.

use crate::memory::{Chunk, Cpu};
use crate::output::Partial;
use crate::own::OwnHead;
use crate::page::{ClassPass, PageAt};
use crate::softmax::Logits;
use crate::visible::Visibility;
use kvrs_codec::ViewMut;
use kvrs_codec::backend::AttendCall;
use kvrs_core::page::Entry;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Slots of a split: a query block over more of them is cut, whatever the number of threads.
const SPLIT_SLOTS: usize = 2048;
/// Query rows that share a loaded tile.
const BLOCK_ROWS: usize = 128;
/// Scores of a call below which other threads are not woken.
const SMALL_CALL: usize = 1 << 14;

/// Some queries of one row against one head group.
struct Unit {
    row: usize,
    group: usize,
    queries: Range<usize>,
}

/// A call with what its jobs share.
struct Context<'a> {
    call: &'a AttendCall<'a, Chunk>,
    logits: Logits,
    visibility: Visibility,
    /// Entries of every table: `[row][head group]`.
    entries: Vec<Vec<Vec<&'a Entry<Chunk>>>>,
    /// Own tokens `[row][key-value head]`.
    own: Vec<Vec<OwnHead>>,
    /// Query heads per key-value head.
    heads: usize,
    parallel: bool,
}

/// Where results go; queries of different units never share a row of it.
struct Target<'a, 'b> {
    out: &'a mut ViewMut<'b>,
    lse: Option<&'a mut [f32]>,
}

pub(crate) fn attend(
    cpu: &Cpu,
    call: &AttendCall<'_, Chunk>,
    out: &mut ViewMut<'_>,
    mut lse: Option<&mut [f32]>,
) {
    clear_padding(call, out, lse.as_deref_mut());
    let target = Mutex::new(Target { out, lse });
    let parallel = cpu.threads() > 1 && scores_of(call) >= SMALL_CALL;
    if parallel {
        cpu.on_pool(|| run(call, parallel, &target));
    } else {
        run(call, parallel, &target);
    }
}

fn run(call: &AttendCall<'_, Chunk>, parallel: bool, target: &Mutex<Target<'_, '_>>) {
    let context = Context::new(call, parallel);
    let units = context.units();
    if parallel {
        units.par_iter().for_each(|unit| context.run_unit(unit, target));
    } else {
        for unit in &units {
            context.run_unit(unit, target);
        }
    }
}

/// Scores that the call computes, roughly.
fn scores_of(call: &AttendCall<'_, Chunk>) -> usize {
    let tokens = |row: &kvrs_codec::backend::AttendRow<'_, Chunk>| {
        let kept: usize = row.tables.iter().map(|t| t.entries().map(Entry::count).sum::<usize>()).sum();
        (kept / row.tables.len().max(1) + row.columns.len()) * row.columns.len()
    };
    call.rows.iter().map(tokens).sum::<usize>() * call.layer.shape.query_heads
}

fn clear_padding(call: &AttendCall<'_, Chunk>, out: &mut ViewMut<'_>, mut lse: Option<&mut [f32]>) {
    let [_, heads, columns, dim] = out.shape();
    let zeros = vec![0.0; dim];
    for (row, queries) in call.rows.iter().enumerate().filter(|(_, row)| row.columns.len() < columns) {
        let mut next = queries.columns.iter().copied().peekable();
        for column in 0..columns {
            if next.next_if_eq(&column).is_some() {
                continue;
            }
            for head in 0..heads {
                out.write_row([row, head, column], &zeros);
                if let Some(lse) = &mut lse {
                    lse[(row * heads + head) * columns + column] = f32::NEG_INFINITY;
                }
            }
        }
    }
}

impl<'a> Context<'a> {
    fn new(call: &'a AttendCall<'a, Chunk>, parallel: bool) -> Self {
        let shape = &call.layer.shape;
        let entries = call.rows.iter().map(|r| r.tables.iter().map(|t| t.entries().collect()).collect());
        let own_row = |row: usize| -> Vec<OwnHead> {
            let Some(own) = call.own else { return Vec::new() };
            let read = |head| OwnHead::new(own, row, head, &call.rows[row].columns);
            if parallel {
                (0..shape.kv_heads).into_par_iter().map(read).collect()
            } else {
                (0..shape.kv_heads).map(read).collect()
            }
        };
        Self {
            call,
            logits: Logits { scale: call.scale, softcap: call.softcap },
            visibility: Visibility { causal: call.causal, sliding: shape.sliding },
            entries: entries.collect(),
            own: (0..call.rows.len()).map(own_row).collect(),
            heads: shape.group(),
            parallel,
        }
    }

    fn block_queries(&self) -> usize {
        (BLOCK_ROWS / (self.heads * self.call.layer.heads_per_group)).max(1)
    }

    fn units(&self) -> Vec<Unit> {
        let step = self.block_queries();
        let mut units = Vec::new();
        for (row, queries) in self.call.rows.iter().enumerate() {
            let count = queries.columns.len();
            for group in 0..queries.tables.len() {
                let blocks = (0..count).step_by(step);
                units.extend(blocks.map(|q| Unit { row, group, queries: q..count.min(q + step) }));
            }
        }
        units
    }

    /// Stored pages, cut by their slots alone, and the own tokens, merged in this order.
    fn run_unit(&self, unit: &Unit, target: &Mutex<Target<'_, '_>>) {
        let entries = &self.entries[unit.row][unit.group];
        let whole = self.call.rows[unit.row].columns.len() > self.block_queries();
        let splits = if whole { vec![&entries[..]] } else { split(entries) };
        let rows = self.heads * self.call.layer.heads_per_group * unit.queries.len();
        let mut result = Partial::new(rows, self.call.layer.shape.value_dim);
        let stored = |split: &&[&Entry<Chunk>]| self.stored(unit, split);
        if self.parallel && splits.len() > 1 {
            let parts: Vec<Partial> = splits.par_iter().map(stored).collect();
            for part in &parts {
                result.merge(0, part);
            }
        } else {
            for split in &splits {
                result.merge(0, &stored(split));
            }
        }
        if self.call.own.is_some() {
            self.add_own(unit, &mut result);
        }
        self.write(unit, &mut result, &mut target.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Query head and query of a row of a unit: rows are `[head of the group][query][query head]`.
    fn place(&self, unit: &Unit, row: usize) -> (usize, usize) {
        let per_head = self.heads * unit.queries.len();
        let kv_head = unit.group * self.call.layer.heads_per_group + row / per_head;
        let (query, head) = (row % per_head / self.heads, row % self.heads);
        (kv_head * self.heads + head, unit.queries.start + query)
    }

    fn read_query(&self, unit: &Unit, row: usize, q: &mut [f32]) {
        let (head, query) = self.place(unit, row);
        self.call.q.read_row([unit.row, head, self.call.rows[unit.row].columns[query]], q);
    }

    fn stored(&self, unit: &Unit, entries: &[&'a Entry<Chunk>]) -> Partial {
        let (layer, row) = (self.call.layer, &self.call.rows[unit.row]);
        let (key_dim, value_dim) = (layer.shape.key_dim, layer.shape.value_dim);
        let rows = self.heads * layer.heads_per_group * unit.queries.len();
        let mut partial = Partial::new(rows, value_dim);
        let mut masks = vec![0; unit.queries.len()];
        for (class, codec) in layer.classes[unit.group].iter().enumerate() {
            let mut pages = entries.iter().filter(|entry| entry.class() == class).peekable();
            if pages.peek().is_none() {
                continue;
            }
            let mut pass = ClassPass::new(codec, rows, key_dim, |row, q| self.read_query(unit, row, q));
            for entry in pages {
                for (mask, query) in masks.iter_mut().zip(unit.queries.clone()) {
                    *mask = self.visibility.mask(entry, row.first_index + query);
                }
                let page = PageAt { entry, start: row.start, masks: &masks };
                pass.add_page(page, self.logits, self.heads);
            }
            pass.finish(&mut partial, value_dim);
        }
        partial
    }

    fn add_own(&self, unit: &Unit, result: &mut Partial) {
        let (layer, per_head) = (self.call.layer, self.heads * unit.queries.len());
        let dim = layer.shape.key_dim;
        let mut q = vec![0.0; per_head * dim];
        for part in 0..layer.heads_per_group {
            for (i, q) in q.chunks_exact_mut(dim).enumerate() {
                self.read_query(unit, part * per_head + i, q);
            }
            let own = &self.own[unit.row][unit.group * layer.heads_per_group + part];
            let partial = own.attend(&q, unit.queries.clone(), layer.shape.sliding, self.logits);
            result.merge(part * per_head, &partial);
        }
    }

    fn write(&self, unit: &Unit, result: &mut Partial, target: &mut Target<'_, '_>) {
        let [_, heads, columns, _] = target.out.shape();
        for row in 0..self.heads * self.call.layer.heads_per_group * unit.queries.len() {
            let (head, query) = self.place(unit, row);
            let column = self.call.rows[unit.row].columns[query];
            let (out, lse) = result.finish(row, self.call.sink_logits.map(|sinks| sinks[head]));
            target.out.write_row([unit.row, head, column], out);
            if let Some(all) = &mut target.lse {
                all[(unit.row * heads + head) * columns + column] = lse;
            }
        }
    }
}

fn split<'e, 'a>(entries: &'e [&'a Entry<Chunk>]) -> Vec<&'e [&'a Entry<Chunk>]> {
    let mut splits = Vec::new();
    let (mut from, mut slots) = (0, 0);
    for (i, entry) in entries.iter().enumerate() {
        slots += entry.count();
        if slots >= SPLIT_SLOTS {
            splits.push(&entries[from..=i]);
            (from, slots) = (i + 1, 0);
        }
    }
    if from < entries.len() {
        splits.push(&entries[from..]);
    }
    splits
}
