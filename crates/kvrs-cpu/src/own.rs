//! Attention among a call's own tokens: a blocked online softmax on the keys and values as they came.

use crate::gemm::{Matrix, product};
use crate::output::Partial;
use crate::softmax::{Logits, Running};
use crate::visible::Visibility;
use kvrs_codec::View;
use std::ops::Range;

/// Keys of a tile.
const TILE_KEYS: usize = 64;

/// The own keys and values of one key-value head of a row, as f32.
pub(crate) struct OwnHead {
    key_dim: usize,
    value_dim: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl OwnHead {
    /// Reads the tokens in `columns`.
    pub(crate) fn new((k, v): (View<'_>, View<'_>), row: usize, head: usize, columns: &[usize]) -> Self {
        let read = |view: View<'_>| {
            let dim = view.shape()[3];
            let mut all = vec![0.0; columns.len() * dim];
            for (&column, out) in columns.iter().zip(all.chunks_exact_mut(dim)) {
                view.read_row([row, head, column], out);
            }
            all
        };
        Self { key_dim: k.shape()[3], value_dim: v.shape()[3], k: read(k), v: read(v) }
    }

    /// Attention of queries `queries` (`q`: `[query][group][key_dim]`) over the tokens up to each of them; `record`
    /// is shown the logits of each row from a token on, and may change them.
    pub(crate) fn attend(
        &self,
        q: &[f32],
        queries: Range<usize>,
        sliding: Option<usize>,
        logits: Logits,
        mut record: impl FnMut(usize, usize, &mut [f32]),
    ) -> Partial {
        let rows = q.len() / self.key_dim;
        let visibility = Visibility { causal: true, sliding };
        let mut pass =
            Pass { rows, group: rows / queries.len(), queries: queries.clone(), visibility, logits };
        let (mut running, mut acc) = (Running::new(rows), vec![0.0; rows * self.value_dim]);
        let mut scores = vec![0.0; rows * TILE_KEYS];
        let first = visibility.range(queries.start).start;
        for start in (first / TILE_KEYS * TILE_KEYS..queries.end).step_by(TILE_KEYS) {
            let keys = start..queries.end.min(start + TILE_KEYS);
            pass.tile(self, q, keys, (&mut scores, &mut record), &mut running, &mut acc);
        }
        let mut partial = Partial::new(rows, self.value_dim);
        for (row, out) in acc.chunks_exact(self.value_dim).enumerate() {
            partial.add(row, running.max[row], running.sum[row], out);
        }
        partial
    }
}

/// What the tiles of one block of queries share.
struct Pass {
    rows: usize,
    group: usize,
    queries: Range<usize>,
    visibility: Visibility,
    logits: Logits,
}

impl Pass {
    fn tile(
        &mut self,
        own: &OwnHead,
        q: &[f32],
        keys: Range<usize>,
        (scores, record): (&mut [f32], &mut impl FnMut(usize, usize, &mut [f32])),
        running: &mut Running,
        acc: &mut [f32],
    ) {
        let (dk, dv, count) = (own.key_dim, own.value_dim, keys.len());
        let scores = &mut scores[..self.rows * count];
        let k = Matrix::rows(&own.k[keys.start * dk..], dk).transposed();
        product([self.rows, dk, count], Matrix::rows(q, dk), k, 0.0, scores, count);
        for (row, (scores, acc)) in scores.chunks_exact_mut(count).zip(acc.chunks_exact_mut(dv)).enumerate() {
            let mask = self.mask(self.queries.start + row / self.group, &keys);
            self.logits.apply(scores, mask);
            record(row, keys.start, scores);
            running.weigh(row, scores, acc);
        }
        let v = Matrix::rows(&own.v[keys.start * dv..], dv);
        product([self.rows, count, dv], Matrix::rows(scores, count), v, 1.0, acc, dv);
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
