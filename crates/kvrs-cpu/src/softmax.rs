//! The online softmax of a block of query rows, in f32.

use crate::lanes::{exp, exp_sum, max};

/// What happens to a raw score before the softmax.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Logits {
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
}

impl Logits {
    /// Scales and caps scores; those whose bit is not set become -inf, whatever they were.
    pub(crate) fn apply(self, scores: &mut [f32], mask: u64) {
        match self.softcap {
            None => scores.iter_mut().for_each(|s| *s *= self.scale),
            Some(cap) => scores.iter_mut().for_each(|s| *s = cap * (*s * self.scale / cap).tanh()),
        }
        let all = if scores.len() >= 64 { u64::MAX } else { (1 << scores.len()) - 1 };
        if mask & all != all {
            for (i, s) in scores.iter_mut().enumerate() {
                *s = if mask >> i & 1 == 1 { *s } else { f32::NEG_INFINITY };
            }
        }
    }
}

/// Largest logit and sum of exponentials so far, per row.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running {
    pub(crate) max: Vec<f32>,
    pub(crate) sum: Vec<f32>,
}

impl Running {
    pub(crate) fn new(rows: usize) -> Self {
        let mut running = Self::default();
        running.reset(rows);
        running
    }

    /// `rows` rows that have seen nothing.
    pub(crate) fn reset(&mut self, rows: usize) {
        self.max.clear();
        self.max.resize(rows, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(rows, 0.0);
    }

    /// Turns up to 64 scores of a row into weights relative to the new maximum and rescales the row's sums.
    pub(crate) fn step(
        &mut self,
        row: usize,
        logits: Logits,
        scores: &mut [f32],
        mask: u64,
        sums: &mut [f32],
    ) {
        logits.apply(scores, mask);
        self.weigh(row, scores, sums);
    }

    /// As [`Self::step`], on logits.
    pub(crate) fn weigh(&mut self, row: usize, scores: &mut [f32], sums: &mut [f32]) {
        let (old, new) = (self.max[row], self.max[row].max(max(scores)));
        if new == f32::NEG_INFINITY {
            scores.fill(0.0);
            return;
        }
        if new > old {
            let factor = exp(old - new);
            self.max[row] = new;
            self.sum[row] *= factor;
            for x in sums {
                *x *= factor;
            }
        }
        self.sum[row] += exp_sum(scores, new);
    }
}
