//! Query rows and softmax weights as integer digits, and the kernels that take them.

use crate::kernels::{Kernels, blocks};
use crate::packed::{Levels, PackedRun};
use crate::simd::codes::Codes;
use crate::simd::keys::{KeyArgs, NarrowDigits, WideDigits};
use crate::simd::lines::Lines;
use crate::simd::prepare::{Prepared, QueryArgs, WeightArgs};
use crate::simd::values::{NarrowWeights, ValueArgs, WideWeights};
use std::ops::Range;

/// Prepared queries against the runs of the keys.
#[derive(Debug, Default)]
pub(crate) struct QueryDigits {
    /// Per run and block of rows: its digits, which are neighbours.
    digits: Lines<i32>,
    starts: Vec<i32>,
    /// `[run][row]`.
    scales: Vec<f32>,
    biases: Vec<f32>,
}

impl QueryDigits {
    /// Quantises the prepared queries `z` `[row][chunk]`.
    pub(crate) fn prepare(&mut self, kernels: Kernels, runs: &[PackedRun], z: &[[f32; 16]], rows: usize) {
        let last = runs.last().expect("sides have runs");
        self.digits.chunks(((last.digits_at + last.digits()) * kernels.spread() * rows).div_ceil(16));
        self.starts.resize((last.spans_at + last.spans()) * rows, 0);
        self.scales.clear();
        self.biases.clear();
        for run in runs {
            for (first, count) in blocks(rows) {
                for row in 0..count {
                    let z = &z[(first + row) * (z.len() / rows) + run.chunk..][..run.chunks()];
                    let prepared = self.quantise(kernels, run, z, (first, row, count), rows);
                    self.scales.push(prepared.digit * run.step);
                    self.biases.push(prepared.sum * run.zero * run.step);
                }
            }
        }
    }

    fn quantise(
        &mut self,
        kernels: Kernels,
        run: &PackedRun,
        z: &[[f32; 16]],
        (first, row, count): (usize, usize, usize),
        rows: usize,
    ) -> Prepared {
        let (digits, starts) = ranges(kernels, run, (first, count), rows);
        let (digits, starts) = (&mut self.digits.as_flattened_mut()[digits], &mut self.starts[starts]);
        let args = QueryArgs { z, row, rows: count, digits, starts };
        match run.levels {
            Levels::Narrow(_) => kernels.narrow_query(args),
            Levels::Wide(_) => kernels.wide_query(args),
        }
    }

    /// Adds the scores of `rows` rows on run number `i` of a page to `scores` `[row][chunk]`.
    pub(crate) fn add_scores(
        &self,
        kernels: Kernels,
        (i, run): (usize, &PackedRun),
        (codes, token_scales): (Codes<'_>, Option<&[[u8; 32]]>),
        (scores, row_chunks): (&mut [[f32; 16]], usize),
        rows: usize,
    ) {
        for (first, count) in blocks(rows) {
            let (digits, starts) = ranges(kernels, run, (first, count), rows);
            let (digits, starts) = (&self.digits.as_flattened()[digits], &self.starts[starts]);
            let mut args = KeyArgs {
                codes,
                token_scales,
                scales: &self.scales[i * rows + first..][..count],
                biases: (run.zero != 0.0).then(|| &self.biases[i * rows + first..][..count]),
                scores: &mut scores[first * row_chunks..],
                row_chunks,
            };
            match &run.levels {
                Levels::Narrow(tables) => {
                    let digits = NarrowDigits { tables, digits, starts };
                    kernels.narrow_keys(run.width, count, &mut args, &digits);
                }
                Levels::Wide(table) => {
                    kernels.wide_keys(run.width, count, &mut args, &WideDigits { table, digits });
                }
            }
        }
    }
}

/// Where the digits and starts of a run and `count` of `rows` rows lie: every run has room for spread digits.
fn ranges(
    kernels: Kernels,
    run: &PackedRun,
    (first, count): (usize, usize),
    rows: usize,
) -> (Range<usize>, Range<usize>) {
    let spread = if matches!(run.levels, Levels::Narrow(_)) { kernels.spread() } else { 1 };
    let digits = kernels.spread() * run.digits_at * rows + spread * run.digits() * first;
    let starts = run.spans_at * rows + run.spans() * first;
    (digits..digits + spread * run.digits() * count, starts..starts + run.spans() * count)
}

/// Softmax weights of a page against the runs of the values.
#[derive(Debug, Default)]
pub(crate) struct WeightDigits {
    /// `[row][quad][spread]`.
    narrow: Lines<i32>,
    /// `[row]`, narrow only.
    starts: Vec<i32>,
    wide: Vec<[[i32; 2]; 16]>,
    /// `[row]`.
    prepared: Vec<Prepared>,
    /// What the digits were made for: the index of the token scale, and whether they are narrow.
    made: Option<(u32, bool)>,
}

impl WeightDigits {
    /// Forgets the digits of another page.
    pub(crate) fn turn_page(&mut self) {
        self.made = None;
    }

