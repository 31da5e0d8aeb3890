//! Attention of a block of query rows over the pages of one class, through blocks of f32 that every codec has.

use crate::base::{BaseScores, Scores};
use crate::class::{Segment, SideReader, TileAt};
use crate::gemm::{Matrix, product};
use crate::job::Keep;
use crate::kernels::Kernels;
use crate::lanes::add_sums;
use crate::memory::{Chunk, bytes};
use crate::output::Partial;
use crate::received::Placed;
use crate::softmax::{Logits, Running};
use crate::top_k::Stage;
use kvrs_codec::tile::{Block, ZERO_BLOCK, scale_tokens};
use kvrs_codec::{HeadCodec, Side};

/// From this many rows on, a page is turned into two matrices: the product then reads them faster than the loops
/// over lanes do.
const PRODUCT_ROWS: usize = 16;

/// Query rows `[part][query][query head of the group]` against one class.
pub(crate) struct BlockPass<'a> {
    kernels: Option<Kernels>,
    key: SideReader<'a>,
    value: SideReader<'a>,
    /// Prepared queries `[rows][key.len]`.
    z: Vec<f32>,
    base: Option<BaseScores<'a>>,
    running: Running,
    /// Sums over stored channels `[rows][value.len]`.
    acc: Vec<f32>,
    parts: usize,
    slots: usize,
    scratch: Scratch,
}

/// Memory that every page uses anew.
struct Scratch {
    blocks: Vec<Block>,
    /// `[rows][slots]`: scores, then softmax weights.
    scores: Vec<f32>,
    /// `[rows][16]`.
    lanes: Vec<f32>,
    /// A side of a page as a matrix: keys `[channels][slots]`, values `[slots][channels]`.
    wide: Vec<f32>,
}

/// A page as the rows see it.
#[derive(Clone, Copy)]
pub(crate) struct PageAt<'a> {
    pub(crate) placed: &'a Placed<'a, Chunk>,
    /// Position of index 0.
    pub(crate) start: i64,
    /// Visible slots per query.
    pub(crate) masks: &'a [u64],
}

impl PageAt<'_> {
    fn position(&self, slot: usize) -> i64 {
        self.start + self.placed.entry.index(slot) as i64
    }

    fn tiles(&self, slots: usize) -> impl Iterator<Item = TileAt<'_>> {
        let union = self.masks.iter().fold(0, |all, mask| all | mask);
        let bytes = bytes(self.placed.entry.page());
        (0..slots / 16)
            .map(move |index| TileAt { bytes, index, live: (union >> (16 * index)) as u16 })
            .filter(|at| at.live != 0)
    }
}

impl<'a> BlockPass<'a> {
    /// Prepares `rows` queries, `read` each as `[key_dim]`.
    pub(crate) fn new(
        kernels: Option<Kernels>,
        codec: &'a HeadCodec,
        rows: usize,
        key_dim: usize,
        read: impl Fn(usize, &mut [f32]),
    ) -> Self {
        let [key, value] = [Side::Key, Side::Value].map(|side| SideReader::new(codec, side));
        let (parts, slots) = (codec.desc.heads as usize, codec.desc.slots as usize);
        let wide = rows / parts >= PRODUCT_ROWS;
        let (mut z, mut q) = (vec![0.0; rows * key.len], vec![0.0; rows * key_dim]);
        for (row, (z, q)) in z.chunks_exact_mut(key.len).zip(q.chunks_exact_mut(key_dim)).enumerate() {
            read(row, q);
            if key.is_tile() { z[..key_dim].copy_from_slice(q) } else { key.constants().prepare(q, z) }
        }
        let offset = codec.key.offset.as_ref().filter(|_| !key.is_tile());
        let base = offset.map(|offset| BaseScores::new(kernels, offset, q, (rows, slots), wide));
        let blocks = key.blocks().max(value.blocks());
        let scratch = Scratch {
            blocks: vec![ZERO_BLOCK; blocks],
            scores: vec![0.0; rows * slots],
            lanes: vec![0.0; rows * 16],
            wide: vec![0.0; if wide { blocks * 16 * slots } else { 0 }],
        };
        let (running, acc) = (Running::new(rows), vec![0.0; rows * value.len]);
        Self { kernels, key, value, z, base, running, acc, parts, slots, scratch }
    }

