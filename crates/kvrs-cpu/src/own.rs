//! Attention among a call's own tokens: a blocked online softmax on the keys and values as they came.

use crate::gemm::{Matrix, product};
use crate::job::Keep;
use crate::kernels::{Kernels, blocks};
use crate::output::Partial;
use crate::simd::softmax::SoftmaxArgs;
use crate::softmax::{Logits, Running};
use crate::top_k::Stage;
use crate::visible::Visibility;
use kvrs_codec::View;
use std::f32::consts::LN_2;
use std::ops::Range;

/// Keys of a tile.
const TILE_KEYS: usize = 64;
/// Chunks of 16 keys of a tile.
const TILE_CHUNKS: usize = TILE_KEYS / 16;

/// The own keys and values of one key-value head of a row, as f32.
pub(crate) struct OwnHead {
    key_dim: usize,
    value_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Queries that attend to the tokens up to each of them.
pub(crate) struct OwnCall<'a> {
    pub(crate) kernels: Option<Kernels>,
    /// `[query][query head of the group][key_dim]`.
    pub(crate) q: &'a [f32],
    /// Their places among the own tokens.
    pub(crate) queries: Range<usize>,
    pub(crate) sliding: Option<usize>,
    pub(crate) logits: Logits,
    /// Number of the first row of `q` in its unit.
    pub(crate) first_row: usize,
    /// Tokens, and chunks of 16 slots, of the job before the own ones.
    pub(crate) stored: (usize, usize),
}

impl OwnHead {
    /// Reads the tokens in `columns`, the first `value_dim` channels of their values.
    pub(crate) fn new(
        (k, v): (View<'_>, View<'_>),
        row: usize,
        head: usize,
        columns: &[usize],
        value_dim: usize,
    ) -> Self {
        let read = |view: View<'_>, dim: usize| {
            let mut all = vec![0.0; columns.len() * dim];
            for (&column, out) in columns.iter().zip(all.chunks_exact_mut(dim.max(1))) {
                view.read_row([row, head, column], out);
            }
            all
        };
        let key_dim = k.shape()[3];
        Self { key_dim, value_dim, k: read(k, key_dim), v: read(v, value_dim) }
    }

    /// Attention over the tokens up to each query; what is asked for of every row and token is left in `keep`.
    pub(crate) fn attend(&self, call: &OwnCall<'_>, keep: &mut Keep<'_>) -> Partial {
        let (rows, chunks) = (call.q.len() / self.key_dim, self.value_dim.div_ceil(16));
        let mut pass = Pass {
            own: self,
            call,
            rows,
            group: rows / call.queries.len(),
            visibility: Visibility { causal: true, sliding: call.sliding },
            running: Running::new(rows),
            scores: vec![[0.0; 16]; rows * TILE_CHUNKS],
            acc: vec![[0.0; 16]; rows * chunks],
        };
        let first = pass.visibility.range(call.queries.start).start;
        for start in (first / TILE_KEYS * TILE_KEYS..call.queries.end).step_by(TILE_KEYS) {
            pass.tile(start..call.queries.end.min(start + TILE_KEYS), keep);
        }
        pass.finish()
    }
}

/// A block of queries on its way through the tiles.
struct Pass<'a> {
    own: &'a OwnHead,
    call: &'a OwnCall<'a>,
    rows: usize,
    /// Rows of a query.
    group: usize,
    visibility: Visibility,
    /// With kernels the maxima are times log2 e.
    running: Running,
    /// `[row][TILE_CHUNKS]`.
    scores: Vec<[f32; 16]>,
    /// `[row][chunk]`.
    acc: Vec<[f32; 16]>,
}

