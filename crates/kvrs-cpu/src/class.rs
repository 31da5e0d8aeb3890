//! One class of pages during an attention call: what is prepared once and used by every page.

use crate::lanes::Lanes;
use kvrs_codec::desc::NONE;
use kvrs_codec::tile::{Block, Levels, Tile, ZERO_BLOCK, scales_apart};
use kvrs_codec::{HeadCodec, Path, Side, SideCodec, SideDesc};

/// Neighbouring blocks whose sums meet one slice of the prepared vector and share a per-token scale.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// First block.
    pub(crate) block: usize,
    /// Number of blocks.
    pub(crate) blocks: usize,
    /// First element in the prepared vector.
    pub(crate) at: usize,
    /// Index of the scale to apply after the sum, or [`NONE`].
    pub(crate) scale: u32,
}

/// A side of a class, ready to load tiles as blocks.
#[derive(Debug)]
pub(crate) struct SideReader<'a> {
    codec: &'a HeadCodec,
    pub(crate) side: Side,
    levels: Levels,
    pub(crate) segments: Vec<Segment>,
    /// Length of a prepared vector, a multiple of 16 on the Tile path.
    pub(crate) len: usize,
    /// Blocks of one part.
    pub(crate) part_blocks: usize,
    stored: Vec<Block>,
    vectors: Vec<f32>,
}

/// Where a tile is: bytes of its page, number, and tokens that take part.
#[derive(Clone, Copy)]
pub(crate) struct TileAt<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) index: usize,
    pub(crate) live: u16,
}

impl<'a> SideReader<'a> {
    pub(crate) fn new(codec: &'a HeadCodec, side: Side) -> Self {
        let (desc, constants) = codec.side(side);
        let tile = desc.path == Path::Tile;
        let part_blocks = if tile { desc.d.div_ceil(16) } else { desc.n / 16 } as usize;
        let (stored, vectors) = if tile { (desc.n / 16, 16 * desc.parts * desc.d) } else { (0, 0) };
        Self {
            codec,
            side,
            levels: Levels::new(desc, constants),
            segments: if tile { whole(part_blocks) } else { runs(desc) },
            len: if tile { 16 * part_blocks } else { desc.vec_len as usize },
            part_blocks,
            stored: vec![ZERO_BLOCK; stored as usize],
            vectors: vec![0.0; vectors as usize],
        }
    }

    pub(crate) fn constants(&self) -> &'a SideCodec {
        self.codec.side(self.side).1
    }

    fn desc(&self) -> &'a SideDesc {
        self.codec.desc.side(self.side)
    }

    pub(crate) fn is_tile(&self) -> bool {
        self.desc().path == Path::Tile
    }

    /// Blocks of all parts.
    pub(crate) fn blocks(&self) -> usize {
        self.part_blocks * self.desc().parts as usize
    }

    fn tile<'b>(&'b self, at: TileAt<'b>) -> Tile<'b> {
        let TileAt { bytes, index, .. } = at;
        Tile { page: &self.codec.desc, side: self.side, levels: &self.levels, bytes, index }
    }

    /// Loads the blocks of all parts; `position` of a token of the tile is asked on the Tile path only.
    ///
    /// Rows of values outside `at.live` are zero, so that whatever their bytes hold enters no sum.
    pub(crate) fn load(&mut self, at: TileAt<'_>, position: impl Fn(usize) -> i64, out: &mut [Block]) {
        if self.is_tile() {
            self.rebuild(at, position, out);
        } else if scales_apart(self.desc()) {
            self.tile(at).units(out);
        } else {
            self.tile(at).stored(out);
        }
        if self.side == Side::Value && at.live != u16::MAX {
            for block in out {
                for (t, row) in block.iter_mut().enumerate() {
                    if at.live >> t & 1 == 0 {
                        *row = [0.0; 16];
                    }
                }
            }
        }
    }

    fn rebuild(&mut self, at: TileAt<'_>, position: impl Fn(usize) -> i64, out: &mut [Block]) {
        let (mut stored, mut vectors) = (std::mem::take(&mut self.stored), std::mem::take(&mut self.vectors));
        self.tile(at).rebuild(self.constants(), at.live, position, &mut stored, &mut vectors);
        let (d, width) = (self.desc().d as usize, vectors.len() / 16);
        for (part, blocks) in out.chunks_exact_mut(self.part_blocks).enumerate() {
            for (token, row) in vectors.chunks_exact(width).enumerate() {
                for (c, &x) in row[part * d..(part + 1) * d].iter().enumerate() {
                    let block = &mut blocks[c / 16];
                    *if self.side == Side::Key {
                        &mut block[c % 16][token]
                    } else {
                        &mut block[token][c % 16]
                    } = x;
                }
            }
        }
        (self.stored, self.vectors) = (stored, vectors);
    }

    /// The scales to apply after the sums of a segment; 0 for tokens outside `at.live`.
    pub(crate) fn scales(&self, at: TileAt<'_>, segment: Segment) -> Option<Lanes> {
        (segment.scale != NONE).then(|| {
            let scales = self.tile(at).token_scales(segment.scale);
            std::array::from_fn(|t| if at.live >> t & 1 == 1 { scales[t] } else { 0.0 })
        })
    }
}

fn whole(blocks: usize) -> Vec<Segment> {
    vec![Segment { block: 0, blocks, at: 0, scale: NONE }]
}

fn runs(desc: &SideDesc) -> Vec<Segment> {
    let apart = scales_apart(desc);
    let mut block = 0;
    let segment = |run: &kvrs_codec::RunDesc| {
        let blocks = run.channels as usize / 16;
        block += blocks;
        let scale = if apart { run.scale } else { NONE };
        Segment { block: block - blocks, blocks, at: run.vec_at as usize, scale }
    };
    desc.runs.iter().map(segment).collect()
}
