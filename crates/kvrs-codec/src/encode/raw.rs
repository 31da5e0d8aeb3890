//! Rows of raw pages: what encoders read, and 16-bit sides that are sealed as they came.

use crate::codec::HeadCodec;
use crate::desc::{Elem, Side, TILE};
use crate::layout::{read_row, run_range, write_row};

/// Full raw pages of one side, one after the other.
#[derive(Debug)]
pub struct RawPages<'a> {
    codec: &'a HeadCodec,
    side: Side,
    pages: &'a [&'a [u8]],
    /// 16-bit type of the rows.
    pub elem: Elem,
    /// Channels of a row without padding.
    pub width: usize,
    channels: usize,
    tiles: usize,
}

impl<'a> RawPages<'a> {
    /// One side of `pages`, whose codec is `codec`.
    #[must_use]
    pub fn new(codec: &'a HeadCodec, side: Side, pages: &'a [&'a [u8]]) -> Self {
        let desc = codec.desc.side(side);
        let run = &desc.runs[0];
        let (width, channels) = ((desc.parts * desc.d) as usize, run.channels as usize);
        Self { codec, side, pages, elem: run.elem, width, channels, tiles: codec.desc.tiles() }
    }

    /// The rows `[16][chunk]` of a tile, counted over all pages.
    ///
    /// # Panics
    /// If there is no such tile.
    #[must_use]
    pub fn tile(&self, tile: usize) -> &'a [[u8; 32]] {
        let run = &self.codec.desc.side(self.side).runs[0];
        let page = self.pages[tile / self.tiles];
        page[run_range(&self.codec.desc, self.side, run, tile % self.tiles)].as_chunks().0
    }

    /// The rows `[tokens][width]`.
    #[must_use]
    pub fn read(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.pages.len() * self.tiles * TILE * self.width];
        for (token, row) in rows.chunks_exact_mut(self.width).enumerate() {
            let tile = self.tile(token / TILE).as_flattened();
            read_row(self.elem, tile, token % TILE, self.channels, row);
        }
        rows
    }
}

/// Encodes one side of full raw pages into `page` from `slot` on by the scalar code; `codecs` are those of the raw and
/// of the target page.
///
/// # Panics
/// If the pages are shorter than their descriptors say.
pub fn seal_side(
    (raw_codec, codec): (&HeadCodec, &HeadCodec),
    side: Side,
    raw: &[&[u8]],
    positions: &[i64],
    page: &mut [u8],
    slot: usize,
) {
    let from = RawPages::new(raw_codec, side, raw);
    let context = super::EncodeContext::new(codec, side);
    match &context.codec.encoder {
        Some(encoder) => encoder.encode(&context, &from.read(), positions, page, slot),
        None => write_rows(codec, side, &from.read(), from.width, page, slot),
    }
}

fn write_rows(codec: &HeadCodec, side: Side, rows: &[f32], width: usize, page: &mut [u8], slot: usize) {
    let run = &codec.desc.side(side).runs[0];
    for (token, row) in rows.chunks_exact(width).enumerate() {
        let slot = slot + token;
        let tile = &mut page[run_range(&codec.desc, side, run, slot / TILE)];
        write_row(run.elem, row, tile, slot % TILE, run.channels as usize);
    }
}
