//! Encoding of raw pages.

use crate::kernels::Kernels;
use crate::simd::encode::{Scratch, TileArgs};
use crate::simd::search::{Found, Search};
use kvrs_codec::desc::TILE;
use kvrs_codec::encode::{EncodeContext, ScaledEncoder};
use kvrs_codec::layout::{read_row, run_range, write_row};
use kvrs_codec::{Elem, HeadCodec, Side};
use std::cell::RefCell;

thread_local! {
    /// Codebooks and working memory, kept from call to call so that none allocates.
    static KEPT: RefCell<(Vec<Found>, Scratch)> = RefCell::default();
}

/// Encodes one tile by vectors.
pub(crate) type Kernel<'a> = &'a dyn Fn(&mut TileArgs<'_>);

/// Encodes full raw pages into `page` from `slot` on; `codecs` are those of the raw and of the target page.
pub(crate) fn seal(
    kernels: Option<Kernels>,
    codecs: (&HeadCodec, &HeadCodec),
    raw: &[&[u8]],
    positions: &[i64],
    page: &mut [u8],
    slot: usize,
) {
    let encode = kernels.map(|kernels| move |args: &mut TileArgs<'_>| kernels.encode_tile(args));
    let kernel = encode.as_ref().map(|encode| encode as Kernel<'_>);
    seal_with(kernel, codecs, raw, positions, page, slot);
}

/// As [`seal`], with that kernel; `None`: with the scalar encoder.
pub(crate) fn seal_with(
    kernel: Option<Kernel<'_>>,
    (raw_codec, codec): (&HeadCodec, &HeadCodec),
    raw: &[&[u8]],
    positions: &[i64],
    page: &mut [u8],
    slot: usize,
) {
    for side in [Side::Key, Side::Value] {
        let from = Raw::new(raw_codec, side, raw);
        let context = EncodeContext::new(codec, side);
        let Some(encoder) = &context.codec.encoder else {
            write_rows(codec, side, &from.read(), from.width, page, slot);
            continue;
        };
        let done = kernel.is_some_and(|kernel| seal_by(kernel, context, &from, positions, page, slot));
        if !done {
            encoder.encode(&context, &from.read(), positions, page, slot);
        }
    }
}

/// Encodes one side by a kernel; `false` where only the scalar encoder serves.
fn seal_by(
    kernel: Kernel<'_>,
    context: EncodeContext<'_>,
    from: &Raw<'_>,
    positions: &[i64],
    page: &mut [u8],
    slot: usize,
) -> bool {
    let Some(encoder) = context.codec.encoder.as_ref().and_then(|e| e.as_scaled()) else { return false };
    if context.codec.rope.is_some() {
        return false;
    }
    KEPT.with_borrow_mut(|(books, scratch)| {
        if context.codec.transform.d() != from.width || !find_books(&context, encoder, books) {
            return false;
        }
        for (tile, positions) in positions.as_chunks().0.iter().enumerate() {
            kernel(&mut TileArgs {
                context,
                rule: encoder.rule,
                books,
                elem: from.elem,
                rows: from.tile(tile),
                positions,
                page,
                slot: slot + TILE * tile,
                scratch,
            });
        }
        true
    })
}

/// Looks up how kernels search the runs' codebooks; `false` where they cannot, or for dimensions that are no multiple
/// of 4.
fn find_books(context: &EncodeContext<'_>, encoder: &ScaledEncoder, books: &mut Vec<Found>) -> bool {
    let (transform, runs) = (&context.codec.transform, &context.desc().runs);
    books.clear();
    if !transform.d().is_multiple_of(4)
        || !transform.live().is_multiple_of(4)
        || runs.len() != encoder.books.len()
    {
        return false;
    }
    for (run, book) in runs.iter().zip(&encoder.books) {
        match Search::of(book) {
            Some(found) if book.width == run.width => books.push(found),
            _ => return false,
        }
    }
    true
}

/// Full raw pages of one side.
struct Raw<'a> {
    codec: &'a HeadCodec,
    side: Side,
    pages: &'a [&'a [u8]],
    elem: Elem,
    /// Channels of a row without padding.
    width: usize,
    /// Channels of a row.
    channels: usize,
    /// Tiles of a page.
    tiles: usize,
}

impl<'a> Raw<'a> {
    fn new(codec: &'a HeadCodec, side: Side, pages: &'a [&'a [u8]]) -> Self {
        let desc = codec.desc.side(side);
        let run = &desc.runs[0];
        let (width, channels) = ((desc.parts * desc.d) as usize, run.channels as usize);
        Self { codec, side, pages, elem: run.elem, width, channels, tiles: codec.desc.tiles() }
    }

    /// The rows `[16][chunk]` of a tile, counted over all pages.
    fn tile(&self, tile: usize) -> &'a [[u8; 32]] {
        let run = &self.codec.desc.side(self.side).runs[0];
        let page = self.pages[tile / self.tiles];
        page[run_range(&self.codec.desc, self.side, run, tile % self.tiles)].as_chunks().0
    }

    /// The rows `[tokens][width]`.
    fn read(&self) -> Vec<f32> {
        let mut rows = vec![0.0; self.pages.len() * self.tiles * TILE * self.width];
        for (token, row) in rows.chunks_exact_mut(self.width).enumerate() {
            let tile = self.tile(token / TILE).as_flattened();
            read_row(self.elem, tile, token % TILE, self.channels, row);
        }
        rows
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
