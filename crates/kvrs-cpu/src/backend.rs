//! What the store asks of a backend, on the CPU.

use crate::memory::{Chunk, Cpu, bytes, bytes_mut};
use kvrs_codec::backend::{AttendCall, Backend, RawRows, Results, decode_entry};
use kvrs_codec::desc::{Elem, TILE};
use kvrs_codec::layout::{copy_slot, row_bytes_mut, run_range};
use kvrs_codec::{Dtype, HeadCodec, Side, View};
use kvrs_core::Result;
use kvrs_core::page::{Entry, Page};

impl Backend for Cpu {
    fn check(&self) -> kvrs_core::Result<()> {
        self.isa().map(|_| ())
    }

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
        positions: &[i64],
        page: &mut Page<Chunk>,
        slot: usize,
    ) {
        let raw: Vec<&[u8]> = raw.iter().map(|page| bytes(page)).collect();
        crate::encode::seal(self.kernels(), codecs, &raw, positions, bytes_mut(page), slot);
    }

    fn attend(&self, call: &AttendCall<'_, Chunk>, results: Results<'_, '_>) -> Result<()> {
        crate::attend::attend(self, call, results);
        Ok(())
    }

    fn copy_slot(&self, codec: &HeadCodec, from: (&Page<Chunk>, usize), to: (&mut Page<Chunk>, usize)) {
        copy_slot(&codec.desc, (bytes(from.0), from.1), (bytes_mut(to.0), to.1));
    }

    fn copy_page(&self, from: &Page<Chunk>, to: &mut Page<Chunk>) {
        bytes_mut(to).copy_from_slice(bytes(from));
    }

    fn read_page(&self, page: &Page<Chunk>, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(bytes(page));
        Ok(())
    }

    fn write_page(&self, page: &mut Page<Chunk>, content: &[u8]) -> Result<()> {
        bytes_mut(page).copy_from_slice(content);
        Ok(())
    }

    fn decode_live(
        &self,
        codec: &HeadCodec,
        entry: &Entry<Chunk>,
        start: i64,
        side: (Side, usize),
        out: &mut Vec<f32>,
    ) {
        decode_entry(codec, bytes(entry.page()), entry, start, side, out);
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.on_pool(work)
    }

    fn huge_pages(&self) -> bool {
        self.on_huge_pages()
    }
}

/// Copies or rounds rows straight from the caller's tensor into the page.
fn store_side(
    codec: &HeadCodec,
    side: Side,
    page: &mut [u8],
    slot: usize,
    view: View<'_>,
    rows: &RawRows<'_>,
) {
    let (run, heads) = (&codec.desc.side(side).runs[0], codec.desc.heads as usize);
    let (row_bytes, dtype) = (view.shape()[3] * 2, dtype_of(run.elem));
    let tile = |slot| run_range(&codec.desc, side, run, slot / TILE);
    if let (1, true, Some(first)) = (heads, run.channels as usize * 2 == row_bytes, neighbours(rows.columns))
    {
        let out = &mut page[tile(slot)][slot % TILE * row_bytes..][..rows.columns.len() * row_bytes];
        return view.copy_rows([rows.row, rows.head, first], dtype, out);
    }
    for (slot, &column) in (slot..).zip(rows.columns) {
        let row = row_bytes_mut(&mut page[tile(slot)], slot % TILE, run.channels as usize);
        let (data, pad) = row.split_at_mut(heads * row_bytes);
        for (head, out) in data.chunks_exact_mut(row_bytes).enumerate() {
            view.copy_row([rows.row, rows.head + head, column], dtype, out);
        }
        pad.fill(0);
    }
}

/// The type of 16-bit rows.
fn dtype_of(elem: Elem) -> Dtype {
    match elem {
        Elem::F16 => Dtype::F16,
        Elem::Bf16 => Dtype::Bf16,
        other => unreachable!("16-bit rows hold f16 or bf16, not {other:?}"),
    }
}

/// The first of ascending columns that have no gap.
fn neighbours(columns: &[usize]) -> Option<usize> {
    let (first, last) = (*columns.first()?, *columns.last()?);
    (last - first == columns.len() - 1).then_some(first)
}
