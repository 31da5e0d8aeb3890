//! The pages of a pass, a few at a time: scores, a step of the online softmax, weighted sums.

use crate::base::{BaseScores, Scores};
use crate::digits::{KeyTask, WeightDigits, Weighted};
use crate::job::Keep;
use crate::kernels::{Kernels, blocks};
use crate::memory::{Chunk, bytes};
use crate::packed::PackedRun;
use crate::packed_pass::PassCall;
use crate::received::Placed;
use crate::simd::codes::PageBytes;
use crate::simd::raw::{RawKeyArgs, RawValueArgs};
use crate::simd::softmax::SoftmaxArgs;
use crate::softmax::Running;
use crate::top_k::Stage;
use kvrs_codec::SideDesc;
use kvrs_codec::desc::TILE;
use kvrs_core::page::Slots;
use std::f32::consts::LN_2;

/// Chunks of 16 slots between two steps of the online softmax: more would leave the first-level cache, fewer would
/// pay the latency of its horizontal steps more often.
pub(crate) const BATCH_CHUNKS: usize = 16;

/// How the keys of a class are read.
pub(crate) enum Keys<'w> {
    /// By the integer kernels.
    Packed(Vec<KeyTask<'w>>),
    /// As 16-bit rows, against queries `z` `[row][chunk]`; `fresh`: the scores hold nothing before.
    Raw { desc: &'w SideDesc, z: &'w [[f32; 16]], fresh: bool },
}

/// How the values of a class are read.
pub(crate) enum Values<'w> {
    /// By the integer kernels.
    Packed { runs: &'w [PackedRun], weights: &'w mut WeightDigits },
    /// As 16-bit rows.
    Raw { desc: &'w SideDesc },
}

/// The query rows' own numbers.
pub(crate) struct Rows<'w> {
    /// `[row][BATCH_CHUNKS]`: scores, then softmax weights.
    pub(crate) scores: &'w mut [[f32; 16]],
    /// Sums over stored channels `[row][chunk]`.
    pub(crate) acc: &'w mut [[f32; 16]],
    /// Largest logit so far times log2 e, and sum of weights relative to it.
    pub(crate) running: &'w mut Running,
}

/// What the batches of a pass share.
pub(crate) struct Batches<'w, 'r> {
    pub(crate) kernels: Kernels,
    pub(crate) call: PassCall,
    /// Chunks of 16 slots in a page.
    pub(crate) page_chunks: usize,
    pub(crate) key: Keys<'w>,
    pub(crate) value: Values<'w>,
    pub(crate) rows: Rows<'w>,
    /// Slots that a query sees `[query][chunk]`.
    pub(crate) masks: &'w [u16],
    /// Where logits and weights are kept, if they are asked for.
    pub(crate) keep: &'w mut Keep<'r>,
}

/// Pages with what their readers must know; queries see the slots `masks` `[page][query]`.
pub(crate) fn pages_of<'e>(
    placed: &[&Placed<'e, Chunk>],
    masks: &[u64],
    queries: usize,
) -> Vec<PageBytes<'e>> {
    let mut pages: Vec<PageBytes<'e>> = Vec::with_capacity(placed.len());
    for (i, Placed { entry, .. }) in placed.iter().enumerate() {
        let live = masks[i * queries..][..queries].iter().fold(0, |all, mask| all | mask);
        let bytes = bytes(entry.page());
        if let Some(last) = pages.last_mut() {
            last.next = bytes.as_ptr();
        }
        pages.push(PageBytes { bytes, live, next: bytes.as_ptr() });
    }
    pages
}

/// Masks `[page][query]` of pages of `page_chunks` chunks as `[query][chunk]`.
pub(crate) fn slot_bits(masks: &[u64], queries: usize, page_chunks: usize, bits: &mut Vec<u16>) {
    let chunks = masks.len() / queries * page_chunks;
    bits.resize(queries * chunks, 0);
    for (query, bits) in bits.chunks_exact_mut(chunks.max(1)).enumerate() {
        for (page, bits) in bits.chunks_exact_mut(page_chunks).enumerate() {
            let mask = masks[page * queries + query];
            for (tile, bits) in bits.iter_mut().enumerate() {
                *bits = (mask >> (TILE * tile)) as u16;
            }
        }
    }
}

