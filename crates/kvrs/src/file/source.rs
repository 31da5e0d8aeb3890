//! The sections of a file, read in order, with their checksums.

use super::header::{self, CHECKSUMS, Fields, Section, wrong};
use kvrs_core::{Error, Result};
use safetensors::Dtype;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

/// Bytes that are read at once.
const BUFFER: usize = 64 << 10;

/// A file whose header has been read and checked.
pub(super) struct Source<'a, R> {
    reader: BufReader<R>,
    pub(super) what: &'a str,
    /// Bytes of the whole file.
    pub(super) size: u64,
    pub(super) fields: Fields,
    pub(super) sections: Vec<Section>,
    /// Checksum of each section.
    sums: Vec<u32>,
    next: usize,
}

/// A number of little-endian bytes.
pub(super) trait Number: Sized + Copy + Default {
    fn parse(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn parse(bytes: &[u8]) -> Vec<Self> {
                bytes.as_chunks().0.iter().map(|bytes| Self::from_le_bytes(*bytes)).collect()
            }
        }
    )*};
}
numbers!(u16, u32, u64, f32);

impl<'a, R: Read + Seek> Source<'a, R> {
    /// Reads the header, of at most `most` bytes, and the checksums.
    pub(super) fn open(what: &'a str, mut reader: R, most: u64) -> Result<Self> {
        let failed = |e: io::Error| failed(what, &e);
        let size = reader.seek(SeekFrom::End(0)).map_err(failed)?;
        reader.rewind().map_err(failed)?;
        let mut header = vec![0; 8];
        if size < 8 {
            return Err(Error::format(what, format!("{size} bytes"), "a safetensors file"));
        }
        reader.read_exact(&mut header).map_err(failed)?;
        let length = header.as_chunks().0.first().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let most = most.min(size - 8);
        if length > most {
            return Err(wrong(what, "header", format!("{length} bytes"), format!("up to {most} bytes")));
        }
        header.resize(8 + length as usize, 0);
        reader.read_exact(&mut header[8..]).map_err(failed)?;
        let (fields, mut sections) = header::parse(what, &header)?;
        let payload: u64 = sections.iter().map(|section| section.bytes() as u64).sum();
        if size != header.len() as u64 + payload {
            let allowed = format!("{} bytes of header and sections", header.len() as u64 + payload);
            return Err(Error::format(what, format!("{size} bytes"), allowed));
        }
        let last = sections.pop().filter(|last| last.name == CHECKSUMS && last.dtype == Dtype::U32);
        if last.is_none_or(|last| last.shape != [sections.len() + 1]) {
            let allowed = format!("a last section of {} numbers", sections.len() + 1);
            return Err(wrong(what, CHECKSUMS, "another", allowed));
        }
        let mut sums = vec![0; 4 * (sections.len() + 1)];
        reader.seek(SeekFrom::End(-(sums.len() as i64))).map_err(failed)?;
        reader.read_exact(&mut sums).map_err(failed)?;
        reader.seek(SeekFrom::Start(header.len() as u64)).map_err(failed)?;
        let mut sums = u32::parse(&sums);
        check_sum(what, "header", crc32fast::hash(&header), sums.pop())?;
        let reader = BufReader::with_capacity(BUFFER, reader);
        Ok(Self { reader, what, size, fields, sections, sums, next: 0 })
    }

    /// The next section, which must be this one.
    pub(super) fn next(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: impl Fn(&[usize]) -> bool,
    ) -> Result<Section> {
        let found = self.sections.get(self.next);
        let Some(section) = found.filter(|section| section.name == name) else {
            let got = found.map_or("the end", |section| &section.name);
            return Err(Error::format(self.what, format!("section {got}"), format!("section {name}")));
        };
        if section.dtype != dtype || !shape(&section.shape) {
            let got = format!("{:?} {:?}", section.dtype, section.shape);
            return Err(wrong(
                self.what,
                name,
                got,
                format!("{dtype:?} of the shape that its entries ask for"),
            ));
        }
        self.next += 1;
        Ok(section.clone())
    }

