//! An attention call cut into jobs, their partial results merged in a fixed order.

use crate::block_pass::{BlockPass, PageAt};
use crate::kernels::Kernels;
use crate::memory::{Chunk, Cpu, bytes};
use crate::output::Partial;
use crate::own::OwnHead;
use crate::packed_pass::{PackedPass, PageRef, PassCall, Workspace};
use crate::softmax::Logits;
use crate::visible::Visibility;
use kvrs_codec::backend::AttendCall;
use kvrs_codec::{HeadCodec, ViewMut};
use kvrs_core::page::{Entry, Table};
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Slots of a split: a query block over more of them is cut, whatever the number of threads.
const SPLIT_SLOTS: usize = 2048;
/// Query rows that share a loaded page.
const BLOCK_ROWS: usize = 128;
/// Scores of a call below which other threads are not woken: some 60 microseconds of work.
const SMALL_CALL: usize = 1 << 14;

/// Some queries of one row against one head group.
struct Unit {
    row: usize,
    group: usize,
    queries: Range<usize>,
    /// Its jobs, whose results are merged in this order.
    jobs: Range<usize>,
}

/// A part of the tokens for a unit.
struct Job {
    unit: usize,
    /// Entries of the unit's table.
    entries: Range<usize>,
    /// Whether the call's own tokens are part of it.
    own: bool,
}

/// A call with what its jobs share.
struct Context<'a> {
    kernels: Option<Kernels>,
    call: &'a AttendCall<'a, Chunk>,
    logits: Logits,
    visibility: Visibility,
    /// Own tokens `[row][key-value head]`, read when first asked for.
    own: Vec<OnceLock<OwnHead>>,
    /// Query heads per key-value head.
    heads: usize,
    units: Vec<Unit>,
    jobs: Vec<Job>,
}

/// Where results go; queries of different units never share a row of it.
struct Target<'a, 'b> {
    out: &'a mut ViewMut<'b>,
    lse: Option<&'a mut [f32]>,
}

thread_local! {
    /// Kept from call to call, so that attention allocates nothing once its buffers have grown.
    static WORKSPACE: Cell<Option<Box<Workspace>>> = const { Cell::new(None) };
}

pub(crate) fn attend(
    cpu: &Cpu,
    call: &AttendCall<'_, Chunk>,
    out: &mut ViewMut<'_>,
    mut lse: Option<&mut [f32]>,
) {
    clear_padding(call, out, lse.as_deref_mut());
    let context = Context::new(cpu.kernels(), call);
    let target = Mutex::new(Target { out, lse });
    let parts: Vec<Mutex<Option<Partial>>> = context.jobs.iter().map(|_| Mutex::new(None)).collect();
    let work = |job: usize| context.run(job, &parts, &target);
    if scores_of(call) < SMALL_CALL {
        (0..context.jobs.len()).for_each(work);
    } else {
        cpu.for_each_job(context.jobs.len(), work);
    }
    let mut target = target.into_inner().unwrap_or_else(PoisonError::into_inner);
    for unit in context.units.iter().filter(|unit| unit.jobs.len() > 1) {
        context.merge(unit, &parts, &mut target);
    }
}

