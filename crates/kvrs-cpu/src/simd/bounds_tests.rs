//! Kernels read no byte beside the page they are given: pages touch memory that faults when it is read.

use super::codes::{PageBytes, RunAt};
use super::keys::{KeyArgs, NarrowDigits, SPAN, WideDigits};
use super::prepare::Prepared;
use super::raw::{RawKeyArgs, RawValueArgs};
use super::values::{NarrowWeights, ValueArgs, WideWeights};
use crate::isa::Isa;
use crate::kernels::{Kernels, ROWS};
use crate::testing::{Guard, Guarded};
use kvrs_codec::Elem;

const TABLES: [[u8; 16]; 4] = [[70; 16], [60; 16], [64; 16], [1; 16]];
const BLOCKS: [usize; 4] = [1, 2, 3, 5];

/// Bytes without a pattern.
fn noise(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect()
}

/// Runs `kernel` on plain bytes and on bytes at either border; all three answers must be the same.
fn at_borders(bytes: &[u8], kernel: impl Fn(&[u8]) -> Vec<[f32; 16]>) {
    let expected = kernel(bytes);
    assert!(expected.iter().flatten().any(|x| *x != 0.0), "the kernel answers something");
    for guard in [Guard::Before, Guard::After] {
        assert!(kernel(&Guarded::new(bytes, guard)) == expected, "{guard:?}");
    }
}

fn each_kernel(check: impl Fn(Kernels)) {
    Isa::available().filter_map(Kernels::of).for_each(check);
}

/// One run of a page that ends with its last live tile.
#[derive(Clone, Copy)]
struct Run {
    width: usize,
    blocks: usize,
    tiles: u8,
}

impl Run {
    fn tile_bytes(self) -> usize {
        32 * self.width * self.blocks
    }

    fn bytes(self) -> usize {
        self.tile_bytes() * (self.tiles.ilog2() as usize + 1)
    }

    /// The page, behind which the next one would start, and where the run and its scales lie.
    fn page(self, bytes: &[u8], scales: Option<usize>) -> (PageBytes<'_>, RunAt) {
        let live = (0..4).filter(|tile| self.tiles >> tile & 1 == 1).map(|tile| 0xffff << (16 * tile)).sum();
        let len = self.tile_bytes();
        let page = PageBytes { bytes, live, next: bytes.as_ptr_range().end };
        (page, RunAt { codes: 0, stride: len, len, scales })
    }
}

fn keys(kernels: Kernels, page: &[u8], run: Run, rows: usize) -> Vec<[f32; 16]> {
    let mut scores = vec![[0.0; 16]; 4 * rows];
    let quads = 4 * run.blocks;
    let (page, at) = run.page(page, Some(run.bytes()));
    let mut args = KeyArgs {
        pages: &[page],
        run: at,
        scales: &vec![0.5; rows],
        biases: &vec![1.0; rows],
        fresh: false,
        scores: &mut scores,
        row_chunks: 4,
    };
    if run.width <= 4 {
        let digits = &vec![0x0102_FF03; quads * rows * kernels.spread()];
        let query = NarrowDigits { tables: &TABLES, digits, starts: &vec![0; quads.div_ceil(SPAN) * rows] };
        kernels.narrow_keys(run.width, rows, &mut args, &query);
    } else {
        let query = WideDigits { table: &[3; 64], digits: &vec![0x0102_FF03; 2 * quads * rows] };
        kernels.wide_keys(run.width, rows, &mut args, &query);
    }
    scores
}

fn values(kernels: Kernels, page: &[u8], run: Run, rows: usize) -> Vec<[f32; 16]> {
    let mut sums = vec![[0.0; 16]; run.blocks * rows];
    let (page, at) = run.page(page, None);
    let mut args = ValueArgs {
        pages: &[page],
        run: at,
        prepared: &vec![Prepared { digit: 0.5, sum: 1.0 }; rows],
        step: 1.0,
        zero: 1.0,
        sums: &mut sums,
        row_chunks: run.blocks,
    };
    if run.width <= 4 {
        let digits = &vec![0x0102_0003; 16 * rows * kernels.spread()];
        let weights = NarrowWeights { tables: &TABLES, digits, starts: &vec![0; rows] };
        kernels.narrow_values(run.width, rows, &mut args, &weights);
    } else {
        let weights = WideWeights { table: &[3; 64], digits: &vec![[[0x0102_0003; 2]; 16]; rows] };
        kernels.wide_values(run.width, rows, &mut args, &weights);
    }
    sums
}

#[test]
fn kernels_of_packed_pages_stay_inside_the_page() {
    let runs = (1..=8).flat_map(|width| BLOCKS.map(|blocks| (width, blocks)));
    let runs: Vec<Run> = runs
        .flat_map(|(width, blocks)| [0b1111, 0b0101, 0b0001].map(|tiles| Run { width, blocks, tiles }))
        .collect();
    each_kernel(|kernels| {
        for &run in &runs {
            // 0x3c3c is an f16 close to 1.
            let page = [noise(run.bytes()), vec![0x3c; 4 * 32]].concat();
            for rows in 1..=ROWS {
                at_borders(&page, |page| keys(kernels, page, run, rows));
                at_borders(&page[..run.bytes()], |page| values(kernels, page, run, rows));
            }
        }
    });
}

#[test]
fn kernels_of_16_bit_pages_stay_inside_the_page() {
    let scores = |kernels: Kernels, page: &[u8], elem, chunks, rows| {
        let mut scores = vec![[0.0; 16]; rows];
        let (page, next) = (page.as_chunks().0, page.as_ptr_range().end);
        let query = &vec![[0.5; 16]; rows * chunks];
        kernels.raw_scores(
            rows,
            &mut RawKeyArgs { elem, page, query, fresh: false, scores: &mut scores, row_chunks: 1, next },
        );
        scores
    };
    let sums = |kernels: Kernels, page: &[u8], elem, chunks, rows| {
        let mut sums = vec![[0.0; 16]; rows * chunks];
        let (page, next, weights) = (page.as_chunks().0, page.as_ptr_range().end, &vec![[0.5; 16]; rows]);
        let mut args = RawValueArgs { elem, page, live: !1, weights, row_chunks: 1, sums: &mut sums, next };
        kernels.raw_sums(rows, &mut args);
        sums
    };
    each_kernel(|kernels| {
        for (elem, chunks) in [Elem::F16, Elem::Bf16].into_iter().flat_map(|elem| BLOCKS.map(|c| (elem, c))) {
            let page = vec![0x3c; 16 * 32 * chunks];
            for rows in 1..=ROWS {
                at_borders(&page, |page| scores(kernels, page, elem, chunks, rows));
                at_borders(&page, |page| sums(kernels, page, elem, chunks, rows));
            }
        }
    });
}
