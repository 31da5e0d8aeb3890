//! Attention of a block of query rows over the pages of a class that integer and 16-bit kernels take.

use crate::base::BaseScores;
use crate::batches::{BATCH_CHUNKS, Batches, Keys, Rows, Values, pages_of, slot_bits};
use crate::digits::{QueryDigits, WeightDigits};
use crate::job::Keep;
use crate::kernels::Kernels;
use crate::memory::Chunk;
use crate::output::Partial;
use crate::packed::{PackedRun, runs_of};
use crate::received::{Placed, Weights};
use crate::simd::lines::Lines;
use crate::softmax::{Logits, Running};
use crate::top_k::Stage;
use kvrs_codec::desc::{NONE, TILE};
use kvrs_codec::tile::scales_apart;
use kvrs_codec::{HeadCodec, Side, SideDesc};
use kvrs_core::page::PACKED_SLOTS;
use std::f32::consts::LN_2;

/// Memory that every pass uses anew.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    key_runs: Vec<PackedRun>,
    value_runs: Vec<PackedRun>,
    /// Prepared queries `[row][chunk]`.
    z: Lines,
    queries: QueryDigits,
    weights: WeightDigits,
    /// `[row][BATCH_CHUNKS]`: scores, then softmax weights.
    scores: Lines,
    /// Slots that a query sees `[query][chunk]`.
    masks: Vec<u16>,
    /// Sums over stored channels `[row][chunk]`.
    acc: Lines,
    /// Largest logit so far times log2 e, and sum of weights relative to it.
    running: Running,
    q: Vec<f32>,
    out: Vec<f32>,
    /// What a job keeps of it where attention received is asked for.
    pub(crate) received: Weights,
}

/// What a call's passes share.
#[derive(Clone, Copy)]
pub(crate) struct PassCall {
    pub(crate) logits: Logits,
    /// Query heads that follow each other in the rows of a query.
    pub(crate) group: usize,
    pub(crate) queries: usize,
    /// Position of index 0.
    pub(crate) start: i64,
    pub(crate) stage: Stage,
    /// Whether values are summed.
    pub(crate) values: bool,
}

/// Query rows `[query][query head of the group]` against one class.
pub(crate) struct PackedPass<'a> {
    kernels: Kernels,
    codec: &'a HeadCodec,
    rows: usize,
    base: Option<BaseScores<'a>>,
    w: &'a mut Workspace,
}

/// Whether the kernels for packed and 16-bit pages serve both sides of a class; its runs stay in the workspace.
fn served(codec: &HeadCodec, w: &mut Workspace) -> bool {
    let raw = is_raw(&codec.desc.key) && is_raw(&codec.desc.value);
    codec.desc.heads == 1
        && (raw || codec.desc.slots as usize == PACKED_SLOTS)
        && served_side(codec, Side::Key, &mut w.key_runs)
        && served_side(codec, Side::Value, &mut w.value_runs)
}

fn served_side(codec: &HeadCodec, side: Side, runs: &mut Vec<PackedRun>) -> bool {
    let (desc, constants) = codec.side(side);
    is_raw(desc) || runs_of(desc, constants, runs)
}

/// One run of 16-bit rows without scales.
fn is_raw(desc: &SideDesc) -> bool {
    scales_apart(desc) && matches!(&desc.runs[..], [run] if run.width == 16 && run.scale == NONE)
}

impl<'a> PackedPass<'a> {
    /// Prepares `rows` queries, `read` each as `[key_dim]`; `None` if the class needs the path over blocks.
    pub(crate) fn new(
        kernels: Kernels,
        codec: &'a HeadCodec,
        w: &'a mut Workspace,
        (rows, key_dim): (usize, usize),
        read: impl Fn(usize, &mut [f32]),
    ) -> Option<Self> {
        if !served(codec, w) {
            return None;
        }
        let [key_chunks, value_chunks] =
            [&codec.desc.key, &codec.desc.value].map(|desc| desc.vec_len as usize / TILE);
        w.z.chunks(rows * key_chunks);
        w.q.resize(rows * key_dim, 0.0);
        for (row, (z, q)) in w.z.chunks_exact_mut(key_chunks).zip(w.q.chunks_exact_mut(key_dim)).enumerate() {
            read(row, q);
            kernels.prepare(&codec.key, q, z);
        }
        if !is_raw(&codec.desc.key) {
            w.queries.prepare(kernels, &w.key_runs, &w.z, rows);
        }
        w.scores.chunks(rows * BATCH_CHUNKS);
        w.acc.chunks(rows * value_chunks).fill([0.0; 16]);
        w.running.reset(rows);
        let offset = codec.key.offset.as_ref();
        let extents = (rows, codec.desc.slots as usize);
        let base = offset.map(|offset| BaseScores::new(Some(kernels), offset, w.q.clone(), extents, false));
        Some(Self { kernels, codec, rows, base, w })
    }

    /// Adds pages, of which the queries see the slots `masks` `[page][query]`.
    pub(crate) fn add_pages(
        &mut self,
        call: PassCall,
        pages: &[&Placed<'_, Chunk>],
        masks: &[u64],
        keep: &mut Keep<'_>,
    ) {
        let (kernels, fresh, desc) = (self.kernels, self.base.is_none(), &self.codec.desc);
        let page_chunks = desc.slots as usize / TILE;
        let w = &mut *self.w;
        slot_bits(masks, call.queries, page_chunks, &mut w.masks);
        let key = if is_raw(&desc.key) {
            Keys::Raw { desc: &desc.key, z: &w.z, fresh }
        } else {
            Keys::Packed(w.queries.tasks(kernels, &w.key_runs, self.rows, fresh).collect())
        };
        let value = if is_raw(&desc.value) {
            Values::Raw { desc: &desc.value }
        } else {
            w.weights.reserve(kernels, &w.value_runs, BATCH_CHUNKS / page_chunks);
            Values::Packed { runs: &w.value_runs, weights: &mut w.weights }
        };
        let rows = Rows { scores: &mut w.scores, acc: &mut w.acc, running: &mut w.running };
        let batches = Batches { kernels, call, page_chunks, key, value, rows, masks: &w.masks, keep };
        batches.run(&pages_of(pages, masks, call.queries), pages, self.base.as_mut());
    }

    /// Adds what was seen to `partial`: outputs synthesised, means added, before anything is merged.
    pub(crate) fn finish(self, partial: &mut Partial, dim: usize) {
        let Workspace { acc, running, out, .. } = &mut *self.w;
        out.resize(dim, 0.0);
        if dim == 0 {
            let rows = running.max.iter().zip(&running.sum).enumerate();
            return rows.for_each(|(row, (max, sum))| partial.add(row, max * LN_2, *sum, &[]));
        }
        let chunks = acc.len() / self.rows;
        for (row, acc) in acc.chunks_exact_mut(chunks).enumerate() {
            out.fill(0.0);
            self.kernels.finish(&self.codec.value, acc, running.sum[row], out);
            partial.add(row, running.max[row] * LN_2, running.sum[row], out);
        }
    }
}