/// Scores that the call computes, roughly.
fn scores_of(call: &AttendCall<'_, Chunk>) -> usize {
    let tokens = |row: &kvrs_codec::backend::AttendRow<'_, Chunk>| {
        (row.length + row.columns.len()) * row.columns.len()
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
    fn new(kernels: Option<Kernels>, call: &'a AttendCall<'a, Chunk>) -> Self {
        let shape = &call.layer.shape;
        let own = if call.own.is_some() { call.rows.len() * shape.kv_heads } else { 0 };
        let mut context = Self {
            kernels,
            call,
            logits: Logits { scale: call.scale, softcap: call.softcap },
            visibility: Visibility { causal: call.causal, sliding: shape.sliding },
            own: (0..own).map(|_| OnceLock::new()).collect(),
            heads: shape.group(),
            units: Vec::new(),
            jobs: Vec::new(),
        };
        context.plan();
        context
    }

    fn block_queries(&self) -> usize {
        (BLOCK_ROWS / (self.heads * self.call.layer.heads_per_group)).max(1)
    }

    /// Lists units and jobs.
    fn plan(&mut self) {
        let step = self.block_queries();
        for (row, queries) in self.call.rows.iter().enumerate() {
            let count = queries.columns.len();
            for (group, table) in queries.tables.iter().enumerate() {
                let splits = split(table, if count > step { usize::MAX } else { SPLIT_SLOTS });
                for first in (0..count).step_by(step) {
                    let (unit, jobs) = (self.units.len(), self.jobs.len());
                    let last = splits.len() - 1;
                    let job = |(i, entries): (usize, &Range<usize>)| Job {
                        unit,
                        entries: entries.clone(),
                        own: i == last && self.call.own.is_some(),
                    };
                    self.jobs.extend(splits.iter().enumerate().map(job));
                    let (queries, jobs) = (first..count.min(first + step), jobs..self.jobs.len());
                    self.units.push(Unit { row, group, queries, jobs });
                }
            }
        }
    }

    fn rows(&self, unit: &Unit) -> usize {
        self.heads * self.call.layer.heads_per_group * unit.queries.len()
    }

    /// Runs a job; the only job of a unit writes its result, others leave theirs in `parts`.
    fn run(&self, job: usize, parts: &[Mutex<Option<Partial>>], target: &Mutex<Target<'_, '_>>) {
        let Job { unit, ref entries, own } = self.jobs[job];
        let unit = &self.units[unit];
        let mut partial = Partial::new(self.rows(unit), self.call.layer.shape.value_dim);
        WORKSPACE.with(|cell| {
            let mut workspace = cell.take().unwrap_or_default();
            self.add_stored(unit, entries.clone(), &mut workspace, &mut partial);
            cell.set(Some(workspace));
        });
        if own {
            self.add_own(unit, &mut partial);
        }
        if unit.jobs.len() == 1 {
            self.write(unit, &mut partial, &mut target.lock().unwrap_or_else(PoisonError::into_inner));
        } else {
            *parts[job].lock().unwrap_or_else(PoisonError::into_inner) = Some(partial);
        }
    }

    fn merge(&self, unit: &Unit, parts: &[Mutex<Option<Partial>>], target: &mut Target<'_, '_>) {
        let mut result = Partial::new(self.rows(unit), self.call.layer.shape.value_dim);
        for part in &parts[unit.jobs.clone()] {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner);
            result.merge(0, part.as_ref().expect("every job has left its result"));
        }
        self.write(unit, &mut result, target);
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

    /// Adds the entries of a table, class by class.
    fn add_stored(&self, unit: &Unit, entries: Range<usize>, w: &mut Workspace, partial: &mut Partial) {
        let table = self.call.rows[unit.row].tables[unit.group];
        for (class, codec) in self.call.layer.classes[unit.group].iter().enumerate() {
            let all = table.entries().skip(entries.start).take(entries.len());
            let mut pages = all.filter(|entry| entry.class() == class).peekable();
            if pages.peek().is_none() {
                continue;
            }
            let (rows, key_dim) = (self.rows(unit), self.call.layer.shape.key_dim);
            let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
            let pass = self.kernels.and_then(|k| PackedPass::new(k, codec, w, (rows, key_dim), read));
            match pass {
                Some(pass) => self.packed(unit, pass, pages, partial),
                None => self.blocks(unit, codec, pages, partial),
            }
        }
    }

    fn packed<'e>(
        &self,
        unit: &Unit,
        mut pass: PackedPass<'_>,
        pages: impl Iterator<Item = &'e Entry<Chunk>>,
        partial: &mut Partial,
    ) {
        let start = self.call.rows[unit.row].start;
        let queries = unit.queries.len();
        let call = PassCall { logits: self.logits, group: self.heads, queries, start };
        // Entries are read one after the other before any page is: their cache misses overlap.
        let (mut seen, mut masks) = (Vec::with_capacity(SPLIT_SLOTS / 16), Vec::new());
        for entry in pages {
            let before = masks.len();
            masks.extend(self.masks(unit, entry));
            if masks[before..].iter().all(|&mask| mask == 0) {
                masks.truncate(before);
            } else {
                seen.push(PageRef { entry, bytes: bytes(entry.page()) });
            }
        }
        let size = pass.batch_pages();
        for (i, masks) in masks.chunks(size * queries).enumerate() {
            pass.add_batch(call, &seen, i * size, masks);
        }
        pass.finish(partial, self.call.layer.shape.value_dim);
    }

    fn blocks<'e>(
        &self,
        unit: &Unit,
        codec: &HeadCodec,
        pages: impl Iterator<Item = &'e Entry<Chunk>>,
        partial: &mut Partial,
    ) {
        let (rows, shape) = (self.rows(unit), &self.call.layer.shape);
        let read = |row: usize, q: &mut [f32]| self.read_query(unit, row, q);
        let mut pass = BlockPass::new(self.kernels, codec, rows, shape.key_dim, read);
        let mut masks = Vec::new();
        for entry in pages {
            masks.clear();
            masks.extend(self.masks(unit, entry));
            let page = PageAt { entry, start: self.call.rows[unit.row].start, masks: &masks };
            pass.add_page(page, self.logits, self.heads);
        }
        pass.finish(partial, shape.value_dim);
    }

    /// Visible slots of an entry per query.
    fn masks(&self, unit: &Unit, entry: &Entry<Chunk>) -> impl Iterator<Item = u64> {
        let first = self.call.rows[unit.row].first_index;
        unit.queries.clone().map(move |query| self.visibility.mask(entry, first + query))
    }

    fn add_own(&self, unit: &Unit, result: &mut Partial) {
        let (layer, per_head) = (self.call.layer, self.heads * unit.queries.len());
        let dim = layer.shape.key_dim;
        let mut q = vec![0.0; per_head * dim];
        for part in 0..layer.heads_per_group {
            for (i, q) in q.chunks_exact_mut(dim).enumerate() {
                self.read_query(unit, part * per_head + i, q);
            }
            let head = unit.group * layer.heads_per_group + part;
            let partial = self.own_head(unit.row, head).attend(
                &q,
                unit.queries.clone(),
                layer.shape.sliding,
                self.logits,
            );
            result.merge(part * per_head, &partial);
        }
    }

    fn own_head(&self, row: usize, head: usize) -> &OwnHead {
        self.own[row * self.call.layer.shape.kv_heads + head].get_or_init(|| {
            let own = self.call.own.expect("asked for only when the call brings tokens");
            OwnHead::new(own, row, head, &self.call.rows[row].columns)
        })
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

/// Entries of a table in ranges of about `most` slots; at least one.
fn split(table: &Table<Chunk>, most: usize) -> Vec<Range<usize>> {
    let mut splits = Vec::new();
    let (mut from, mut slots, mut entries) = (0, 0, 0);
    for entry in table.entries() {
        entries += 1;
        slots += entry.count();
        if slots >= most {
            splits.push(from..entries);
            (from, slots) = (entries, 0);
        }
    }
    if from < entries || splits.is_empty() {
        splits.push(from..entries);
    }
    splits
}