impl Batches<'_, '_> {
    /// Goes through all pages.
    pub(crate) fn run(
        mut self,
        pages: &[PageBytes<'_>],
        placed: &[&Placed<'_, Chunk>],
        mut base: Option<&mut BaseScores<'_>>,
    ) {
        let size = BATCH_CHUNKS / self.page_chunks;
        for first in (0..pages.len()).step_by(size) {
            let pages = &pages[first..pages.len().min(first + size)];
            let placed = &placed[first..][..pages.len()];
            if self.call.stage == Stage::Values {
                self.take_logits(placed);
            } else {
                if let Some(base) = &mut base {
                    self.start_scores(base, placed);
                }
                self.add_scores(pages);
                self.keep_logits(first * self.page_chunks, placed);
            }
            if self.call.stage == Stage::Logits {
                continue;
            }
            self.softmax(first * self.page_chunks, pages.len() * self.page_chunks);
            self.keep_weights(placed);
            if self.call.values {
                self.add_sums(pages);
            }
        }
    }

    /// Starts the scores with those of the key offset.
    fn start_scores(&mut self, base: &mut BaseScores<'_>, placed: &[&Placed<'_, Chunk>]) {
        self.rows.scores.fill([0.0; 16]);
        for (i, Placed { entry, .. }) in placed.iter().enumerate() {
            let run = matches!(entry.slots(), Slots::Run { .. });
            let position = |slot: usize| self.call.start + entry.index(slot) as i64;
            let (all, at) = (self.rows.scores.as_flattened_mut(), TILE * self.page_chunks * i);
            base.add(entry.live(), run, position, Scores { all, row: TILE * BATCH_CHUNKS, at });
        }
    }

    fn add_scores(&mut self, pages: &[PageBytes<'_>]) {
        match &self.key {
            Keys::Packed(tasks) => {
                for task in tasks {
                    task.add_scores(self.kernels, pages, (self.rows.scores, BATCH_CHUNKS));
                }
            }
            Keys::Raw { desc, z, fresh } => {
                let (rows, scores) = (self.rows.running.max.len(), &mut *self.rows.scores);
                let chunks = z.len() / rows;
                for (page, tile, chunk) in live_tiles(pages, self.page_chunks) {
                    for (first, count) in blocks(rows) {
                        let mut args = RawKeyArgs {
                            elem: desc.runs[0].elem,
                            page: raw_rows(page.bytes, desc, tile),
                            query: &z[first * chunks..][..count * chunks],
                            fresh: *fresh,
                            scores: &mut scores[first * BATCH_CHUNKS + chunk..],
                            row_chunks: BATCH_CHUNKS,
                            next: page.next.wrapping_add(raw_at(desc, tile)),
                        };
                        self.kernels.raw_scores(count, &mut args);
                    }
                }
            }
        }
    }

    /// Keeps the logits of pages, the first chunk of which is number `at` of all pages.
    fn keep_logits(&mut self, at: usize, placed: &[&Placed<'_, Chunk>]) {
        let Some(record) = &mut self.keep.record else { return };
        let PassCall { queries, group, logits, .. } = self.call;
        let query_chunks = self.masks.len() / queries;
        for (row, scores) in self.rows.scores.chunks_exact(BATCH_CHUNKS).enumerate() {
            let masks = &self.masks[row / group * query_chunks + at..];
            let pages = scores.chunks_exact(self.page_chunks).zip(masks.chunks_exact(self.page_chunks));
            for (page, (scores, masks)) in placed.iter().zip(pages) {
                let mask = masks.iter().rev().fold(0, |all, mask| all << TILE | u64::from(*mask));
                record.put(row, page, (logits, mask), scores.as_flattened());
            }
        }
    }

    /// Keeps the weights of pages.
    fn keep_weights(&mut self, placed: &[&Placed<'_, Chunk>]) {
        let Some(weights) = &mut self.keep.weights else { return };
        let shifts = self.rows.running.max.iter().map(|max| max * LN_2);
        let pieces = placed.iter().map(|page| (page.chunk, self.page_chunks));
        weights.push(0, (self.rows.scores, BATCH_CHUNKS), shifts, pieces);
    }

    /// Starts the scores with the logits that are left in the record.
    fn take_logits(&mut self, placed: &[&Placed<'_, Chunk>]) {
        let Some(record) = &mut self.keep.record else { return };
        for (row, scores) in self.rows.scores.chunks_exact_mut(BATCH_CHUNKS).enumerate() {
            for (page, scores) in placed.iter().zip(scores.chunks_exact_mut(self.page_chunks)) {
                record.get(row, page, scores.as_flattened_mut());
            }
        }
    }

    /// A step of the online softmax over `chunks` chunks, the first of which is number `at` of all pages.
    fn softmax(&mut self, at: usize, chunks: usize) {
        let Rows { scores, acc, running } = &mut self.rows;
        let (rows, PassCall { queries, group, logits, .. }) = (running.max.len(), self.call);
        let (acc_chunks, query_chunks) = (acc.len() / rows, self.masks.len() / queries);
        for (first, count) in blocks(rows) {
            let query = |row: usize| if queries == 1 { 0 } else { (first + row.min(count - 1)) / group };
            let mask = |row: usize| &self.masks[query(row) * query_chunks + at..][..chunks];
            self.kernels.softmax(SoftmaxArgs {
                scores: &mut scores[first * BATCH_CHUNKS..],
                row_chunks: BATCH_CHUNKS,
                masks: std::array::from_fn(mask),
                logits,
                max: &mut running.max[first..first + count],
                sum: &mut running.sum[first..first + count],
                acc: &mut acc[first * acc_chunks..][..count * acc_chunks],
            });
        }
    }

    fn add_sums(&mut self, pages: &[PageBytes<'_>]) {
        let Rows { scores, acc, running } = &mut self.rows;
        let rows = running.max.len();
        let sum_chunks = acc.len() / rows;
        match &mut self.value {
            Values::Packed { runs, weights } => {
                for (first, rows) in blocks(rows) {
                    let mut block = Weighted {
                        rows,
                        weights: &scores[first * BATCH_CHUNKS..],
                        row_chunks: BATCH_CHUNKS,
                        sums: &mut acc[first * sum_chunks..],
                        sum_chunks,
                    };
                    weights.add_sums(self.kernels, runs, pages, &mut block);
                }
            }
            Values::Raw { desc } => {
                for (page, tile, chunk) in live_tiles(pages, self.page_chunks) {
                    for (first, count) in blocks(rows) {
                        let mut args = RawValueArgs {
                            elem: desc.runs[0].elem,
                            page: raw_rows(page.bytes, desc, tile),
                            live: page.tile(tile),
                            weights: &scores[first * BATCH_CHUNKS + chunk..],
                            row_chunks: BATCH_CHUNKS,
                            sums: &mut acc[first * sum_chunks..][..count * sum_chunks],
                            next: page.next.wrapping_add(raw_at(desc, tile)),
                        };
                        self.kernels.raw_sums(count, &mut args);
                    }
                }
            }
        }
    }
}

/// `(page, tile, chunk of scores)` of the tiles with a live slot.
fn live_tiles<'p>(
    pages: &[PageBytes<'p>],
    page_chunks: usize,
) -> impl Iterator<Item = (PageBytes<'p>, usize, usize)> {
    let tiles = move |(i, page): (usize, &PageBytes<'p>)| {
        let page = *page;
        let live = (0..page_chunks).filter(move |tile| page.tile(*tile) != 0);
        live.map(move |tile| (page, tile, i * page_chunks + tile))
    };
    pages.iter().enumerate().flat_map(tiles)
}

/// Where the 16-bit rows of a tile begin.
fn raw_at(desc: &SideDesc, tile: usize) -> usize {
    desc.codes_at as usize + tile * desc.tile_bytes as usize
}

/// The 16-bit rows of a tile as `[token][chunk]`.
fn raw_rows<'p>(page: &'p [u8], desc: &SideDesc, tile: usize) -> &'p [[u8; 32]] {
    page[raw_at(desc, tile)..][..desc.tile_bytes as usize].as_chunks().0
}
