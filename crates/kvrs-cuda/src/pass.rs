//! The passes of one wave of queries: prepare them, pass over the pages, merge, fold what tokens received.

use crate::args::{self, Attend, Clear, Merge, NONE, Prepare, ROWS, TopK};
use crate::backend::Cuda;
use crate::launcher::{Kernel, Launcher};
use crate::memory::{Chunk, Parcel, Part};
use crate::units::{PASSES, Shape, Work};
use crate::workspace::{Workspace, view};
use kvrs_codec::backend::AttendCall;
use kvrs_core::Result;
use kvrs_core::statistics::{Fold, Reduce};
use std::ops::Range;

const PREPARE: Kernel = Kernel { name: "kvrs_prepare", threads: 128 };
const CLEAR: Kernel = Kernel { name: "kvrs_clear", threads: 128 };
/// The passes over pages with the splits that a block takes.
const PASS: [(Kernel, usize); PASSES] = [
    (Kernel { name: "kvrs_attend", threads: 128 }, 1),
    (Kernel { name: "kvrs_decode_64", threads: 128 }, 4),
    (Kernel { name: "kvrs_decode_128", threads: 128 }, 4),
    (Kernel { name: "kvrs_decode_256", threads: 128 }, 4),
];
const MERGE: Kernel = Kernel { name: "kvrs_merge", threads: 128 };
const TOP_K: Kernel = Kernel { name: "kvrs_top_k", threads: 128 };
const RECEIVED: Kernel = Kernel { name: "kvrs_received", threads: 128 };

/// What a pass over pages does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Stage {
    /// Scores, softmax and sums at once.
    Whole = 0,
    /// Scores only, which go into the record.
    Logits = 1,
    /// Softmax and sums of the logits in the record.
    Values = 2,
}

/// Addresses that all waves of a call share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fixed {
    pub(crate) sides: u64,
    pub(crate) sinks: u64,
    pub(crate) lse: u64,
    pub(crate) out: args::View,
    pub(crate) values: bool,
    pub(crate) own: [args::View; 2],
    pub(crate) tiles: u64,
}

/// Addresses of a wave's lists.
#[derive(Debug, Clone, Copy)]
struct Lists {
    splits: u64,
    units: u64,
    sequences: u64,
    entries: u64,
    indices: u64,
    columns: u64,
    prepared: [u64; 2],
    receivers: u64,
    chosen: [u64; PASSES],
}

/// One call on its way.
pub(crate) struct Pass<'a, L: Launcher> {
    pub(crate) cuda: &'a Cuda<L>,
    pub(crate) call: &'a AttendCall<'a, Chunk<L>>,
    pub(crate) shape: Shape,
    pub(crate) fixed: Fixed,
    pub(crate) asked: Option<(Reduce, Fold)>,
}

