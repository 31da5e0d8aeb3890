//! Faults on purpose: memory that runs out, and files that cannot be written or read to the end.

use kvrs::{Chunk, Cpu, Error, Result};
use kvrs_codec::backend::{AttendCall, Backend, RawRows, Results};
use kvrs_codec::{HeadCodec, Side};
use kvrs_core::page::{ChunkSource, Entry, Page};
use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Chunks that [`Faulty`] memory may still allocate; all handles are one.
#[derive(Debug, Clone)]
pub struct Luck(Arc<AtomicU64>);

/// The CPU, with memory that runs out when a test says so.
#[derive(Debug)]
pub struct Faulty {
    cpu: Cpu,
    luck: Luck,
}

impl Faulty {
    /// The CPU as long as `luck` lasts.
    #[must_use]
    pub fn new(cpu: Cpu, luck: &Luck) -> Self {
        Self { cpu, luck: luck.clone() }
    }
}

impl Default for Luck {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Luck {
    /// Lets `chunks` more allocations succeed, and none after them.
    pub fn fail_after(&self, chunks: u64) {
        self.0.store(chunks, Ordering::Relaxed);
    }

    /// Lets allocations succeed again.
    pub fn heal(&self) {
        self.fail_after(u64::MAX);
    }
}

impl ChunkSource for Faulty {
    type Chunk = Chunk;

    fn allocate(&self, bytes: usize) -> Result<Chunk> {
        let less = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(1) };
        if self.luck.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            let (needed, free, capacity) = (bytes as u64, 0, 0);
            return Err(Error::Capacity {
                what: "a chunk that was made to fail".into(),
                needed,
                free,
                capacity,
            });
        }
        self.cpu.allocate(bytes)
    }
}

impl Backend for Faulty {
    fn check(&self) -> Result<()> {
        self.cpu.check()
    }

    fn store_raw(&self, codec: &HeadCodec, page: &mut Page<Chunk>, slot: usize, rows: RawRows<'_>) {
        self.cpu.store_raw(codec, page, slot, rows);
    }

    fn seal(
        &self,
        codecs: (&HeadCodec, &HeadCodec),
        raw: &[&Page<Chunk>],
        positions: &[i64],
        page: &mut Page<Chunk>,
        slot: usize,
    ) {
        self.cpu.seal(codecs, raw, positions, page, slot);
    }

    fn attend(&self, call: &AttendCall<'_, Chunk>, results: Results<'_, '_>) -> Result<()> {
        self.cpu.attend(call, results)
    }

    fn copy_slot(&self, codec: &HeadCodec, from: (&Page<Chunk>, usize), to: (&mut Page<Chunk>, usize)) {
        self.cpu.copy_slot(codec, from, to);
    }

    fn copy_page(&self, from: &Page<Chunk>, to: &mut Page<Chunk>) {
        self.cpu.copy_page(from, to);
    }

    fn read_page(&self, page: &Page<Chunk>, out: &mut [u8]) -> Result<()> {
        self.cpu.read_page(page, out)
    }

    fn write_page(&self, page: &mut Page<Chunk>, bytes: &[u8]) -> Result<()> {
        self.cpu.write_page(page, bytes)
    }

    fn decode_live(
        &self,
        codec: &HeadCodec,
        entry: &Entry<Chunk>,
        start: i64,
        side: (Side, usize),
        out: &mut Vec<f32>,
    ) {
        self.cpu.decode_live(codec, entry, start, side, out);
    }

    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.cpu.install(work)
    }

    fn huge_pages(&self) -> bool {
        self.cpu.huge_pages()
    }
}

/// Takes `room` bytes, then no more: a disk that is full.
#[derive(Debug, Default)]
pub struct FullDisk {
    /// What was written.
    pub bytes: Vec<u8>,
    /// Bytes that it takes.
    pub room: usize,
}

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.room - self.bytes.len());
        self.bytes.extend_from_slice(&bytes[..n]);
        if n == 0 && !bytes.is_empty() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(n) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file whose bytes from `end` on cannot be read, though it says it has them.
#[derive(Debug)]
pub struct BadDisk<'a> {
    file: Cursor<&'a [u8]>,
    end: u64,
    error: Option<io::ErrorKind>,
}

impl<'a> BadDisk<'a> {
    /// Reading at `end` gives `error`, or the end of the file as if it had been cut meanwhile.
    #[must_use]
    pub fn new(bytes: &'a [u8], end: usize, error: Option<io::ErrorKind>) -> Self {
        Self { file: Cursor::new(bytes), end: end as u64, error }
    }
}

impl Read for BadDisk<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = self.end.saturating_sub(self.file.position()).min(out.len() as u64) as usize;
        match self.error {
            Some(error) if most == 0 && !out.is_empty() => Err(error.into()),
            _ => self.file.read(&mut out[..most]),
        }
    }
}

impl Seek for BadDisk<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}