    /// The bytes of the section that [`Source::next`] gave last.
    pub(super) fn section(&mut self, section: &Section) -> SectionReader<'_, R> {
        SectionReader {
            reader: &mut self.reader,
            what: self.what,
            name: section.name.clone(),
            left: section.bytes(),
            sum: crc32fast::Hasher::new(),
            expected: self.sums[self.next - 1],
        }
    }

    /// A section of one axis; empty if the file has not that one next.
    pub(super) fn numbers<T: Number>(&mut self, name: &str, dtype: Dtype) -> Result<Vec<T>> {
        if self.sections.get(self.next).is_none_or(|section| section.name != name) {
            return Ok(Vec::new());
        }
        let section = self.next(name, dtype, |shape| shape.len() == 1)?;
        self.small(&section)
    }

    /// A section `[rows, N]`; if the number of rows is not given, it may be absent.
    pub(super) fn rows<T: Number, const N: usize>(
        &mut self,
        name: &str,
        dtype: Dtype,
        rows: Option<usize>,
    ) -> Result<Vec<[T; N]>> {
        let present = self.sections.get(self.next).is_some_and(|section| section.name == name);
        if !present && rows.is_none_or(|rows| rows == 0) {
            return Ok(Vec::new());
        }
        let fits =
            |shape: &[usize]| shape.len() == 2 && shape[1] == N && rows.is_none_or(|rows| rows == shape[0]);
        let section = self.next(name, dtype, fits)?;
        let numbers: Vec<T> = self.small(&section)?;
        Ok(numbers.as_chunks().0.to_vec())
    }

    fn small<T: Number>(&mut self, section: &Section) -> Result<Vec<T>> {
        let mut bytes = vec![0; section.bytes()];
        let mut reader = self.section(section);
        reader.fill(&mut bytes)?;
        reader.end()?;
        Ok(T::parse(&bytes))
    }

    /// Checks that every section was read.
    pub(super) fn end(&self) -> Result<()> {
        match self.sections.get(self.next) {
            None => Ok(()),
            Some(section) => Err(Error::format(self.what, format!("section {}", section.name), "the end")),
        }
    }
}

/// The bytes of one section.
pub(super) struct SectionReader<'a, R> {
    reader: &'a mut BufReader<R>,
    what: &'a str,
    name: String,
    left: usize,
    sum: crc32fast::Hasher,
    expected: u32,
}

impl<R: Read> SectionReader<'_, R> {
    /// The next bytes.
    pub(super) fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.read_exact(out).map_err(|e| failed(self.what, &e))
    }

    /// Checks that all was read, and its checksum.
    pub(super) fn end(self) -> Result<()> {
        if self.left > 0 {
            return Err(wrong(self.what, &self.name, format!("{} more bytes", self.left), "its end"));
        }
        check_sum(self.what, &self.name, self.sum.finalize(), Some(self.expected))
    }
}

impl<R: Read> Read for SectionReader<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let most = out.len().min(self.left);
        let n = self.reader.read(&mut out[..most])?;
        self.sum.update(&out[..n]);
        self.left -= n;
        Ok(n)
    }
}

fn check_sum(what: &str, name: &str, got: u32, expected: Option<u32>) -> Result<()> {
    match expected {
        Some(expected) if expected == got => Ok(()),
        expected => {
            let expected = expected.unwrap_or(0);
            Err(wrong(what, &format!("checksum of {name}"), format!("{got:08x}"), format!("{expected:08x}")))
        }
    }
}

/// A file that ends too early is broken; other failures are the system's.
fn failed(what: &str, e: &io::Error) -> Error {
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return Error::format(what, "its end", "more bytes");
    }
    Error::Io { what: format!("reading {what}"), got: e.to_string() }
}