    /// Quantises the weights of `rows` rows for a run, unless those of the run before serve; `args` are those of a
    /// block from its first row.
    pub(crate) fn prepare<'w>(
        &mut self,
        kernels: Kernels,
        run: &PackedRun,
        rows: usize,
        args: impl Fn(usize) -> WeightArgs<'w>,
    ) {
        let narrow = matches!(run.levels, Levels::Narrow(_));
        if self.made == Some((run.scale, narrow)) {
            return;
        }
        self.made = Some((run.scale, narrow));
        self.prepared.resize(rows, Prepared::default());
        let row = 16 * kernels.spread();
        self.narrow.chunks(if narrow { rows * row / 16 } else { 0 });
        self.starts.resize(rows, 0);
        self.wide.resize(if narrow { 0 } else { rows }, [[0; 2]; 16]);
        for (first, count) in blocks(rows) {
            let prepared = &mut self.prepared[first..first + count];
            if narrow {
                let digits = &mut self.narrow.as_flattened_mut()[first * row..][..count * row];
                kernels.narrow_weights(
                    &args(first),
                    digits,
                    &mut self.starts[first..first + count],
                    prepared,
                );
            } else {
                kernels.wide_weights(&args(first), &mut self.wide[first..first + count], prepared);
            }
        }
    }

    /// Adds the weighted sums of `rows` rows on a run to `sums` `[row][chunk]`.
    pub(crate) fn add_sums(
        &self,
        kernels: Kernels,
        run: &PackedRun,
        codes: Codes<'_>,
        (sums, row_chunks): (&mut [[f32; 16]], usize),
        rows: usize,
    ) {
        for (first, count) in blocks(rows) {
            let of = |value: fn(&Prepared) -> f32, factor: f32| -> [f32; crate::kernels::ROWS] {
                std::array::from_fn(|r| self.prepared.get(first + r).map_or(0.0, |p| value(p) * factor))
            };
            let (scales, biases) = (of(|p| p.digit, run.step), of(|p| p.sum, run.zero * run.step));
            let mut args = ValueArgs {
                codes,
                scales: &scales[..count],
                biases: (run.zero != 0.0).then_some(&biases[..count]),
                sums: &mut sums[first * row_chunks + run.chunk..],
                row_chunks,
            };
            match &run.levels {
                Levels::Narrow(tables) => {
                    let row = 16 * kernels.spread();
                    let digits = &self.narrow.as_flattened()[first * row..][..count * row];
                    let starts = &self.starts[first..first + count];
                    kernels.narrow_values(
                        run.width,
                        count,
                        &mut args,
                        &NarrowWeights { tables, digits, starts },
                    );
                }
                Levels::Wide(table) => {
                    let digits = &self.wide[first..first + count];
                    kernels.wide_values(run.width, count, &mut args, &WideWeights { table, digits });
                }
            }
        }
    }
}