impl Pass<'_> {
    fn tile(&mut self, keys: Range<usize>, keep: &mut Keep<'_>) {
        let (dk, dv, count) = (self.own.key_dim, self.own.value_dim, keys.len());
        let k = Matrix::rows(&self.own.k[keys.start * dk..], dk).transposed();
        if keep.stage == Stage::Values {
            self.exchange(&keys, keep);
        } else {
            let (q, scores) = (Matrix::rows(self.call.q, dk), self.scores.as_flattened_mut());
            product([self.rows, dk, count], q, k, 0.0, scores, TILE_KEYS);
        }
        if keep.stage == Stage::Logits {
            return self.exchange(&keys, keep);
        }
        self.softmax(&keys, keep.stage);
        if let Some(weights) = &mut keep.weights {
            let (to, chunks) = (self.call.stored.1 + keys.start / 16, count.div_ceil(16));
            let shifts = self.running.max.iter().map(|max| max * self.unit());
            weights.push(
                self.call.first_row,
                (&self.scores, TILE_CHUNKS),
                shifts,
                std::iter::once((to, chunks)),
            );
        }
        if dv > 0 {
            let weights = Matrix::rows(self.scores.as_flattened(), TILE_KEYS);
            let v = Matrix::rows(&self.own.v[keys.start * dv..], dv);
            let row = self.acc.len() / self.rows * 16;
            product([self.rows, count, dv], weights, v, 1.0, self.acc.as_flattened_mut(), row);
        }
    }

    /// What a maximum is a multiple of.
    fn unit(&self) -> f32 {
        if self.call.kernels.is_some() { LN_2 } else { 1.0 }
    }

    /// Leaves the logits of a tile in the record, or takes them from there.
    fn exchange(&mut self, keys: &Range<usize>, keep: &mut Keep<'_>) {
        let Some(record) = &mut keep.record else { return };
        for row in 0..self.rows {
            let mask = self.mask(self.call.queries.start + row / self.group, keys);
            let scores = self.scores[row * TILE_CHUNKS..][..TILE_CHUNKS].as_flattened_mut();
            let kept =
                &mut record.row(self.call.first_row + row, self.call.stored.0 + keys.start)[..keys.len()];
            if keep.stage == Stage::Values {
                scores[..keys.len()].copy_from_slice(kept);
            } else {
                self.call.logits.apply(scores, mask);
                kept.copy_from_slice(&scores[..keys.len()]);
            }
        }
    }

    /// A step of the online softmax.
    fn softmax(&mut self, keys: &Range<usize>, stage: Stage) {
        let plain = Logits { scale: 1.0, softcap: None };
        let logits = if stage == Stage::Values { plain } else { self.call.logits };
        let queries = self.call.queries.clone();
        let masks: Vec<u64> = queries.map(|query| self.mask(query, keys)).collect();
        let acc_chunks = self.acc.len() / self.rows;
        let Some(kernels) = self.call.kernels else {
            for (row, scores) in self.scores.chunks_exact_mut(TILE_CHUNKS).enumerate() {
                let acc = self.acc[row * acc_chunks..][..acc_chunks].as_flattened_mut();
                let mask = masks[row / self.group];
                self.running.step(row, logits, scores.as_flattened_mut(), mask, acc);
            }
            return;
        };
        let bits: Vec<[u16; TILE_CHUNKS]> = masks.iter().map(|mask| chunks_of(*mask)).collect();
        let chunks = keys.len().div_ceil(16);
        for (first, count) in blocks(self.rows) {
            let mask = |row: usize| &bits[(first + row.min(count - 1)) / self.group][..chunks];
            kernels.softmax(SoftmaxArgs {
                scores: &mut self.scores[first * TILE_CHUNKS..],
                row_chunks: TILE_CHUNKS,
                masks: std::array::from_fn(mask),
                logits,
                max: &mut self.running.max[first..first + count],
                sum: &mut self.running.sum[first..first + count],
                acc: &mut self.acc[first * acc_chunks..][..count * acc_chunks],
            });
        }
    }

    fn finish(self) -> Partial {
        let (dv, unit, chunks) = (self.own.value_dim, self.unit(), self.acc.len() / self.rows);
        let mut partial = Partial::new(self.rows, dv);
        for (row, (max, sum)) in self.running.max.iter().zip(&self.running.sum).enumerate() {
            let out = &self.acc[row * chunks..][..chunks].as_flattened()[..dv];
            partial.add(row, max * unit, *sum, out);
        }
        partial
    }

    /// Keys that a query sees, as bits from the first key of the tile on.
    fn mask(&self, query: usize, keys: &Range<usize>) -> u64 {
        let visible = self.visibility.range(query);
        let bits = |end: usize| match end.saturating_sub(keys.start) {
            n @ 0..64 => (1u64 << n) - 1,
            _ => u64::MAX,
        };
        bits(visible.end) & !bits(visible.start)
    }
}

/// 64 bits as four times 16.
fn chunks_of(bits: u64) -> [u16; TILE_CHUNKS] {
    std::array::from_fn(|chunk| (bits >> (16 * chunk)) as u16)
}
