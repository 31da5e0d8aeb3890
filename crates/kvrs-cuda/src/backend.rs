//! What the store asks of a backend, on a device or its emulation.

use crate::args::{Plain, RawRow, SlotCopy};
use crate::codec::{Codecs, DeviceCodec};
use crate::launcher::{Kernel, Launcher};
use crate::memory::{Chunk, Stream, address};
use crate::queue::{Group, Source};
use crate::workspace::{Workspace, view};
use kvrs_codec::backend::{AttendCall, Backend, RawRows, Results, decode_entry};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::desc::Elem;
use kvrs_codec::encode::seal_side;
use kvrs_codec::{Dtype, HeadCodec, Place, Side, View};
use kvrs_core::page::{ChunkSource, Entry, Page};
use kvrs_core::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard};

/// A backend whose pages lie in device memory and whose kernels `L` runs.
#[derive(Debug)]
pub struct Cuda<L: Launcher> {
    pub(crate) stream: Arc<Stream<L>>,
    pub(crate) codecs: Codecs<L>,
    workspace: Mutex<Workspace<L>>,
    place: Place,
}

fn poisoned<T>(_: T) -> Error {
    Error::Internal("a thread panicked inside the CUDA backend".into())
}

impl<L: Launcher> Cuda<L> {
    /// A backend on `launcher`, for tensors in `place`.
    ///
    /// # Errors
    /// Those of the launcher's first allocation.
    pub fn new(launcher: L, place: Place) -> Result<Self> {
        let stream = Arc::new(Stream::new(launcher)?);
        Ok(Self { stream, codecs: Codecs::default(), workspace: Mutex::default(), place })
    }

    /// What runs the kernels.
    #[must_use]
    pub fn launcher(&self) -> &L {
        &self.stream.launcher
    }

    /// Keys and values that were stored as zeros because they were not finite, or too large for the window's type.
    ///
    /// # Errors
    /// What the driver says.
    pub fn refused(&self) -> Result<u32> {
        self.stream.refused()
    }

    pub(crate) fn workspace(&self) -> Result<MutexGuard<'_, Workspace<L>>> {
        self.workspace.lock().map_err(poisoned)
    }

    /// Runs a kernel; jobs that wait are started by [`Stream::start`] before.
    pub(crate) fn launch<A: Plain>(&self, kernel: Kernel, grid: [usize; 3], args: &A) -> Result<()> {
        crate::queue::launch(&self.stream.launcher, kernel, grid, args)
    }

    fn codec(&self, codec: &HeadCodec) -> Result<Arc<DeviceCodec<L>>> {
        self.codecs.get(&self.stream.launcher, codec)
    }

    fn try_store_raw(&self, codec: &HeadCodec, page: u64, slot: usize, rows: &RawRows<'_>) -> Result<()> {
        let sides = self.codec(codec)?.sides;
        let job = |(i, &column): (usize, &usize)| RawRow {
            page,
            sides,
            slot: (slot + i) as u32,
            batch: rows.row as u32,
            head: rows.head as u32,
            column: column as u32,
        };
        let jobs: Vec<RawRow> = rows.columns.iter().enumerate().map(job).collect();
        let window = if codec.desc.key.runs[0].elem == Elem::F16 { Dtype::F16 } else { Dtype::Bf16 };
        let limit = window.largest_stored();
        self.stream.queue().store_raw(Source { k: view(&rows.k), v: view(&rows.v), limit }, &jobs);
        Ok(())
    }

    fn try_seal(
        &self,
        (raw_codec, codec): (&HeadCodec, &HeadCodec),
        raw: &[&Page<Chunk<L>>],
        positions: &[i64],
        page: &mut Page<Chunk<L>>,
        slot: usize,
    ) -> Result<()> {
        let (from, to) = (self.codec(raw_codec)?, self.codec(codec)?);
        let Some(encoders) = to.encoders else {
            return self.seal_on_host((raw_codec, codec), raw, positions, page, slot);
        };
        let raw: Vec<u64> = raw.iter().map(|page| address(page)).collect();
        let (page, from, to) = (address(page), from.sides, to.sides);
        self.stream.queue().seal(&Group { raw: &raw, page, slot, positions, from, to, encoders });
        Ok(())
    }

    /// Encodes by the scalar code where no kernel does: the pages travel to the host and back.
    fn seal_on_host(
        &self,
        codecs: (&HeadCodec, &HeadCodec),
        raw: &[&Page<Chunk<L>>],
        positions: &[i64],
        page: &mut Page<Chunk<L>>,
        slot: usize,
    ) -> Result<()> {
        let raw = raw.iter().map(|page| self.bytes(page)).collect::<Result<Vec<_>>>()?;
        let raw: Vec<&[u8]> = raw.iter().map(Vec::as_slice).collect();
        let mut bytes = self.bytes(page)?;
        for side in [Side::Key, Side::Value] {
            seal_side(codecs, side, &raw, positions, &mut bytes, slot);
        }
        self.stream.fill(page, &bytes)
    }

    fn try_copy_slot(
        &self,
        codec: &HeadCodec,
        from: (&Page<Chunk<L>>, usize),
        to: (&Page<Chunk<L>>, usize),
    ) -> Result<()> {
        let sides = self.codec(codec)?.sides;
        let copy = SlotCopy {
            from: address(from.0),
            to: address(to.0),
            from_slot: from.1 as u32,
            to_slot: to.1 as u32,
        };
        self.stream.queue().copy_slot(copy, sides);
        Ok(())
    }

    fn bytes(&self, page: &Page<Chunk<L>>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; page.bytes()];
        self.stream.read(page, &mut bytes)?;
        Ok(bytes)
    }
}

