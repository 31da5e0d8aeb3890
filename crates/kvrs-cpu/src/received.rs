//! Attention received by each token: softmax weights are kept with the logit that they are relative to, and folded when
//! the log-sum-exps of their rows are known. No exponential is computed twice.

use crate::attend::{Context, Part, Unit};
use crate::kernels::Kernels;
use crate::lanes::exp;
use crate::simd::received::ReceivedArgs;
use kvrs_codec::desc::TILE;
use kvrs_core::page::Entry;
use kvrs_core::statistics::{Fold, Reduce};
use std::mem::take;

/// A page of a table, and where its tokens stand in their job.
pub(crate) struct Placed<'e, C> {
    pub(crate) entry: &'e Entry<C>,
    /// Live tokens of the job before it.
    pub(crate) column: usize,
    /// Chunks of 16 slots of the job before it.
    pub(crate) chunk: usize,
}

/// Softmax weights of a job's rows in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    /// `[run][row][chunk]`.
    kept: Vec<[f32; 16]>,
    /// Logits that they are relative to `[run][row]`.
    shifts: Vec<f32>,
    runs: Vec<Run>,
    /// Slots of the job's chunks that hold a token.
    live: Vec<u16>,
    /// What [`Folding::run`] adds up in.
    sums: Vec<[f32; 16]>,
    factors: Vec<f32>,
}

/// Weights of neighbouring rows over neighbouring chunks of the job.
#[derive(Debug, Clone, Copy)]
struct Run {
    first_row: usize,
    rows: usize,
    /// Where its shifts and weights begin.
    shifts: usize,
    weights: usize,
    /// Chunks from row to row, and those of the run.
    row_chunks: usize,
    chunks: usize,
    /// First chunk of the job that it stands for.
    to: usize,
}

impl Weights {
    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        self.shifts.clear();
        self.runs.clear();
        self.live.clear();
    }

    /// Adds a page of `chunks` chunks to the job, with tokens in the slots `live`.
    pub(crate) fn add_page(&mut self, live: u64, chunks: usize) {
        self.live.extend((0..chunks).map(|chunk| (live >> (TILE * chunk)) as u16));
    }

    /// Keeps weights `[row][row_chunks]` of the rows from `first_row` on, relative to the logits `shifts` `[row]`. The
    /// chunks of a row are those of the pieces `(first chunk of the job, chunks)`, one after the other.
    pub(crate) fn push(
        &mut self,
        first_row: usize,
        (weights, row_chunks): (&[[f32; 16]], usize),
        shifts: impl Iterator<Item = f32>,
        pieces: impl Iterator<Item = (usize, usize)>,
    ) {
        let (rows, shifts_at) = (weights.len() / row_chunks, self.shifts.len());
        let mut at = self.kept.len();
        self.kept.extend_from_slice(weights);
        self.shifts.extend(shifts);
        let before = self.runs.len();
        for (to, chunks) in pieces {
            match self.runs[before..].last_mut() {
                Some(run) if run.to + run.chunks == to => run.chunks += chunks,
                _ => self.runs.push(Run {
                    first_row,
                    rows,
                    shifts: shifts_at,
                    weights: at,
                    row_chunks,
                    chunks,
                    to,
                }),
            }
            at += chunks;
        }
    }
}

/// How rows `[part][query][head]` become one number per part and token.
#[derive(Clone, Copy)]
pub(crate) struct Folding<'a> {
    pub(crate) kernels: Option<Kernels>,
    pub(crate) parts: usize,
    pub(crate) queries: usize,
    /// Query heads of a key-value head.
    pub(crate) heads: usize,
    pub(crate) reduce: Reduce,
    pub(crate) fold: Fold,
    /// Whether the call's last query is among these.
    pub(crate) last: bool,
    /// Of each row.
    pub(crate) lse: &'a [f32],
    /// Probability of each query if it attended to all that it sees alike, where the fold compares with it.
    pub(crate) even: &'a [f32],
}

