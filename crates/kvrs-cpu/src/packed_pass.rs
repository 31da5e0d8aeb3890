//! Attention of a block of query rows over the pages of a class that integer and 16-bit kernels take.

use crate::base::{BaseScores, Scores};
use crate::digits::{QueryDigits, WeightDigits};
use crate::kernels::{Kernels, blocks};
use crate::memory::Chunk;
use crate::output::Partial;
use crate::packed::{PackedRun, runs_of, token_scales};
use crate::simd::codes::Codes;
use crate::simd::lines::Lines;
use crate::simd::prepare::WeightArgs;
use crate::simd::raw::{RawKeyArgs, RawValueArgs};
use crate::simd::softmax::SoftmaxArgs;
use crate::softmax::{Logits, Running};
use kvrs_codec::desc::NONE;
use kvrs_codec::tile::scales_apart;
use kvrs_codec::{HeadCodec, Side, SideDesc};
use kvrs_core::page::{Entry, Slots};

/// Chunks of 16 slots between two steps of the online softmax: more would leave the first-level cache, fewer would
/// pay the latency of its horizontal steps more often.
pub(crate) const BATCH_CHUNKS: usize = 8;

/// Memory that every pass uses anew.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    key_runs: Vec<PackedRun>,
    value_runs: Vec<PackedRun>,
    /// Prepared queries `[row][chunk]`.
    z: Lines,
    queries: QueryDigits,
    weights: WeightDigits,
    /// `[row][BATCH_CHUNKS]`: scores, then softmax weights.
    scores: Lines,
    /// `[query][BATCH_CHUNKS]`.
    masks: Vec<[u16; BATCH_CHUNKS]>,
    /// Sums over stored channels `[row][chunk]`.
    acc: Lines,
    running: Running,
    q: Vec<f32>,
    out: Vec<f32>,
}

/// A page of a table.
#[derive(Clone, Copy)]
pub(crate) struct PageRef<'a> {
    pub(crate) entry: &'a Entry<Chunk>,
    pub(crate) bytes: &'a [u8],
}

/// What a batch's pages share.
#[derive(Clone, Copy)]
pub(crate) struct PassCall {
    pub(crate) logits: Logits,
    /// Query heads that follow each other in the rows of a query.
    pub(crate) group: usize,
    pub(crate) queries: usize,
    /// Position of index 0.
    pub(crate) start: i64,
}

/// Query rows `[query][query head of the group]` against one class.
pub(crate) struct PackedPass<'a> {
    kernels: Kernels,
    codec: &'a HeadCodec,
    rows: usize,
    base: Option<BaseScores<'a>>,
    w: &'a mut Workspace,
}

/// Whether the kernels for packed and 16-bit pages serve both sides of a class; its runs stay in the workspace.
fn served(codec: &HeadCodec, w: &mut Workspace) -> bool {
    let one_head = codec.desc.heads == 1;
    one_head
        && served_side(codec, Side::Key, &mut w.key_runs)
        && served_side(codec, Side::Value, &mut w.value_runs)
}

fn served_side(codec: &HeadCodec, side: Side, runs: &mut Vec<PackedRun>) -> bool {
    let (desc, constants) = codec.side(side);
    is_raw(desc) || runs_of(desc, constants, runs)
}

/// One run of 16-bit rows without scales.
fn is_raw(desc: &SideDesc) -> bool {
    scales_apart(desc) && matches!(&desc.runs[..], [run] if run.width == 16 && run.scale == NONE)
}

impl<'a> PackedPass<'a> {
    /// Prepares `rows` queries, `read` each as `[key_dim]`; `None` if the class needs the path over blocks.
    pub(crate) fn new(
        kernels: Kernels,
        codec: &'a HeadCodec,
        w: &'a mut Workspace,
        (rows, key_dim): (usize, usize),
        read: impl Fn(usize, &mut [f32]),
    ) -> Option<Self> {
        if !served(codec, w) {
            return None;
        }
        let [key_chunks, value_chunks] =
            [&codec.desc.key, &codec.desc.value].map(|desc| desc.vec_len as usize / 16);
        w.z.chunks(rows * key_chunks);
        w.q.resize(rows * key_dim, 0.0);
        for (row, (z, q)) in w.z.chunks_exact_mut(key_chunks).zip(w.q.chunks_exact_mut(key_dim)).enumerate() {
            read(row, q);
            kernels.prepare(&codec.key, q, z);
        }
        if !is_raw(&codec.desc.key) {
            w.queries.prepare(kernels, &w.key_runs, &w.z, rows);
        }
        w.scores.chunks(rows * BATCH_CHUNKS);
        w.acc.chunks(rows * value_chunks).fill([0.0; 16]);
        w.running.reset(rows);
        let offset = codec.key.offset.as_ref();
        let slots = codec.desc.slots as usize;
        let base =
            offset.map(|offset| BaseScores::new(Some(kernels), offset, w.q.clone(), (rows, slots), false));
        Some(Self { kernels, codec, rows, base, w })
    }

