//! What the bytes of a tile mean: stored values, and the vectors that are rebuilt from them.
//!
//! Values stand in blocks of 16 rows by 16 lanes, lanes being what is not summed: for keys a row is a channel
//! and a lane a token, for values a row is a token and a lane a channel.

use crate::codec::{HeadCodec, SideCodec};
use crate::desc::{Elem, Inner, MAX_CHANNELS, PageDesc, Path, RunDesc, Side, SideDesc, TILE, tile_ops};
use crate::layout::{read_16, run_range, unpack_cells};
use half::f16;

/// 16 rows of 16 lanes.
pub type Block = [[f32; 16]; 16];

/// A block of zeros.
pub const ZERO_BLOCK: Block = [[0.0; 16]; 16];

/// The values of all codes of a side before scales: `(elem(code) + zero) * step`, per run.
#[derive(Debug, Clone)]
pub struct Levels(Vec<[f32; 256]>);

impl Levels {
    /// The values of every code of every run; those of 16-bit runs stay zero.
    #[must_use]
    pub fn new(desc: &SideDesc, codec: &SideCodec) -> Self {
        Self(desc.runs.iter().map(|run| run_levels(run, codec)).collect())
    }

    /// The values `[run][code]`.
    #[must_use]
    pub fn of_runs(&self) -> &[[f32; 256]] {
        &self.0
    }
}

fn run_levels(run: &RunDesc, codec: &SideCodec) -> [f32; 256] {
    let mut levels = [0.0; 256];
    if run.width <= 8 {
        for (code, level) in levels[..1 << run.width].iter_mut().enumerate() {
            *level = (element(run, codec, code) + run.zero) * run.step;
        }
    }
    levels
}

fn element(run: &RunDesc, codec: &SideCodec, code: usize) -> f32 {
    match run.elem {
        Elem::Lut8 => f32::from(codec.lut8[run.lut_at as usize + code]),
        Elem::Lut32 => codec.lut32[run.lut_at as usize + code],
        Elem::Int => code as f32,
        Elem::E4m3 => e4m3(code as u8),
        Elem::E5m2 => f16::from_bits((code as u16) << 8).to_f32(),
        Elem::F16 | Elem::Bf16 => unreachable!("16-bit runs have no codes"),
    }
}

/// The value of an 8-bit float with 4 exponent bits and no infinities (`Micikevicius` et al., 2022,
/// arXiv:2209.05433).
#[must_use]
pub fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Whether per-token scales may be applied after the sum over a run instead of to every value.
#[must_use]
pub fn scales_apart(desc: &SideDesc) -> bool {
    desc.path == Path::Dot && desc.inner == Inner::None && desc.sparse_per_tile == 0
}

/// One side of one tile of a page.
#[derive(Debug, Clone, Copy)]
pub struct Tile<'a> {
    /// Layout of the page.
    pub page: &'a PageDesc,
    /// Keys or values.
    pub side: Side,
    /// Values of the codes.
    pub levels: &'a Levels,
    /// Bytes of the page.
    pub bytes: &'a [u8],
    /// Tile of the page.
    pub index: usize,
}