impl Folding<'_> {
    /// What the rows give to the tokens of a job: `[part][token]`.
    pub(crate) fn run(self, kept: &mut Weights) -> Vec<f32> {
        let chunks = kept.live.len();
        let (mut sums, mut factors) = (take(&mut kept.sums), take(&mut kept.factors));
        sums.clear();
        sums.resize(self.parts * chunks, [0.0; 16]);
        for run in &kept.runs {
            let per_part = self.queries * self.heads;
            for first in (0..run.rows).step_by(per_part) {
                let part = (run.first_row + first) / per_part;
                self.add(kept, run, first, &mut factors, &mut sums[part * chunks..][run.to..][..run.chunks]);
            }
        }
        let mut given = Vec::with_capacity(self.parts * 16 * chunks);
        for sums in sums.chunks_exact(chunks.max(1)) {
            for (sums, &live) in sums.iter().zip(&kept.live) {
                if live == u16::MAX {
                    given.extend_from_slice(sums);
                } else {
                    given.extend(
                        sums.iter().enumerate().filter(|(slot, _)| live >> slot & 1 != 0).map(|(_, sum)| sum),
                    );
                }
            }
        }
        (kept.sums, kept.factors) = (sums, factors);
        given
    }

    /// Adds what the rows of a part give, the first of which is row `first` of a run.
    fn add(self, kept: &Weights, run: &Run, first: usize, factors: &mut Vec<f32>, sums: &mut [[f32; 16]]) {
        let query = if self.fold == Fold::Last { self.queries - usize::from(self.last) } else { 0 };
        let (from, end) = (first + query * self.heads, first + self.queries * self.heads);
        let mean = if self.reduce == Reduce::Mean { 1.0 / self.heads as f32 } else { 1.0 };
        let factor = |(shift, lse): (&f32, &f32)| {
            if *lse == f32::NEG_INFINITY { 0.0 } else { exp(shift - lse) * mean }
        };
        let shifts = &kept.shifts[run.shifts..];
        factors.clear();
        factors.extend(shifts[from..end].iter().zip(&self.lse[run.first_row + from..]).map(factor));
        let mut args = ReceivedArgs {
            weights: &kept.kept[run.weights + from * run.row_chunks..],
            row_chunks: run.row_chunks,
            factors,
            heads: self.heads,
            largest: self.reduce == Reduce::Max,
            bounds: if self.fold == Fold::Above { self.even } else { &[] },
            sums,
        };
        match self.kernels {
            Some(kernels) => kernels.received(&mut args),
            None => add_scalar(&mut args),
        }
    }
}

/// [`crate::simd::received::add`] in plain Rust.
fn add_scalar(args: &mut ReceivedArgs<'_>) {
    for (query, factors) in args.factors.chunks_exact(args.heads).enumerate() {
        for (chunk, sums) in args.sums.iter_mut().enumerate() {
            let mut reduced = [0.0f32; 16];
            for (head, factor) in factors.iter().enumerate() {
                let weights = &args.weights[(query * args.heads + head) * args.row_chunks + chunk];
                for (x, weight) in reduced.iter_mut().zip(weights) {
                    let p = weight * factor;
                    *x = if !args.largest {
                        *x + p
                    } else if p > *x {
                        p
                    } else {
                        *x
                    };
                }
            }
            for (sum, x) in sums.iter_mut().zip(reduced) {
                *sum += args.bounds.get(query).map_or(x, |bound| f32::from(u8::from(x > *bound)));
            }
        }
    }
}

