//! Encoding of raw pages.

use kvrs_codec::desc::TILE;
use kvrs_codec::encode::EncodeContext;
use kvrs_codec::layout::{read_row, run_range, write_row};
use kvrs_codec::{HeadCodec, Side};

/// Encodes full raw pages into `page` from `slot` on; `codecs` are those of the raw and of the target page.
pub(crate) fn seal(
    (raw_codec, codec): (&HeadCodec, &HeadCodec),
    raw: &[&[u8]],
    position: i64,
    page: &mut [u8],
    slot: usize,
) {
    for side in [Side::Key, Side::Value] {
        let desc = raw_codec.desc.side(side);
        let width = (desc.parts * desc.d) as usize;
        let rows = read_rows(raw_codec, side, raw, width);
        match &codec.side(side).1.encoder {
            Some(encoder) => encoder.encode(&EncodeContext::new(codec, side), &rows, position, page, slot),
            None => write_rows(codec, side, &rows, width, page, slot),
        }
    }
}

/// The rows `[tokens][width]` of full raw pages.
fn read_rows(codec: &HeadCodec, side: Side, raw: &[&[u8]], width: usize) -> Vec<f32> {
    let (run, slots) = (&codec.desc.side(side).runs[0], codec.desc.slots as usize);
    let mut rows = vec![0.0; raw.len() * slots * width];
    for (token, row) in rows.chunks_exact_mut(width).enumerate() {
        let (page, slot) = (raw[token / slots], token % slots);
        let tile = &page[run_range(&codec.desc, side, run, slot / TILE)];
        read_row(run.elem, tile, slot % TILE, run.channels as usize, row);
    }
    rows
}

fn write_rows(codec: &HeadCodec, side: Side, rows: &[f32], width: usize, page: &mut [u8], slot: usize) {
    let run = &codec.desc.side(side).runs[0];
    for (token, row) in rows.chunks_exact(width).enumerate() {
        let slot = slot + token;
        let tile = &mut page[run_range(&codec.desc, side, run, slot / TILE)];
        write_row(run.elem, row, tile, slot % TILE, run.channels as usize);
    }
}