    /// Adds a page; `group` query heads follow each other in the rows of a query; `values`: whether they are summed.
    pub(crate) fn add_page(
        &mut self,
        page: PageAt<'_>,
        logits: Logits,
        (group, values): (usize, bool),
        keep: &mut Keep<'_>,
    ) {
        if page.masks.iter().all(|&mask| mask == 0) {
            return;
        }
        self.scratch.scores.fill(0.0);
        if let Some(base) = &mut self.base {
            let run = matches!(page.placed.entry.slots(), kvrs_core::page::Slots::Run { .. });
            let all = &mut self.scratch.scores[..];
            base.add(
                page.placed.entry.live(),
                run,
                |slot| page.position(slot),
                Scores { all, row: self.slots, at: 0 },
            );
        }
        let wide = !self.scratch.wide.is_empty();
        match keep.stage {
            Stage::Values => {}
            _ if wide => self.scores_by_product(page),
            _ => self.scores_by_lanes(page),
        }
        let rows =
            self.scratch.scores.chunks_exact_mut(self.slots).zip(self.acc.chunks_exact_mut(self.value.len));
        for (row, (scores, acc)) in rows.enumerate() {
            let mask = page.masks[row / group % page.masks.len()];
            match &mut keep.record {
                Some(record) if keep.stage == Stage::Values => record.get(row, page.placed, scores),
                Some(record) => record.put(row, page.placed, (logits, mask), scores),
                None => {}
            }
            if keep.stage != Stage::Logits {
                self.running.step(row, logits, scores, mask, acc);
            }
        }
        if keep.stage == Stage::Logits {
            return;
        }
        if let Some(weights) = &mut keep.weights {
            let (scores, chunks) = (self.scratch.scores.as_chunks().0, self.slots / 16);
            let shifts = self.running.max.iter().copied();
            weights.push(0, (scores, chunks), shifts, std::iter::once((page.placed.chunk, chunks)));
        }
        if !values {
            return;
        }
        if wide { self.sums_by_product(page) } else { self.sums_by_lanes(page) }
    }

    fn scores_by_lanes(&mut self, page: PageAt<'_>) {
        let Scratch { blocks, scores, lanes, .. } = &mut self.scratch;
        let (key, rows) = (&mut self.key, lanes.len() / 16 / self.parts);
        let blocks = &mut blocks[..key.blocks()];
        for at in page.tiles(self.slots) {
            key.load(at, |token| page.position(16 * at.index + token), blocks);
            for (part, blocks) in blocks.chunks_exact(key.part_blocks).enumerate() {
                let z = &self.z[part * rows * key.len..][..rows * key.len];
                let scores = &mut scores[part * rows * self.slots..][..rows * self.slots];
                for &segment in &key.segments {
                    let lanes = &mut lanes[..rows * 16];
                    lanes.fill(0.0);
                    let channels = blocks[segment.block..][..segment.blocks].as_flattened();
                    add_sums(self.kernels, z, (key.len, segment.at), channels, lanes, (16, 0));
                    add_scaled(
                        lanes,
                        key.scales(at, segment).unwrap_or([1.0; 16]),
                        scores,
                        self.slots,
                        at.index,
                    );
                }
            }
        }
    }

    fn sums_by_lanes(&mut self, page: PageAt<'_>) {
        let Scratch { blocks, scores, lanes, .. } = &mut self.scratch;
        let (value, rows) = (&mut self.value, lanes.len() / 16 / self.parts);
        let blocks = &mut blocks[..value.blocks()];
        for at in page.tiles(self.slots) {
            value.load(at, |token| page.position(16 * at.index + token), blocks);
            for (part, blocks) in blocks.chunks_exact(value.part_blocks).enumerate() {
                let acc = &mut self.acc[part * rows * value.len..][..rows * value.len];
                let scores = &scores[part * rows * self.slots..][..rows * self.slots];
                for &segment in &value.segments {
                    let lanes = &mut lanes[..rows * 16];
                    let scales = value.scales(at, segment).unwrap_or([1.0; 16]);
                    take_scaled(scores, self.slots, at.index, scales, lanes);
                    for (b, block) in blocks[segment.block..][..segment.blocks].iter().enumerate() {
                        add_sums(self.kernels, lanes, (16, 0), block, acc, (value.len, segment.at + 16 * b));
                    }
                }
            }
        }
    }