impl Context<'_> {
    /// What the rows of a unit, whose log-sum-exps are `lse`, give to the tokens of a job: `[head of the group][token]`.
    pub(crate) fn fold(&self, unit: &Unit, kept: &mut Weights, lse: &[f32]) -> Vec<f32> {
        let Some((reduce, fold)) = self.asked else { return Vec::new() };
        let folding = Folding {
            kernels: self.kernels,
            parts: self.call.layer.heads_per_group,
            queries: unit.queries.len(),
            heads: self.heads,
            reduce,
            fold,
            last: unit.queries.end == self.call.rows[unit.row].columns.len() && !unit.queries.is_empty(),
            lse,
            even: &if fold == Fold::Above { self.even(unit) } else { Vec::new() },
        };
        folding.run(kept)
    }

    /// `1 / visible` of the queries of a unit.
    fn even(&self, unit: &Unit) -> Vec<f32> {
        let row = &self.call.rows[unit.row];
        let mut visible: Vec<usize> = unit
            .queries
            .clone()
            .map(|query| if self.call.own.is_some() { self.visibility.own(query) } else { 0 })
            .collect();
        for entry in row.tables[unit.group].entries() {
            let masks = self.masks(unit, entry);
            visible.iter_mut().zip(masks).for_each(|(n, mask)| *n += mask.count_ones() as usize);
        }
        let most = self.call.top_k.unwrap_or(usize::MAX);
        visible.into_iter().map(|n| 1.0 / n.min(most) as f32).collect()
    }

    /// Adds what the jobs of a unit gave to `sums` `[row][key-value head]`.
    pub(crate) fn add_given(&self, unit: &Unit, parts: &[Part], sums: &mut [Vec<f32>]) {
        let heads = self.call.layer.heads_per_group;
        let first = unit.row * self.call.layer.shape.kv_heads + unit.group * heads;
        for (head, sums) in sums[first..first + heads].iter_mut().enumerate() {
            let mut to = &mut sums[..];
            for Part { given, .. } in parts {
                let tokens = given.len() / heads;
                let here = to.split_off_mut(..tokens).expect("a number per live token and own token");
                let given = &given[head * tokens..][..tokens];
                here.iter_mut().zip(given).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    const NEVER: f32 = f32::NEG_INFINITY;

    /// Two heads of one group; two queries, of which the first sees one token less. Weights are relative to a logit of 1,
    /// as if the rows' log-sum-exps were 0.
    fn kept(probabilities: &[[f32; 3]]) -> Weights {
        let mut kept = Weights::default();
        kept.add_page(0b111, 1);
        let row = |p: &[f32; 3]| std::array::from_fn(|i| p.get(i).unwrap_or(&7.0) / 1f32.exp());
        let weights: Vec<[f32; 16]> = probabilities.iter().map(row).collect();
        kept.push(0, (&weights, 1), weights.iter().map(|_| 1.0), [(0, 1)].into_iter());
        kept
    }

    const QUERIES: [[f32; 3]; 4] =
        [[0.75, 0.25, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]];

    fn folded(reduce: Reduce, fold: Fold, last: bool) -> Vec<f32> {
        let all = Isa::available().map(|isa| {
            let kernels = Kernels::of(isa);
            let (lse, even) = (&[0.0; 4], &[1.0 / 2.0 + 1e-6, 1.0 / 3.0]);
            let folding = Folding { kernels, parts: 1, queries: 2, heads: 2, reduce, fold, last, lse, even };
            let close = |x: f32| (x * 1e4).round() / 1e4;
            folding.run(&mut kept(&QUERIES)).into_iter().map(close).collect::<Vec<_>>()
        });
        all.reduce(|a, b| {
            assert_eq!(a, b);
            b
        })
        .unwrap()
    }

    #[test]
    fn groups_are_reduced_before_queries_are_folded() {
        assert_eq!(folded(Reduce::Mean, Fold::Sum, true), [0.8125, 0.6875, 0.5]);
        assert_eq!(folded(Reduce::Sum, Fold::Sum, true), [1.625, 1.375, 1.0]);
        assert_eq!(folded(Reduce::Max, Fold::Sum, true), [1.25, 1.0, 0.75]);
    }

    #[test]
    fn above_counts_what_beats_even_attention_over_the_visible() {
        // Means: .5 .5 of two visible tokens (not above), then .3125 .1875 .5 of three.
        assert_eq!(folded(Reduce::Mean, Fold::Above, true), [0.0, 0.0, 1.0]);
    }

    #[test]
    fn only_the_last_query_of_the_call_counts_as_last() {
        assert_eq!(folded(Reduce::Mean, Fold::Last, true), [0.3125, 0.1875, 0.5]);
        assert_eq!(folded(Reduce::Mean, Fold::Last, false), [0.0; 3]);
    }

    #[test]
    fn a_query_that_sees_nothing_gives_nothing() {
        let folding = Folding {
            kernels: None,
            parts: 1,
            queries: 1,
            heads: 1,
            reduce: Reduce::Mean,
            fold: Fold::Sum,
            last: true,
            lse: &[NEVER],
            even: &[],
        };
        assert_eq!(folding.run(&mut kept(&[[0.0; 3]])), [0.0; 3]);
    }

    #[test]
    fn pieces_that_follow_each_other_are_one_run() {
        let mut kept = Weights::default();
        (0..5).for_each(|_| kept.add_page(0xffff, 1));
        let weights: Vec<[f32; 16]> = (0..8).map(|i| [i as f32; 16]).collect();
        kept.push(0, (&weights, 4), [0.0; 2].into_iter(), [(0, 1), (1, 1), (3, 1), (4, 1)].into_iter());
        assert_eq!(kept.runs.len(), 2);
        let (lse, even) = (&[0.0; 2], &[]);
        let (reduce, fold) = (Reduce::Sum, Fold::Sum);
        let folding =
            Folding { kernels: None, parts: 1, queries: 2, heads: 1, reduce, fold, last: true, lse, even };
        let given: Vec<f32> = folding.run(&mut kept).into_iter().step_by(16).collect();
        assert_eq!(given, [4.0, 6.0, 0.0, 8.0, 10.0]);
    }
}