impl<'a> Tile<'a> {
    fn desc(&self) -> &'a SideDesc {
        self.page.side(self.side)
    }

    fn half(&self, at: usize) -> f32 {
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32()
    }

    /// Per-token scales `index` of the 16 tokens.
    ///
    /// # Panics
    /// If the page is shorter than its descriptor says.
    #[must_use]
    pub fn token_scales(&self, index: u32) -> [f32; 16] {
        let slot = index as usize * self.page.slots as usize + self.index * TILE;
        let bytes = self.bytes[self.desc().scales_at as usize + 2 * slot..].first_chunk();
        read_16(Elem::F16, bytes.expect("scales lie inside the page"))
    }

    /// Values of all blocks before scales: `(elem(code) + zero) * step`.
    ///
    /// # Panics
    /// If `out` is not one block per 16 stored channels.
    pub fn units(&self, out: &mut [Block]) {
        assert_eq!(out.len() * 16, self.desc().n as usize, "one block per 16 channels");
        let mut rest = out;
        for (run, levels) in self.desc().runs.iter().zip(&self.levels.0) {
            let (blocks, later) = rest.split_at_mut(run.channels as usize / 16);
            let bytes = &self.bytes[run_range(self.page, self.side, run, self.index)];
            if run.width == 16 {
                rows_to_blocks(self.side, run, bytes, blocks);
            } else {
                codes_to_blocks(run, levels, bytes, blocks);
            }
            rest = later;
        }
    }

    /// Stored values of all blocks: scales and sparse differences applied.
    ///
    /// # Panics
    /// If `out` is not one block per 16 stored channels.
    pub fn stored(&self, out: &mut [Block]) {
        self.units(out);
        let mut first = 0;
        for run in &self.desc().runs {
            let blocks = &mut out[first..first + run.channels as usize / 16];
            if run.scale != crate::desc::NONE {
                let scales = self.token_scales(run.scale);
                for block in blocks.iter_mut() {
                    scale_tokens(self.side, block, &scales);
                }
            }
            first += blocks.len();
        }
        self.apply_inner(out);
        self.apply_sparse(out);
    }

    fn apply_inner(&self, out: &mut [Block]) {
        let desc = self.desc();
        let (n, block_size) = (desc.n as usize, desc.block as usize);
        let pair = |index: usize| {
            let at = desc.inner_at as usize + 4 * index;
            (self.half(at), self.half(at + 2))
        };
        for (b, block) in out.iter_mut().enumerate() {
            for (r, row) in block.iter_mut().enumerate() {
                let index = match desc.inner {
                    Inner::None => return,
                    Inner::GroupChannel => self.index * TILE / block_size * n + 16 * b + r,
                    Inner::TokenBlock => {
                        (self.index * TILE + r) * n.div_ceil(block_size) + 16 * b / block_size
                    }
                };
                let (scale, minimum) = pair(index);
                for x in row {
                    *x = *x * scale + minimum;
                }
            }
        }
    }

    fn apply_sparse(&self, out: &mut [Block]) {
        let desc = self.desc();
        let per_tile = desc.sparse_per_tile as usize;
        for i in 0..per_tile {
            let at = desc.sparse_at as usize + 4 * (self.index * per_tile + i);
            let place = usize::from(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]));
            let (token, channel) = (place / 0x400, place % 0x400);
            if token < TILE && channel < desc.n as usize {
                let block = &mut out[channel / 16];
                match self.side {
                    Side::Key => block[channel % 16][token] += self.half(at + 2),
                    Side::Value => block[token][channel % 16] += self.half(at + 2),
                }
            }
        }
    }

    /// Rebuilds the vectors `[16][parts * d]` of the live tokens; the others become zero.
    ///
    /// Matrix, mean, rotary embedding and key offset are applied: the rows are what the page stands for.
    ///
    /// # Panics
    /// If `blocks` is not one block per 16 stored channels or `out` not 16 rows.
    pub fn rebuild(
        &self,
        codec: &SideCodec,
        live: u16,
        position: impl Fn(usize) -> i64,
        blocks: &mut [Block],
        out: &mut [f32],
    ) {
        let desc = self.desc();
        let width = (desc.parts * desc.d) as usize;
        self.stored(blocks);
        let mut acc = [0.0; MAX_CHANNELS];
        let acc = &mut acc[..if desc.path == Path::Dot { desc.vec_len } else { desc.n } as usize];
        for (token, row) in out.chunks_exact_mut(width).enumerate() {
            row.fill(0.0);
            if live >> token & 1 == 1 {
                self.gather(blocks, token, acc);
                synthesise(desc, codec, acc, row);
                turn(desc, codec, position(token), row);
            }
        }
    }

    /// The stored channels of one token, in the order of the prepared vector.
    fn gather(&self, blocks: &[Block], token: usize, acc: &mut [f32]) {
        acc.fill(0.0);
        let mut first = 0;
        for run in &self.desc().runs {
            let channels = run.channels as usize;
            let at = if self.desc().path == Path::Dot { run.vec_at as usize } else { first };
            for (c, x) in acc[at..at + channels].iter_mut().enumerate() {
                let (block, inside) = (&blocks[(first + c) / 16], (first + c) % 16);
                *x += if self.side == Side::Key { block[inside][token] } else { block[token][inside] };
            }
            first += channels;
        }
    }
}

fn synthesise(desc: &SideDesc, codec: &SideCodec, acc: &[f32], row: &mut [f32]) {
    if desc.path == Path::Dot || desc.tile_ops & tile_ops::MATRIX != 0 {
        codec.finish(acc, 1.0, row);
        return;
    }
    row.copy_from_slice(&acc[..row.len()]);
    if let Some(mean) = &codec.mean {
        row.iter_mut().zip(mean.iter()).for_each(|(x, m)| *x += m);
    }
}