    fn scores_by_product(&mut self, page: PageAt<'_>) {
        let Scratch { blocks, scores, wide, .. } = &mut self.scratch;
        let (key, slots, rows) = (&mut self.key, self.slots, scores.len() / self.slots / self.parts);
        let (blocks, part_len) = (&mut blocks[..key.blocks()], key.part_blocks * 16 * slots);
        wide.fill(0.0);
        for at in page.tiles(slots) {
            key.load(at, |token| page.position(16 * at.index + token), blocks);
            scale_blocks(key, at, blocks);
            for (channel, lanes) in blocks.as_flattened().iter().enumerate() {
                wide[channel * slots + 16 * at.index..][..16].copy_from_slice(lanes);
            }
        }
        for part in 0..self.parts {
            let z = &self.z[part * rows * key.len..][..rows * key.len];
            let scores = &mut scores[part * rows * slots..][..rows * slots];
            for segment in &key.segments {
                let keys = &wide[part * part_len + 16 * segment.block * slots..];
                let (a, b) = (Matrix::rows(&z[segment.at..], key.len), Matrix::rows(keys, slots));
                product([rows, 16 * segment.blocks, slots], a, b, 1.0, scores, slots);
            }
        }
    }

    fn sums_by_product(&mut self, page: PageAt<'_>) {
        let Scratch { blocks, scores, wide, .. } = &mut self.scratch;
        let (value, slots, rows) = (&mut self.value, self.slots, scores.len() / self.slots / self.parts);
        let (blocks, channels) = (&mut blocks[..value.blocks()], 16 * value.part_blocks);
        wide.fill(0.0);
        for at in page.tiles(slots) {
            value.load(at, |token| page.position(16 * at.index + token), blocks);
            scale_blocks(value, at, blocks);
            for (b, block) in blocks.iter().enumerate() {
                let (part, b) = (b / value.part_blocks, b % value.part_blocks);
                for (token, lanes) in block.iter().enumerate() {
                    let row = part * slots + 16 * at.index + token;
                    wide[row * channels + 16 * b..][..16].copy_from_slice(lanes);
                }
            }
        }
        for part in 0..self.parts {
            let weights = Matrix::rows(&scores[part * rows * slots..], slots);
            let acc = &mut self.acc[part * rows * value.len..][..rows * value.len];
            for segment in &value.segments {
                let values = Matrix::rows(&wide[part * slots * channels + 16 * segment.block..], channels);
                let extents = [rows, slots, 16 * segment.blocks];
                product(extents, weights, values, 1.0, &mut acc[segment.at..], value.len);
            }
        }
    }

    /// Adds what was seen to `partial`: outputs synthesised, means added, before anything is merged.
    pub(crate) fn finish(self, partial: &mut Partial, dim: usize) {
        let mut out = vec![0.0; dim];
        for (row, acc) in self.acc.chunks_exact(self.value.len).enumerate() {
            let (max, sum) = (self.running.max[row], self.running.sum[row]);
            if dim == 0 {
                // Nothing was summed.
            } else if self.value.is_tile() {
                out.copy_from_slice(&acc[..dim]);
            } else {
                out.fill(0.0);
                self.value.constants().finish(acc, sum, &mut out);
            }
            partial.add(row, max, sum, &out);
        }
    }
}

/// `scores[row][16 tile + lane] += lanes[row][lane] * scales[lane]`.
fn add_scaled(lanes: &[f32], scales: [f32; 16], scores: &mut [f32], slots: usize, tile: usize) {
    for (scores, lanes) in scores.chunks_exact_mut(slots).zip(lanes.as_chunks::<16>().0) {
        for ((s, x), scale) in scores[16 * tile..][..16].iter_mut().zip(lanes).zip(scales) {
            *s += x * scale;
        }
    }
}

/// `lanes[row][lane] = weights[row][16 tile + lane] * scales[lane]`.
fn take_scaled(weights: &[f32], slots: usize, tile: usize, scales: [f32; 16], lanes: &mut [f32]) {
    for (weights, lanes) in weights.chunks_exact(slots).zip(lanes.as_chunks_mut::<16>().0) {
        for ((x, w), scale) in lanes.iter_mut().zip(&weights[16 * tile..][..16]).zip(scales) {
            *x = w * scale;
        }
    }
}

/// Applies the scales that the loops over lanes apply after their sums.
fn scale_blocks(side: &SideReader<'_>, at: TileAt<'_>, blocks: &mut [Block]) {
    for &segment in &side.segments {
        let Some(scales) = side.scales(at, segment) else { continue };
        let Segment { block, blocks: count, .. } = segment;
        blocks[block..block + count].iter_mut().for_each(|block| scale_tokens(side.side, block, &scales));
    }
}
