//! Attention received by each token: the logits of a unit are kept until its log-sum-exps are known, then folded.

use crate::lanes::exp_sum;
use crate::softmax::Logits;
use kvrs_core::page::Entry;
use kvrs_core::statistics::{Fold, Reduce};

/// A page of a table, and how many live tokens of its job stand before it.
pub(crate) struct Placed<'e, C> {
    pub(crate) entry: &'e Entry<C>,
    pub(crate) column: usize,
}

/// Logits `[row][token]` of a job: the live tokens of its pages, then the call's own; -inf where a query does not see.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    tokens: usize,
    logits: Vec<f32>,
}

impl Record {
    pub(crate) fn new(rows: usize, tokens: usize) -> Self {
        Self { tokens, logits: vec![f32::NEG_INFINITY; rows * tokens] }
    }

    /// Logits of a row from token `from` on.
    pub(crate) fn row(&mut self, row: usize, from: usize) -> &mut [f32] {
        &mut self.logits[row * self.tokens..][..self.tokens][from..]
    }

    /// Keeps the logits of a page's slots: those of `mask`, a part of the `live` ones.
    pub(crate) fn put<C>(
        &mut self,
        row: usize,
        page: &Placed<'_, C>,
        (logits, mask): (Logits, u64),
        scores: &[f32],
    ) {
        let mut slots = [0.0; 64];
        let slots = &mut slots[..scores.len()];
        slots.copy_from_slice(scores);
        logits.apply(slots, mask);
        let (live, to) = (page.entry.live(), self.row(row, page.column));
        if consecutive(live) {
            let count = live.count_ones() as usize;
            to[..count].copy_from_slice(&slots[..count]);
        } else {
            let live = slots.iter().enumerate().filter(|(slot, _)| live >> slot & 1 == 1);
            to.iter_mut().zip(live).for_each(|(to, (_, logit))| *to = *logit);
        }
    }

    /// Gives the logits of a page's slots back, -inf in dead ones.
    pub(crate) fn get<C>(&mut self, row: usize, page: &Placed<'_, C>, slots: &mut [f32]) {
        let (live, from) = (page.entry.live(), self.row(row, page.column));
        slots.fill(f32::NEG_INFINITY);
        if consecutive(live) {
            let count = live.count_ones() as usize;
            slots[..count].copy_from_slice(&from[..count]);
        } else {
            let live = slots.iter_mut().enumerate().filter(|(slot, _)| live >> slot & 1 == 1);
            live.zip(from).for_each(|((_, slot), logit)| *slot = *logit);
        }
    }

    /// Slots of a page that some of `rows` rows from `first` on has a logit for.
    pub(crate) fn seen<C>(&mut self, (first, rows): (usize, usize), page: &Placed<'_, C>) -> u64 {
        let mut slots = [0.0; 64];
        let mut seen = 0;
        for row in first..first + rows {
            self.get(row, page, &mut slots);
            for (slot, logit) in slots.iter().enumerate() {
                seen |= u64::from(*logit > f32::NEG_INFINITY) << slot;
            }
        }
        seen
    }
}

/// Whether the bits are the lowest ones.
fn consecutive(bits: u64) -> bool {
    bits.trailing_ones() == bits.count_ones()
}

/// How rows `[part][query][head]` become one number per part and token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folding {
    pub(crate) parts: usize,
    pub(crate) queries: usize,
    /// Query heads of a key-value head.
    pub(crate) heads: usize,
    pub(crate) reduce: Reduce,
    pub(crate) fold: Fold,
    /// Whether the call's last query is among these.
    pub(crate) last: bool,
}

impl Folding {
    /// What the rows, whose log-sum-exps are `lse`, give to the tokens of the unit's jobs: `[part][token]`.
    pub(crate) fn run(self, records: &mut [Record], lse: &[f32]) -> Vec<f32> {
        let tokens: usize = records.iter().map(|record| record.tokens).sum();
        let mut sums = vec![0.0; self.parts * tokens];
        for (part, sums) in sums.chunks_exact_mut(tokens.max(1)).enumerate() {
            let first = if self.fold == Fold::Last { self.queries - usize::from(self.last) } else { 0 };
            for query in first..self.queries {
                let row = (part * self.queries + query) * self.heads;
                self.add_query(records, row, &lse[row..row + self.heads], sums);
            }
        }
        sums
    }

    /// Adds the probabilities of the query whose first row is `row`.
    fn add_query(self, records: &mut [Record], row: usize, lse: &[f32], sums: &mut [f32]) {
        let seen = |x: &&f32| **x > f32::NEG_INFINITY;
        let visible: usize = records.iter_mut().map(|r| r.row(row, 0).iter().filter(seen).count()).sum();
        let even = 1.0 / visible as f32;
        let mut at = 0;
        for record in records {
            let tokens = record.tokens;
            for (head, &lse) in lse.iter().enumerate() {
                let probabilities = record.row(row + head, 0);
                if lse == f32::NEG_INFINITY {
                    probabilities.fill(0.0);
                } else {
                    exp_sum(probabilities, lse);
                }
            }
            let rows = &mut record.logits[row * tokens..][..self.heads * tokens];
            let (reduced, others) = rows.split_at_mut(tokens);
            for other in others.chunks_exact(tokens.max(1)) {
                self.join(reduced, other);
            }
            let factor = if self.reduce == Reduce::Mean { 1.0 / self.heads as f32 } else { 1.0 };
            for (sum, x) in sums[at..at + tokens].iter_mut().zip(reduced) {
                let x = *x * factor;
                *sum += if self.fold == Fold::Above { f32::from(u8::from(x > even)) } else { x };
            }
            at += tokens;
        }
    }

    fn join(self, to: &mut [f32], other: &[f32]) {
        if self.reduce == Reduce::Max {
            to.iter_mut().zip(other).for_each(|(a, b)| *a = if *b > *a { *b } else { *a });
        } else {
            to.iter_mut().zip(other).for_each(|(a, b)| *a += b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    /// Two heads of one group; two queries, of which the first sees one token less.
    fn record() -> Vec<Record> {
        let probabilities = [[0.75, 0.25, 0.0], [0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.125, 0.125, 0.75]];
        let logits =
            probabilities.as_flattened().iter().map(|p: &f32| if *p == 0.0 { NEVER } else { p.ln() });
        vec![Record { tokens: 3, logits: logits.collect() }]
    }

    fn folded(reduce: Reduce, fold: Fold, last: bool) -> Vec<f32> {
        let folding = Folding { parts: 1, queries: 2, heads: 2, reduce, fold, last };
        let close = |x: f32| (x * 1e4).round() / 1e4;
        folding.run(&mut record(), &[0.0; 4]).into_iter().map(close).collect()
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
        let folding =
            Folding { parts: 1, queries: 1, heads: 1, reduce: Reduce::Mean, fold: Fold::Sum, last: true };
        assert_eq!(folding.run(&mut [Record::new(1, 2)], &[NEVER]), [0.0, 0.0]);
    }
}