impl<L: Launcher> ChunkSource for Cuda<L> {
    type Chunk = Chunk<L>;

    fn allocate(&self, bytes: usize) -> Result<Chunk<L>> {
        Chunk::new(&self.stream, bytes)
    }
}

impl<L: Launcher> Backend for Cuda<L> {
    fn place(&self) -> Place {
        self.place
    }

    fn admit(&self, layer: &LayerCodec) -> Result<()> {
        layer.classes.iter().flatten().try_for_each(|codec| self.codec(codec).map(drop))
    }

    fn flush(&self) -> Result<()> {
        self.stream.start()
    }

    fn fetch(&self, view: &View<'_>, row: usize, columns: &[usize], out: &mut Vec<u8>) -> Result<()> {
        crate::fetch::fetch(self.launcher(), view, row, columns, out)
    }

    fn store_raw(&self, codec: &HeadCodec, page: &mut Page<Chunk<L>>, slot: usize, rows: RawRows<'_>) {
        self.stream.written(self.try_store_raw(codec, address(page), slot, &rows));
    }

    fn seal(
        &self,
        codecs: (&HeadCodec, &HeadCodec),
        raw: &[&Page<Chunk<L>>],
        positions: &[i64],
        page: &mut Page<Chunk<L>>,
        slot: usize,
    ) {
        self.stream.written(self.try_seal(codecs, raw, positions, page, slot));
    }

    fn attend(&self, call: &AttendCall<'_, Chunk<L>>, results: Results<'_, '_>) -> Result<()> {
        crate::attend::attend(self, call, results)
    }

    fn copy_slot(&self, codec: &HeadCodec, from: (&Page<Chunk<L>>, usize), to: (&mut Page<Chunk<L>>, usize)) {
        self.stream.written(self.try_copy_slot(codec, from, (to.0, to.1)));
    }

    fn copy_page(&self, from: &Page<Chunk<L>>, to: &mut Page<Chunk<L>>) {
        self.stream.written(self.stream.copy_page(from, to));
    }

    fn read_page(&self, page: &Page<Chunk<L>>, out: &mut [u8]) -> Result<()> {
        self.stream.read(page, out)
    }

    fn write_page(&self, page: &mut Page<Chunk<L>>, bytes: &[u8]) -> Result<()> {
        self.stream.fill(page, bytes)
    }

    fn decode_live(
        &self,
        codec: &HeadCodec,
        entry: &Entry<Chunk<L>>,
        start: i64,
        side: (Side, usize),
        out: &mut Vec<f32>,
    ) {
        let bytes = self.bytes(entry.page()).unwrap_or_else(|error| {
            self.stream.written(Err(error));
            vec![0; entry.page().bytes()]
        });
        decode_entry(codec, &bytes, entry, start, side, out);
    }

    fn huge_pages(&self) -> bool {
        false
    }
}
