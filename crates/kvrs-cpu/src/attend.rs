//! An attention call cut into jobs, their partial results merged in a fixed order.

use crate::kernels::Kernels;
use crate::memory::{Chunk, Cpu};
use crate::output::{Partial, clear_padding};
use crate::own::OwnHead;
use crate::packed_pass::Workspace;
use crate::received::Weights;
use crate::softmax::Logits;
use crate::top_k::{Record, Stage, keep_largest};
use crate::visible::Visibility;
use kvrs_codec::ViewMut;
use kvrs_codec::backend::{AttendCall, Results, ValueTiles};
use kvrs_core::page::Table;
use kvrs_core::statistics::{Fold, Reduce};
use std::cell::Cell;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Slots of a split: a query block over more of them is cut, whatever the number of threads.
const SPLIT_SLOTS: usize = 2048;
/// Query rows that share a loaded page.
const BLOCK_ROWS: usize = 128;
/// Units that run at the same time where attention received is asked for.
const WAVE_UNITS: usize = 64;
/// Those of them whose logits or weights are kept until the last of their jobs has ended.
const KEPT_UNITS: usize = 8;
/// Logits or weights that a unit may keep.
const KEPT_LOGITS: usize = 1 << 20;
/// Scores of a call below which other threads are not woken: some 60 microseconds of work.
const SMALL_CALL: usize = 1 << 14;

/// Some queries of one row against one head group.
pub(crate) struct Unit {
    pub(crate) row: usize,
    pub(crate) group: usize,
    pub(crate) queries: Range<usize>,
    /// Its jobs, whose results are merged in this order.
    pub(crate) jobs: Range<usize>,
}

/// A part of the tokens for a unit.
pub(crate) struct Job {
    pub(crate) unit: usize,
    /// Entries of the unit's table.
    pub(crate) entries: Range<usize>,
    /// Whether the call's own tokens are part of it.
    pub(crate) own: bool,
}

/// What a job leaves for its unit.
pub(crate) struct Part {
    pub(crate) partial: Partial,
    /// Logits, until the largest are known.
    pub(crate) record: Option<Record>,
    /// Softmax weights, until the log-sum-exps are known.
    pub(crate) weights: Option<Weights>,
    /// Attention that the job's tokens received `[head of the group][token]`.
    pub(crate) given: Vec<f32>,
}

/// A call with what its jobs share.
pub(crate) struct Context<'a> {
    pub(crate) kernels: Option<Kernels>,
    pub(crate) call: &'a AttendCall<'a, Chunk>,
    pub(crate) logits: Logits,
    pub(crate) visibility: Visibility,
    /// Own tokens `[row][key-value head]`, read when first asked for.
    pub(crate) own: Vec<OnceLock<OwnHead>>,
    /// Query heads per key-value head.
    pub(crate) heads: usize,
    pub(crate) units: Vec<Unit>,
    pub(crate) jobs: Vec<Job>,
    /// Channels of an output; 0 where none are asked for, and no value is read.
    pub(crate) dim: usize,
    /// What of the attention each token receives is asked for.
    pub(crate) asked: Option<(Reduce, Fold)>,
    /// What top-k attention saw and read.
    pub(crate) value_tiles: ValueTiles,
}

/// Where results go; queries of different units never share a row of it.
pub(crate) struct Target<'a, 'b> {
    pub(crate) out: Option<&'a mut ViewMut<'b>>,
    pub(crate) lse: Option<&'a mut [f32]>,
}

thread_local! {
    /// Kept from call to call, so that attention allocates nothing once its buffers have grown.
    pub(crate) static WORKSPACE: Cell<Option<Box<Workspace>>> = const { Cell::new(None) };
}

pub(crate) fn attend(
    cpu: &Cpu,
    call: &AttendCall<'_, Chunk>,
    Results { mut out, mut lse, received, value_tiles }: Results<'_, '_>,
) {
    clear_padding(call, out.as_deref_mut(), lse.as_deref_mut());
    let asked = received.as_ref().map(|r| (r.reduce, r.fold));
    let context = Context::new(cpu.kernels(), call, out.is_some(), asked);
    let target = Mutex::new(Target { out, lse });
    let mut sums = received.map(|received| received.sums);
    for units in context.units.chunks(context.wave()) {
        for (unit, parts) in units.iter().zip(context.run_units(cpu, units, &target)) {
            if let Some(sums) = &mut sums {
                context.add_given(unit, &parts, sums);
            }
        }
    }
    if let Some(value_tiles) = value_tiles {
        value_tiles.add(&context.value_tiles);
    }
}

/// Scores that the call computes, roughly.
fn scores_of(call: &AttendCall<'_, Chunk>) -> usize {
    let tokens = |row: &kvrs_codec::backend::AttendRow<'_, Chunk>| {
        (row.length + row.columns.len()) * row.columns.len()
    };
    call.rows.iter().map(tokens).sum::<usize>() * call.layer.shape.query_heads
}

