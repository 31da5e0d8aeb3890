//! Partial results and their merge; what padding gets.

use crate::memory::Chunk;
use kvrs_codec::ViewMut;
use kvrs_codec::backend::AttendCall;

/// Softmax sums and outputs of some query rows, each relative to its own largest logit.
#[derive(Debug)]
pub(crate) struct Partial {
    dim: usize,
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<f32>,
}

impl Partial {
    /// Rows that have seen nothing yet.
    pub(crate) fn new(rows: usize, dim: usize) -> Self {
        Self { dim, max: vec![f32::NEG_INFINITY; rows], sum: vec![0.0; rows], out: vec![0.0; rows * dim] }
    }

    /// Adds the result of other tokens to a row.
    pub(crate) fn add(&mut self, row: usize, max: f32, sum: f32, out: &[f32]) {
        if max == f32::NEG_INFINITY {
            return;
        }
        let new = self.max[row].max(max);
        let (old_factor, factor) = ((self.max[row] - new).exp(), (max - new).exp());
        self.max[row] = new;
        self.sum[row] = self.sum[row] * old_factor + sum * factor;
        let to = &mut self.out[row * self.dim..][..self.dim];
        to.iter_mut().zip(out).for_each(|(o, x)| *o = *o * old_factor + x * factor);
    }

    /// Adds the result of the same rows over other tokens; its row 0 is row `first` here.
    pub(crate) fn merge(&mut self, first: usize, other: &Self) {
        for row in 0..other.max.len() {
            let out = &other.out[row * self.dim..][..self.dim];
            self.add(first + row, other.max[row], other.sum[row], out);
        }
    }

    /// The attention output of a row and its log-sum-exp; zeros and -inf if it saw nothing.
    pub(crate) fn finish(&mut self, row: usize, sink: Option<f32>) -> (&[f32], f32) {
        let out = &mut self.out[row * self.dim..][..self.dim];
        if self.max[row] == f32::NEG_INFINITY {
            return (out, f32::NEG_INFINITY);
        }
        let max = sink.map_or(self.max[row], |s| self.max[row].max(s));
        let factor = (self.max[row] - max).exp();
        let sum = self.sum[row] * factor + sink.map_or(0.0, |s| (s - max).exp());
        for x in out.iter_mut() {
            *x = *x * factor / sum;
        }
        (out, max + sum.ln())
    }
}

/// Writes zeros, with the log-sum-exp -inf, where a call has no query.
pub(crate) fn clear_padding(
    call: &AttendCall<'_, Chunk>,
    mut out: Option<&mut ViewMut<'_>>,
    mut lse: Option<&mut [f32]>,
) {
    let [_, heads, columns, _] = call.q.shape();
    let zeros = vec![0.0; call.layer.shape.value_dim];
    for (row, queries) in call.rows.iter().enumerate().filter(|(_, row)| row.columns.len() < columns) {
        let mut next = queries.columns.iter().copied().peekable();
        for column in 0..columns {
            if next.next_if_eq(&column).is_some() {
                continue;
            }
            for head in 0..heads {
                if let Some(out) = &mut out {
                    out.write_row([row, head, column], &zeros);
                }
                if let Some(lse) = &mut lse {
                    lse[(row * heads + head) * columns + column] = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_parts_equals_the_whole() {
        let mut partial = Partial::new(1, 1);
        partial.add(0, 2.0, 1.0, &[3.0]);
        partial.add(0, 5.0, 2.0, &[-1.0]);
        let (a, b) = (2f32.exp(), 5f32.exp());
        let (out, lse) = partial.finish(0, Some(1.0));
        let sum = a + 2.0 * b + 1f32.exp();
        assert!((out[0] - (3.0 * a - b) / sum).abs() < 1e-6 && (lse - sum.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_row_that_saw_nothing_is_zero_even_with_a_sink() {
        let mut partial = Partial::new(2, 3);
        partial.add(1, f32::NEG_INFINITY, 0.0, &[f32::NAN; 3]);
        assert_eq!(partial.finish(1, Some(2.0)), (&[0.0; 3][..], f32::NEG_INFINITY));
    }
}
