//! Encoding of raw pages.

use crate::kernels::Kernels;
use crate::simd::encode::{Scratch, TileArgs};
use crate::simd::search::{Found, Search};
use kvrs_codec::desc::TILE;
use kvrs_codec::encode::{EncodeContext, RawPages, ScaledEncoder, seal_side};
use kvrs_codec::{HeadCodec, Side};
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
        let (from, context) = (RawPages::new(raw_codec, side, raw), EncodeContext::new(codec, side));
        let done = kernel.is_some_and(|kernel| seal_by(kernel, context, &from, positions, page, slot));
        if !done {
            seal_side((raw_codec, codec), side, raw, positions, page, slot);
        }
    }
}

/// Encodes one side by a kernel; `false` where only the scalar encoder serves.
fn seal_by(
    kernel: Kernel<'_>,
    context: EncodeContext<'_>,
    from: &RawPages<'_>,
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
