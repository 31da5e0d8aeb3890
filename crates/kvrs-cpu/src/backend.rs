//! What the store asks of a backend, on the CPU.

use crate::memory::{Chunk, Cpu, bytes, bytes_mut};
use kvrs_codec::backend::{AttendCall, Backend, RawRows};
use kvrs_codec::layout::{copy_slot, run_range, write_row};
use kvrs_codec::tile::decode_slot;
use kvrs_codec::{HeadCodec, Side, View, ViewMut};
use kvrs_core::page::{Entry, Page};

impl Backend for Cpu {
    fn store_raw(&self, codec: &HeadCodec, page: &mut Page<Chunk>, slot: usize, rows: RawRows<'_>) {
        let page = bytes_mut(page);
        for (side, view) in [(Side::Key, rows.k), (Side::Value, rows.v)] {
            store_side(codec, side, page, slot, view, &rows);
        }
    }

    fn seal(
        &self,
        codecs: (&HeadCodec, &HeadCodec),
        raw: &[&Page<Chunk>],
        position: i64,
        page: &mut Page<Chunk>,
        slot: usize,
    ) {
        let raw: Vec<&[u8]> = raw.iter().map(|page| bytes(page)).collect();
        crate::encode::seal(codecs, &raw, position, bytes_mut(page), slot);
    }

    fn attend(&self, call: &AttendCall<'_, Chunk>, out: &mut ViewMut<'_>, lse: Option<&mut [f32]>) {
        crate::attend::attend(self, call, out, lse);
    }

    fn copy_slot(&self, codec: &HeadCodec, from: (&Page<Chunk>, usize), to: (&mut Page<Chunk>, usize)) {
        copy_slot(&codec.desc, (bytes(from.0), from.1), (bytes_mut(to.0), to.1));
    }

    fn decode_slot(
        &self,
        codec: &HeadCodec,
        entry: &Entry<Chunk>,
        start: i64,
        slot: usize,
        head: usize,
        out: (&mut [f32], &mut [f32]),
    ) {
        let (page, position) = (bytes(entry.page()), start + entry.index(slot) as i64);
        decode_slot(codec, Side::Key, page, slot, position, head, out.0);
        decode_slot(codec, Side::Value, page, slot, position, head, out.1);
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.on_pool(work)
    }

    fn huge_pages(&self) -> bool {
        false
    }
}

fn store_side(
    codec: &HeadCodec,
    side: Side,
    page: &mut [u8],
    slot: usize,
    view: View<'_>,
    rows: &RawRows<'_>,
) {
    let (desc, heads) = (codec.desc.side(side), codec.desc.heads as usize);
    let (run, dim) = (&desc.runs[0], view.shape()[3]);
    let mut row = vec![0.0; heads * dim];
    for (i, &column) in rows.columns.iter().enumerate() {
        for (head, out) in row.chunks_exact_mut(dim).enumerate() {
            view.read_row([rows.row, rows.head + head, column], out);
        }
        let tile = &mut page[run_range(&codec.desc, side, run, (slot + i) / 16)];
        write_row(run.elem, &row, tile, (slot + i) % 16, run.channels as usize);
    }
}