impl<'a> Context<'a> {
    fn new(
        kernels: Option<Kernels>,
        call: &'a AttendCall<'a, Chunk>,
        outputs: bool,
        asked: Option<(Reduce, Fold)>,
    ) -> Self {
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
            dim: if outputs { shape.value_dim } else { 0 },
            asked,
            value_tiles: ValueTiles::default(),
        };
        context.plan();
        context
    }

    /// Whether numbers of every row and token are kept for a while.
    fn keeps(&self) -> bool {
        self.asked.is_some() || self.call.top_k.is_some()
    }

    /// Units that run at the same time.
    fn wave(&self) -> usize {
        let apart = self.call.top_k.is_some() || self.jobs.len() > self.units.len();
        match (self.keeps(), apart) {
            (false, _) => usize::MAX,
            (true, true) => KEPT_UNITS,
            (true, false) => WAVE_UNITS,
        }
    }

    /// Queries of a unit; fewer where the logits of each are kept.
    fn block_queries(&self) -> usize {
        let tokens = self.call.rows.iter().map(|row| row.length + row.columns.len()).max().unwrap_or(0);
        let rows = if self.keeps() { KEPT_LOGITS / tokens.max(1) } else { BLOCK_ROWS };
        (rows.min(BLOCK_ROWS) / (self.heads * self.call.layer.heads_per_group)).max(1)
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

    pub(crate) fn rows(&self, unit: &Unit) -> usize {
        self.heads * self.call.layer.heads_per_group * unit.queries.len()
    }

    /// Runs neighbouring units; of each, what its jobs left.
    fn run_units(&self, cpu: &Cpu, units: &[Unit], target: &Mutex<Target<'_, '_>>) -> Vec<Vec<Part>> {
        let (Some(first), Some(last)) = (units.first(), units.last()) else { return Vec::new() };
        let jobs = first.jobs.start..last.jobs.end;
        let parts: Vec<Mutex<Option<Part>>> = jobs.clone().map(|_| Mutex::new(None)).collect();
        let stage = if self.call.top_k.is_some() { Stage::Logits } else { Stage::Whole };
        let run = |job: usize, stage: Stage| self.run(jobs.start + job, stage, &parts[job], target);
        self.each(cpu, parts.len(), |job| run(job, stage));
        if let Some(k) = self.call.top_k {
            self.each(cpu, units.len(), |i| {
                let own = units[i].jobs.start - jobs.start..units[i].jobs.end - jobs.start;
                self.keep_largest(&units[i], &parts[own], k);
            });
            self.each(cpu, parts.len(), |job| run(job, Stage::Values));
        }
        let take = |part: Mutex<Option<Part>>| part.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut parts = parts.into_iter().map(take);
        let unit_parts = |unit: &Unit| {
            let mut parts: Vec<Part> = parts.by_ref().take(unit.jobs.len()).flatten().collect();
            self.merge(unit, &mut parts, target);
            parts
        };
        units.iter().map(unit_parts).collect()
    }

    /// Merges what the jobs of a unit left, unless its only job has done that already.
    fn merge(&self, unit: &Unit, parts: &mut [Part], target: &Mutex<Target<'_, '_>>) {
        if self.alone(unit) {
            return;
        }
        let mut result = Partial::new(self.rows(unit), self.dim);
        for part in &*parts {
            result.merge(0, &part.partial);
        }
        let lse = self.write(unit, &mut result, &mut target.lock().unwrap_or_else(PoisonError::into_inner));
        for part in parts {
            part.given =
                part.weights.take().map_or(Vec::new(), |mut weights| self.fold(unit, &mut weights, &lse));
        }
    }

    /// Whether a unit has one job, which writes its result itself.
    pub(crate) fn alone(&self, unit: &Unit) -> bool {
        unit.jobs.len() == 1 && self.call.top_k.is_none()
    }

    /// Calls `work(0)` to `work(count - 1)`, on several threads where that pays.
    fn each(&self, cpu: &Cpu, count: usize, work: impl Fn(usize) + Sync) {
        if scores_of(self.call) < SMALL_CALL {
            (0..count).for_each(work);
        } else {
            cpu.for_each_job(count, work);
        }
    }

    /// Leaves the largest `k` logits of every row of a unit in the records of its jobs.
    fn keep_largest(&self, unit: &Unit, parts: &[Mutex<Option<Part>>], k: usize) {
        let mut parts: Vec<_> =
            parts.iter().map(|p| p.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        let parts = parts.iter_mut().filter_map(|part| part.as_mut());
        let mut records: Vec<&mut Record> = parts.filter_map(|part| part.record.as_mut()).collect();
        let mut all = Vec::new();
        (0..self.rows(unit)).for_each(|row| keep_largest(&mut records, row, k, &mut all));
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