fn turn(desc: &SideDesc, codec: &SideCodec, position: i64, row: &mut [f32]) {
    for part in row.chunks_exact_mut(desc.d as usize) {
        if desc.tile_ops & tile_ops::ROPE != 0 {
            codec.rope.as_ref().expect("tiles that turn have phasors").rotate(position, part);
        }
        if let Some(offset) = &codec.offset {
            offset.add(position, part);
        }
    }
}

/// Multiplies every value of a block with the scale of its token.
pub fn scale_tokens(side: Side, block: &mut Block, scales: &[f32; 16]) {
    for (row, &scale) in block.iter_mut().zip(scales) {
        match side {
            Side::Key => row.iter_mut().zip(scales).for_each(|(x, s)| *x *= s),
            Side::Value => row.iter_mut().for_each(|x| *x *= scale),
        }
    }
}

fn codes_to_blocks(run: &RunDesc, levels: &[f32; 256], bytes: &[u8], blocks: &mut [Block]) {
    let mut cells = [[0; 64]; 4];
    for (b, block) in blocks.iter_mut().enumerate() {
        unpack_cells(run.width, bytes, b, run.channels as usize, &mut cells);
        for (field, rows) in cells.iter().zip(block.as_chunks_mut::<4>().0) {
            for (lane, codes) in field.as_chunks::<4>().0.iter().enumerate() {
                for (row, &code) in rows.iter_mut().zip(codes) {
                    row[lane] = levels[usize::from(code)];
                }
            }
        }
    }
}

fn rows_to_blocks(side: Side, run: &RunDesc, bytes: &[u8], blocks: &mut [Block]) {
    let words = bytes.as_chunks::<32>().0; // 16 channels of a token each, token-major
    for (token, words) in words.chunks_exact(blocks.len()).enumerate() {
        for (block, word) in blocks.iter_mut().zip(words) {
            let row = read_16(run.elem, word);
            match side {
                Side::Value => block[token] = row,
                Side::Key => block.iter_mut().zip(row).for_each(|(lanes, x)| lanes[token] = x),
            }
        }
    }
}

/// Decodes one slot of a page for part `head`: what is stored, key offset and value mean included.
///
/// # Panics
/// If the slot or the part is outside the page, or `out` is not `[d]`.
pub fn decode_slot(
    codec: &HeadCodec,
    side: Side,
    page_bytes: &[u8],
    slot: usize,
    position: i64,
    head: usize,
    out: &mut [f32],
) {
    let (desc, constants) = codec.side(side);
    let (d, width) = (desc.d as usize, (desc.parts * desc.d) as usize);
    assert!(slot < codec.desc.slots as usize, "slot {slot} inside the page");
    let levels = Levels::new(desc, constants);
    let tile = Tile { page: &codec.desc, side, levels: &levels, bytes: page_bytes, index: slot / TILE };
    let (mut blocks, mut rows) = (vec![ZERO_BLOCK; desc.n as usize / 16], vec![0.0; TILE * width]);
    tile.rebuild(constants, 1 << (slot % TILE), |_| position, &mut blocks, &mut rows);
    out.copy_from_slice(&rows[slot % TILE * width + head * d..][..d]);
}

/// Decodes the slots `live` of a page for part `head`, ascending, as [`decode_slot`] does each: appends `[slots][d]` to
/// `out`.
///
/// # Panics
/// If a slot or the part is outside the page.
pub fn decode_live(
    (codec, side, head): (&HeadCodec, Side, usize),
    page_bytes: &[u8],
    live: u64,
    position: impl Fn(usize) -> i64,
    out: &mut Vec<f32>,
) {
    let (desc, constants) = codec.side(side);
    let (d, width) = (desc.d as usize, (desc.parts * desc.d) as usize);
    assert!(live == 0 || live.ilog2() < codec.desc.slots, "slots {live:#x} inside the page");
    out.reserve(live.count_ones() as usize * d);
    let levels = Levels::new(desc, constants);
    let (mut blocks, mut rows) = (vec![ZERO_BLOCK; desc.n as usize / 16], vec![0.0; TILE * width]);
    for index in 0..codec.desc.slots as usize / TILE {
        let live = (live >> (TILE * index)) as u16;
        if live == 0 {
            continue;
        }
        let tile = Tile { page: &codec.desc, side, levels: &levels, bytes: page_bytes, index };
        tile.rebuild(constants, live, |token| position(TILE * index + token), &mut blocks, &mut rows);
        for (_, row) in rows.chunks_exact(width).enumerate().filter(|(token, _)| live >> token & 1 == 1) {
            out.extend_from_slice(&row[head * d..][..d]);
        }
    }
}

#[cfg(test)]
mod tests;
