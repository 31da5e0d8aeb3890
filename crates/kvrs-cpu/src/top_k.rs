//! Top-k attention: every query keeps its largest scores and reads only those values.
//!
//! Gupta et al., 2021, arXiv:2106.06899 section 2. The keys are scored first, over all jobs of a unit; then the values of
//! the tokens that some query of the unit kept are summed. Exact among the kept tokens; equal scores go to the
//! earlier token.

use crate::received::Placed;
use crate::softmax::Logits;

/// What a pass over a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Scores, softmax and sums at once.
    Whole,
    /// Scores only, which go into the record.
    Logits,
    /// Softmax and sums of the logits in the record.
    Values,
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

/// Leaves the `k` largest logits of a row in the records of its jobs, -inf in the place of the others.
pub(crate) fn keep_largest(records: &mut [&mut Record], row: usize, k: usize, all: &mut Vec<f32>) {
    all.clear();
    for record in &mut *records {
        all.extend(record.row(row, 0).iter().filter(|x| **x > f32::NEG_INFINITY));
    }
    if all.len() <= k {
        return;
    }
    let (_, &mut least, _) = all.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let mut ties = k - all[..k].iter().filter(|x| **x > least).count();
    for record in records {
        for x in record.row(row, 0) {
            let tie = *x == least && ties > 0;
            ties -= usize::from(tie);
            *x = if *x > least || tie { *x } else { f32::NEG_INFINITY };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_stay_and_ties_go_to_the_earlier() {
        let mut records = [Record::new(2, 3), Record::new(2, 2)];
        records[0].row(1, 0).copy_from_slice(&[1.0, f32::NEG_INFINITY, 3.0]);
        records[1].row(1, 0).copy_from_slice(&[1.0, -2.0]);
        let kept = |k: usize| {
            let mut records = [records[0].clone(), records[1].clone()];
            let [a, b] = &mut records;
            keep_largest(&mut [a, b], 1, k, &mut Vec::new());
            let seen =
                |record: &mut Record| record.row(1, 0).iter().map(|x| x.is_finite()).collect::<Vec<_>>();
            records.each_mut().map(seen).concat()
        };
        assert_eq!(kept(1), [false, false, true, false, false]);
        assert_eq!(kept(2), [true, false, true, false, false]);
        assert_eq!(kept(3), [true, false, true, true, false]);
        assert_eq!(kept(9), [true, false, true, true, true]);
    }
}