    /// Pages that one call of [`Self::add_batch`] takes.
    pub(crate) fn batch_pages(&self) -> usize {
        16 * BATCH_CHUNKS / self.codec.desc.slots as usize
    }

    /// Adds the pages from `first` on, as many as `masks` `[page][query]` tells what the queries see of: up to
    /// [`Self::batch_pages`].
    pub(crate) fn add_batch(&mut self, call: PassCall, pages: &[PageRef<'_>], first: usize, masks: &[u64]) {
        let queries = call.queries;
        let count = masks.len() / queries;
        let chunks = self.chunk(count);
        self.w.scores.chunks_exact_mut(BATCH_CHUNKS).for_each(|row| row[..chunks].fill([0.0; 16]));
        self.set_masks(masks, queries);
        let page = |i: usize| {
            let live = masks[i * queries..][..queries].iter().fold(0, |all, mask| all | mask);
            let bytes = pages[first + i].bytes;
            let next = pages.get(first + i + 1).map_or(bytes, |page| page.bytes).as_ptr();
            PageBytes { bytes, live, next }
        };
        for i in 0..count {
            self.add_base(call, pages[first + i].entry, self.chunk(i));
            self.add_scores(page(i), self.chunk(i));
        }
        self.softmax(call, count);
        for i in 0..count {
            self.add_sums(page(i), self.chunk(i));
        }
    }

    /// First chunk of page `i` of a batch.
    fn chunk(&self, i: usize) -> usize {
        i * self.codec.desc.slots as usize / 16
    }

    fn set_masks(&mut self, masks: &[u64], queries: usize) {
        let chunks = self.codec.desc.slots as usize / 16;
        self.w.masks.resize(queries, [0; BATCH_CHUNKS]);
        for (query, to) in self.w.masks.iter_mut().enumerate() {
            for (to, &mask) in to.chunks_exact_mut(chunks).zip(masks[query..].iter().step_by(queries)) {
                to.copy_from_slice(&tiles(mask)[..chunks]);
            }
        }
    }

    fn add_base(&mut self, call: PassCall, entry: &Entry<Chunk>, chunk: usize) {
        let Some(base) = &mut self.base else { return };
        let run = matches!(entry.slots(), Slots::Run { .. });
        let position = |slot: usize| call.start + entry.index(slot) as i64;
        let all = self.w.scores.as_flattened_mut();
        base.add(entry.live(), run, position, Scores { all, row: 16 * BATCH_CHUNKS, at: 16 * chunk });
    }

    fn add_scores(&mut self, page: PageBytes<'_>, chunk: usize) {
        let (desc, slots) = (&self.codec.desc.key, self.codec.desc.slots as usize);
        let Workspace { queries, scores, key_runs, z, .. } = &mut *self.w;
        if is_raw(desc) {
            let chunks = desc.n as usize / 16;
            for (tile, (first, count)) in page.blocks(self.rows) {
                let mut args = RawKeyArgs {
                    elem: desc.runs[0].elem,
                    page: raw_rows(page.bytes, desc, tile),
                    query: &z[first * chunks..][..count * chunks],
                    scores: &mut scores[first * BATCH_CHUNKS + chunk + tile..],
                    row_chunks: BATCH_CHUNKS,
                    next: page.next.wrapping_add(raw_at(desc, tile)),
                };
                self.kernels.raw_scores(count, &mut args);
            }
            return;
        }
        for (i, run) in key_runs.iter().enumerate() {
            let at = (page.codes(desc, run), token_scales(page.bytes, desc, slots, run.scale));
            queries.add_scores(self.kernels, (i, run), at, (&mut scores[chunk..], BATCH_CHUNKS), self.rows);
        }
    }

    fn softmax(&mut self, call: PassCall, pages: usize) {
        let chunks = self.chunk(pages);
        let acc_chunks = self.w.acc.len() / self.rows;
        let Workspace { scores, masks, acc, running, .. } = &mut *self.w;
        for (first, count) in blocks(self.rows) {
            let mask =
                |row: usize| &masks[(first + row.min(count - 1)) / call.group % call.queries][..chunks];
            self.kernels.softmax(SoftmaxArgs {
                scores: &mut scores[first * BATCH_CHUNKS..],
                row_chunks: BATCH_CHUNKS,
                masks: std::array::from_fn(mask),
                logits: call.logits,
                max: &mut running.max[first..first + count],
                sum: &mut running.sum[first..first + count],
                acc: &mut acc[first * acc_chunks..][..count * acc_chunks],
            });
        }
    }

    fn add_sums(&mut self, page: PageBytes<'_>, chunk: usize) {
        let (desc, slots) = (&self.codec.desc.value, self.codec.desc.slots as usize);
        let Workspace { weights, scores, value_runs, acc, .. } = &mut *self.w;
        let acc_chunks = acc.len() / self.rows;
        let live = tiles(page.live);
        if is_raw(desc) {
            for (tile, (first, count)) in page.blocks(self.rows) {
                let mut args = RawValueArgs {
                    elem: desc.runs[0].elem,
                    page: raw_rows(page.bytes, desc, tile),
                    live: live[tile],
                    weights: &scores[first * BATCH_CHUNKS + chunk + tile..],
                    row_chunks: BATCH_CHUNKS,
                    sums: &mut acc[first * acc_chunks..][..count * acc_chunks],
                    next: page.next.wrapping_add(raw_at(desc, tile)),
                };
                self.kernels.raw_sums(count, &mut args);
            }
            return;
        }
        weights.turn_page();
        for run in value_runs.iter() {
            weights.prepare(self.kernels, run, self.rows, |first| WeightArgs {
                weights: &scores[first * BATCH_CHUNKS + chunk..],
                row_chunks: BATCH_CHUNKS,
                token_scales: token_scales(page.bytes, desc, slots, run.scale),
                live: &live[..slots / 16],
            });
            weights.add_sums(self.kernels, run, page.codes(desc, run), (acc, acc_chunks), self.rows);
        }
    }

    /// Adds what was seen to `partial`: outputs synthesised, means added, before anything is merged.
    pub(crate) fn finish(self, partial: &mut Partial, dim: usize) {
        let Workspace { acc, running, out, .. } = &mut *self.w;
        out.resize(dim, 0.0);
        let chunks = acc.len() / self.rows;
        for (row, acc) in acc.chunks_exact_mut(chunks).enumerate() {
            out.fill(0.0);
            self.kernels.finish(&self.codec.value, acc, running.sum[row], out);
            partial.add(row, running.max[row], running.sum[row], out);
        }
    }
}

/// A page with what its reader must know.
#[derive(Clone, Copy)]
struct PageBytes<'p> {
    bytes: &'p [u8],
    /// Slots that some query sees.
    live: u64,
    /// Where the next page begins.
    next: *const u8,
}