impl<L: Launcher> Pass<'_, L> {
    fn heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    /// Zeros where columns hold no query.
    pub(crate) fn clear_padding(&self, workspace: &mut Workspace<L>) -> Result<()> {
        let [rows, heads, width, _] = self.call.q.shape();
        if self.call.rows.iter().all(|row| row.columns.len() == width) {
            return Ok(());
        }
        let mut padding = vec![1u8; rows * width];
        for (row, queries) in self.call.rows.iter().enumerate() {
            queries.columns.iter().for_each(|column| padding[row * width + column] = 0);
        }
        let mut parcel = Parcel::default();
        let padding = parcel.add(&padding);
        let base = parcel.send(&self.cuda.stream.launcher, &mut workspace.lists)?;
        let args = Clear {
            padding: padding.at(base),
            lse: self.fixed.lse,
            out: self.fixed.out,
            query_heads: heads as u32,
            width: width as u32,
            value_dim: self.call.layer.shape.value_dim as u32,
            values: u32::from(self.fixed.values),
        };
        self.cuda.launch(CLEAR, [width, heads, rows], &args)
    }

    /// The queries `wave` of every row.
    pub(crate) fn wave(
        &self,
        wave: Range<usize>,
        workspace: &mut Workspace<L>,
        sums: Option<&mut [Vec<f32>]>,
    ) -> Result<()> {
        let work = Work::new(self.call, &self.shape, &wave);
        if work.units.is_empty() {
            return Ok(());
        }
        let lists = self.send(&work, workspace)?;
        let record = if self.shape.records {
            workspace.record.of(&self.cuda.stream.launcher, 4 * work.logits as usize)?
        } else {
            0
        };
        let rows = work.prepared[0].len() * self.heads();
        let queries = self.prepare(&work, lists, rows, workspace)?;
        let parts = self.parts(&work, workspace)?;
        let passed = |stage: Stage| self.attend(&work, lists, (queries, rows), parts, record, stage);
        if let Some(k) = self.call.top_k {
            passed(Stage::Logits)?;
            let args = TopK { units: lists.units, record, k: k as u32, pad: 0 };
            self.cuda.launch(TOP_K, [work.units.len(), ROWS, 1], &args)?;
            passed(Stage::Values)?;
        } else {
            passed(Stage::Whole)?;
        }
        self.merge(&work, lists, parts)?;
        match (self.asked, sums) {
            (Some(asked), Some(sums)) => self.received(&work, lists, record, asked, (wave, sums), workspace),
            _ => Ok(()),
        }
    }

    fn send(&self, work: &Work, workspace: &mut Workspace<L>) -> Result<Lists> {
        let mut parcel = Parcel::default();
        let splits = parcel.add(&work.splits);
        let unit_list = parcel.add(&work.units);
        let sequences = parcel.add(&work.sequences);
        let entries = parcel.add(&work.entries);
        let indices = parcel.add(&work.indices);
        let columns = parcel.add(&work.columns);
        let prepared = [parcel.add(&work.prepared[0]), parcel.add(&work.prepared[1])];
        let receivers = parcel.add(&work.receivers);
        let chosen: [Part; PASSES] = std::array::from_fn(|pass| parcel.add(&work.chosen[pass]));
        let base = parcel.send(&self.cuda.stream.launcher, &mut workspace.lists)?;
        Ok(Lists {
            splits: splits.at(base),
            units: unit_list.at(base),
            sequences: sequences.at(base),
            entries: entries.at(base),
            indices: indices.at(base),
            columns: columns.at(base),
            prepared: prepared.map(|part| part.at(base)),
            receivers: receivers.at(base),
            chosen: chosen.map(|part| part.at(base)),
        })
    }

    fn prepare(&self, work: &Work, lists: Lists, rows: usize, workspace: &mut Workspace<L>) -> Result<u64> {
        let bytes = 4 * (self.shape.classes + 1) * rows * self.shape.query_stride;
        let queries = workspace.queries.of(&self.cuda.stream.launcher, bytes)?;
        let args = Prepare {
            q: view(&self.call.q),
            sequences: lists.prepared[0],
            columns: lists.prepared[1],
            sides: self.fixed.sides,
            queries,
            classes: self.shape.classes as u32,
            heads_per_group: self.shape.heads_per_group as u32,
            group: self.shape.group as u32,
            query_heads: self.heads() as u32,
            key_dim: self.call.layer.shape.key_dim as u32,
            query_rows: rows as u32,
            query_stride: self.shape.query_stride as u32,
            pad: 0,
        };
        self.cuda.launch(PREPARE, [work.prepared[0].len(), self.heads(), self.shape.classes + 1], &args)?;
        Ok(queries)
    }

    /// Addresses of the partial results: largest logits, sums of weights, sums of values.
    fn parts(&self, work: &Work, workspace: &mut Workspace<L>) -> Result<[u64; 3]> {
        let rows = work.splits.len() * ROWS;
        let stride = if self.fixed.values { self.shape.acc_stride } else { 0 };
        let base = workspace.parts.of(&self.cuda.stream.launcher, 4 * rows * (2 + stride))?;
        Ok([base, base + 4 * rows as u64, base + 8 * rows as u64])
    }

    fn attend(
        &self,
        work: &Work,
        lists: Lists,
        (queries, rows): (u64, usize),
        [max, sum, acc]: [u64; 3],
        record: u64,
        stage: Stage,
    ) -> Result<()> {
        let (shape, call) = (&self.call.layer.shape, self.call);
        let args = Attend {
            splits: lists.splits,
            units: lists.units,
            sequences: lists.sequences,
            entries: lists.entries,
            indices: lists.indices,
            columns: lists.columns,
            sides: self.fixed.sides,
            queries,
            own_k: self.fixed.own[0],
            own_v: self.fixed.own[1],
            max,
            sum,
            acc,
            record,
            value_tiles: if stage == Stage::Values { self.fixed.tiles } else { 0 },
            chosen: 0,
            classes: self.shape.classes as u32,
            heads_per_group: self.shape.heads_per_group as u32,
            group: self.shape.group as u32,
            query_heads: self.heads() as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            query_rows: rows as u32,
            query_stride: self.shape.query_stride as u32,
            acc_stride: self.shape.acc_stride as u32,
            causal: u32::from(call.causal),
            sliding: shape.sliding.map_or(NONE, |width| width as u32),
            stage: stage as u32,
            values: u32::from(self.fixed.values),
            count: 0,
            scale: call.scale,
            softcap: call.softcap.unwrap_or(0.0),
        };
        for (pass, (kernel, per_block)) in PASS.into_iter().enumerate() {
            let count = work.chosen[pass].len();
            let args = Attend { chosen: lists.chosen[pass], count: count as u32, ..args };
            self.cuda.launch(kernel, [count.div_ceil(per_block), 1, 1], &args)?;
        }
        Ok(())
    }

    fn merge(&self, work: &Work, lists: Lists, [max, sum, acc]: [u64; 3]) -> Result<()> {
        let args = Merge {
            splits: lists.splits,
            units: lists.units,
            sequences: lists.sequences,
            columns: lists.columns,
            sides: self.fixed.sides,
            max,
            sum,
            acc,
            sinks: self.fixed.sinks,
            lse: self.fixed.lse,
            out: self.fixed.out,
            classes: self.shape.classes as u32,
            heads_per_group: self.shape.heads_per_group as u32,
            group: self.shape.group as u32,
            value_dim: self.call.layer.shape.value_dim as u32,
            acc_stride: self.shape.acc_stride as u32,
            query_heads: self.heads() as u32,
            width: self.call.q.shape()[2] as u32,
            values: u32::from(self.fixed.values),
        };
        self.cuda.launch(MERGE, [work.units.len(), ROWS, 1], &args)
    }

    /// Adds what the wave's queries gave to every token.
    fn received(
        &self,
        work: &Work,
        lists: Lists,
        record: u64,
        (reduce, fold): (Reduce, Fold),
        (wave, all): (Range<usize>, &mut [Vec<f32>]),
        workspace: &mut Workspace<L>,
    ) -> Result<()> {
        let sums = workspace.sums.of(&self.cuda.stream.launcher, 4 * work.sums as usize)?;
        let args = args::Received {
            receivers: lists.receivers,
            sequences: lists.sequences,
            columns: lists.columns,
            record,
            lse: self.fixed.lse,
            sums,
            group: self.shape.group as u32,
            query_heads: self.heads() as u32,
            width: self.call.q.shape()[2] as u32,
            reduce: reduce as u32,
            fold: fold as u32,
            pad: 0,
        };
        let most = work.receivers.iter().map(|receiver| receiver.tokens as usize).max().unwrap_or(0);
        self.cuda.launch(RECEIVED, [work.receivers.len(), most.div_ceil(128), 1], &args)?;
        let mut host = vec![0.0f32; work.sums as usize];
        self.cuda.stream.download(sums, &mut host)?;
        for (receiver, all) in work.receivers.iter().zip(all) {
            let queries = self.call.rows[receiver.sequence as usize].columns.len();
            if fold == Fold::Last && !wave.contains(&queries.wrapping_sub(1)) {
                continue;
            }
            let given = &host[receiver.sums as usize..][..receiver.tokens as usize];
            all.iter_mut().zip(given).for_each(|(sum, x)| *sum += x);
        }
        Ok(())
    }
}
