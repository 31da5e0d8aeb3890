//! Query rows and softmax weights as integer digits, and the kernels that take them.

use crate::kernels::{Kernels, ROWS, blocks};
use crate::packed::{Levels, PackedRun};
use crate::simd::codes::PageBytes;
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

    /// What each run and block of rows has to do with every batch of pages; the scores hold nothing yet before the
    /// first if `fresh`.
    pub(crate) fn tasks<'a>(
        &'a self,
        kernels: Kernels,
        runs: &'a [PackedRun],
        rows: usize,
        fresh: bool,
    ) -> impl Iterator<Item = KeyTask<'a>> {
        runs.iter().enumerate().flat_map(move |(i, run)| {
            blocks(rows).map(move |(first, count)| {
                let (digits, starts) = ranges(kernels, run, (first, count), rows);
                let scales = i * rows + first..i * rows + first + count;
                KeyTask {
                    run,
                    first,
                    digits: &self.digits.as_flattened()[digits],
                    starts: &self.starts[starts],
                    scales: &self.scales[scales.clone()],
                    biases: &self.biases[scales],
                    fresh: fresh && i == 0,
                }
            })
        })
    }
}

/// A run against a block of prepared rows.
pub(crate) struct KeyTask<'a> {
    run: &'a PackedRun,
    first: usize,
    digits: &'a [i32],
    starts: &'a [i32],
    scales: &'a [f32],
    biases: &'a [f32],
    fresh: bool,
}

impl KeyTask<'_> {
    /// Adds the scores on a batch of pages to `scores` `[row][chunk]`.
    #[inline]
    pub(crate) fn add_scores(
        &self,
        kernels: Kernels,
        pages: &[PageBytes<'_>],
        (scores, row_chunks): (&mut [[f32; 16]], usize),
    ) {
        let &Self { run, first, digits, starts, scales, biases, fresh } = self;
        let scores = &mut scores[first * row_chunks..];
        let mut args = KeyArgs { pages, run: run.at, scales, biases, fresh, scores, row_chunks };
        match &run.levels {
            Levels::Narrow(tables) => {
                kernels.narrow_keys(
                    run.width,
                    scales.len(),
                    &mut args,
                    &NarrowDigits { tables, digits, starts },
                );
            }
            Levels::Wide(table) => {
                kernels.wide_keys(run.width, scales.len(), &mut args, &WideDigits { table, digits });
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

/// Softmax weights of a batch of pages against the runs of the values, a block of rows at a time.
#[derive(Debug, Default)]
pub(crate) struct WeightDigits {
    /// `[page][row][quad][spread]`.
    narrow: Lines<i32>,
    /// `[page][row]`, narrow only.
    starts: Vec<i32>,
    /// `[page][row]`.
    wide: Vec<[[i32; 2]; 16]>,
    /// `[page][row]`.
    prepared: Vec<Prepared>,
}

/// Where the softmax weights of a batch are and where the sums go, from a block's first row on.
pub(crate) struct Weighted<'a> {
    pub(crate) rows: usize,
    /// `[row][chunk]`.
    pub(crate) weights: &'a [[f32; 16]],
    /// Chunks of weights from row to row.
    pub(crate) row_chunks: usize,
    /// `[row][chunk]`.
    pub(crate) sums: &'a mut [[f32; 16]],
    /// Chunks of sums from row to row.
    pub(crate) sum_chunks: usize,
}

impl WeightDigits {
    /// Makes room for batches of `pages` pages.
    pub(crate) fn reserve(&mut self, kernels: Kernels, runs: &[PackedRun], pages: usize) {
        let n = pages * ROWS;
        let narrow = runs.iter().any(|run| matches!(run.levels, Levels::Narrow(_)));
        let wide = runs.iter().any(|run| matches!(run.levels, Levels::Wide(_)));
        self.narrow.chunks(if narrow { n * kernels.spread() } else { 0 });
        self.starts.resize(n, 0);
        self.wide.resize(if wide { n } else { 0 }, [[0; 2]; 16]);
        self.prepared.resize(n, Prepared::default());
    }

    /// Adds the weighted sums over a batch of pages on all runs.
    pub(crate) fn add_sums(
        &mut self,
        kernels: Kernels,
        runs: &[PackedRun],
        pages: &[PageBytes<'_>],
        block: &mut Weighted<'_>,
    ) {
        // What the digits were made for: where the token scales are, and whether they are narrow.
        let mut made = None;
        for run in runs {
            let kind = (run.at.scales, matches!(run.levels, Levels::Narrow(_)));
            if made != Some(kind) {
                self.prepare(kernels, run, pages, block);
                made = Some(kind);
            }
            self.add_run(kernels, run, pages, block);
        }
    }

    fn prepare(
        &mut self,
        kernels: Kernels,
        run: &PackedRun,
        pages: &[PageBytes<'_>],
        &mut Weighted { rows, weights, row_chunks, .. }: &mut Weighted<'_>,
    ) {
        let args = WeightArgs { pages, run: run.at, weights, row_chunks };
        let n = pages.len() * rows;
        let prepared = &mut self.prepared[..n];
        if matches!(run.levels, Levels::Narrow(_)) {
            let digits = &mut self.narrow.as_flattened_mut()[..n * 16 * kernels.spread()];
            kernels.narrow_weights(&args, rows, (digits, &mut self.starts[..n], prepared));
        } else {
            kernels.wide_weights(&args, rows, (&mut self.wide[..n], prepared));
        }
    }

    fn add_run(
        &self,
        kernels: Kernels,
        run: &PackedRun,
        pages: &[PageBytes<'_>],
        Weighted { rows, sums, sum_chunks, .. }: &mut Weighted<'_>,
    ) {
        let n = pages.len() * *rows;
        let mut args = ValueArgs {
            pages,
            run: run.at,
            prepared: &self.prepared[..n],
            step: run.step,
            zero: run.zero,
            sums: &mut sums[run.chunk..],
            row_chunks: *sum_chunks,
        };
        match &run.levels {
            Levels::Narrow(tables) => {
                let digits = &self.narrow.as_flattened()[..n * 16 * kernels.spread()];
                let weights = NarrowWeights { tables, digits, starts: &self.starts[..n] };
                kernels.narrow_values(run.width, *rows, &mut args, &weights);
            }
            Levels::Wide(table) => {
                let weights = WideWeights { table, digits: &self.wide[..n] };
                kernels.wide_values(run.width, *rows, &mut args, &weights);
            }
        }
    }
}