impl<'p> PageBytes<'p> {
    /// Tiles with a live slot, each with the blocks of `rows` rows.
    fn blocks(&self, rows: usize) -> impl Iterator<Item = (usize, (usize, usize))> + use<> {
        let live = tiles(self.live);
        let tiles = (0..4).filter(move |tile| live[*tile] != 0);
        tiles.flat_map(move |tile| blocks(rows).map(move |block| (tile, block)))
    }

    /// The codes of a run; packed pages have 64 slots.
    fn codes(&self, desc: &SideDesc, run: &PackedRun) -> Codes<'p> {
        let at = desc.codes_at as usize + run.at;
        let scales = if run.scale == NONE { 0 } else { 128 * run.scale as usize };
        let [a, b, c, d] = tiles(self.live).map(|tile| u8::from(tile != 0));
        Codes {
            bytes: &self.bytes[at..],
            stride: desc.tile_bytes as usize,
            len: run.len,
            tiles: a | b << 1 | c << 2 | d << 3,
            next: self.next.wrapping_add(at),
            next_scales: self.next.wrapping_add(desc.scales_at as usize + scales),
        }
    }
}

/// The slots of the four tiles of a page.
fn tiles(slots: u64) -> [u16; 4] {
    [slots as u16, (slots >> 16) as u16, (slots >> 32) as u16, (slots >> 48) as u16]
}

/// Where the 16-bit rows of a tile begin.
fn raw_at(desc: &SideDesc, tile: usize) -> usize {
    desc.codes_at as usize + tile * desc.tile_bytes as usize
}

/// The 16-bit rows of a tile as `[token][chunk]`.
fn raw_rows<'p>(page: &'p [u8], desc: &SideDesc, tile: usize) -> &'p [[u8; 32]] {
    page[raw_at(desc, tile)..][..desc.tile_bytes as usize].as_chunks().0
}
