//! Writing a sequence: small arrays first, then pages, then checksums.

use super::Compress;
use super::deflate::Deflater;
use super::header::{CHECKSUMS, Fields, Section};
use super::state::{Array, arrays, images, name};
use crate::compile::Compiled;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::layout::copy_filled;
use kvrs_core::page::Entry;
use kvrs_core::{Error, Result, SeqId};
use safetensors::Dtype;
use std::io::{self, Write};

/// The pages of one class of a head.
struct Pages<'a, C> {
    head: (usize, usize),
    class: usize,
    entries: Vec<&'a Entry<C>>,
    section: Section,
    /// The compressed bytes; `None`: pages are written as they are.
    packed: Option<Vec<u8>>,
}

/// A file before it is written: all of it but the bytes of pages.
pub(crate) struct Draft<'a, C> {
    header: Vec<u8>,
    small: Vec<Array>,
    pages: Vec<Pages<'a, C>>,
    /// Bytes of the whole file.
    pub(crate) bytes: usize,
}

/// Writes sections and keeps their checksums.
struct Sink<'a> {
    out: &'a mut dyn Write,
    what: &'a str,
    sums: Vec<u32>,
}

fn failed(what: &str, e: &io::Error) -> Error {
    Error::Io { what: format!("writing {what}"), got: e.to_string() }
}

impl Sink<'_> {
    fn failed(&self, e: &io::Error) -> Error {
        failed(self.what, e)
    }

    fn section(&mut self, bytes: &[u8]) -> Result<()> {
        self.sums.push(crc32fast::hash(bytes));
        self.out.write_all(bytes).map_err(|e| self.failed(&e))
    }
}

impl<B: Backend> KvStore<B> {
    /// Writes a sequence as [`KvStore::save`] does, to anything that takes bytes; `what` names it in errors.
    ///
    /// # Errors
    /// As [`KvStore::save`].
    pub fn save_to(&self, what: &str, out: &mut dyn Write, seq: SeqId, compress: Compress) -> Result<()> {
        let row = self.row(seq)?;
        if let (Some(parked), Compress::None) = (&row.read_parked()?.parked, compress) {
            return out.write_all(parked.file()).map_err(|e| failed(what, &e));
        }
        let sequence = row.read()?;
        sequence.check_closed(seq)?;
        self.write(what, out, &self.draft(&sequence, compress)?)
    }

    /// What is to be written of a sequence whose prompt is closed, between two steps.
    pub(crate) fn draft<'a>(
        &self,
        sequence: &'a Sequence<B::Chunk>,
        compress: Compress,
    ) -> Result<Draft<'a, B::Chunk>> {
        let small = arrays(&images(sequence));
        let pages = self.pages_of(self.compiled()?, sequence, compress)?;
        let mut sections: Vec<Section> = small.iter().map(|array| array.section.clone()).collect();
        sections.extend(pages.iter().map(|pages| pages.section.clone()));
        sections.push(Section::new(CHECKSUMS, Dtype::U32, &[sections.len() + 1]));
        let fields = Fields {
            plan: self.plan.hash().to_owned(),
            tokens: sequence.length(),
            start: sequence.start,
            types: self.types.get().filter(|_| sequence.start.is_some()).map(|t| (t.input, t.window)),
            compress,
        };
        let header = fields.header(&sections);
        let bytes = header.len() + sections.iter().map(Section::bytes).sum::<usize>();
        Ok(Draft { header, small, pages, bytes })
    }

    /// Writes all bytes of a draft.
    pub(crate) fn write(&self, what: &str, out: &mut dyn Write, draft: &Draft<'_, B::Chunk>) -> Result<()> {
        let plan = self.compiled()?;
        let mut sink = Sink { out, what, sums: Vec::new() };
        sink.out.write_all(&draft.header).map_err(|e| sink.failed(&e))?;
        draft.small.iter().try_for_each(|Array { bytes, .. }| sink.section(bytes))?;
        draft.pages.iter().try_for_each(|pages| self.write_pages(plan, &mut sink, pages))?;
        sink.sums.push(crc32fast::hash(&draft.header));
        let sums: Vec<u8> = sink.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        sink.out.write_all(&sums).map_err(|e| sink.failed(&e))
    }

    /// The pages of each layer, head and class that has any, in the order of the file.
    fn pages_of<'a>(
        &self,
        plan: &Compiled,
        sequence: &'a Sequence<B::Chunk>,
        compress: Compress,
    ) -> Result<Vec<Pages<'a, B::Chunk>>> {
        let mut all = Vec::new();
        for (layer, (state, layer_plan)) in sequence.layers.iter().zip(&plan.layers).enumerate() {
            for (head, table) in state.tables.iter().enumerate() {
                for (class, codec) in layer_plan.codec.classes[head].iter().enumerate() {
                    let entries: Vec<_> = table.entries().filter(|entry| entry.class() == class).collect();
                    if entries.is_empty() {
                        continue;
                    }
                    let name = format!("{}.{class}", name("pages", layer, head));
                    let shape = [entries.len(), codec.desc.page_bytes as usize];
                    let section = Section::new(name, Dtype::U8, &shape);
                    let pages = Pages { head: (layer, head), class, entries, section, packed: None };
                    let packed = compress == Compress::Deflate;
                    all.push(if packed { self.deflate(plan, pages)? } else { pages });
                }
            }
        }
        Ok(all)
    }

    fn deflate<'a>(&self, plan: &Compiled, mut pages: Pages<'a, B::Chunk>) -> Result<Pages<'a, B::Chunk>> {
        let mut deflater = Deflater::new();
        self.each_page(plan, &pages, |bytes| {
            deflater.push(bytes);
            Ok(())
        })?;
        let packed = deflater.finish();
        pages.section.shape = vec![packed.len()];
        pages.packed = Some(packed);
        Ok(pages)
    }

    fn write_pages(&self, plan: &Compiled, sink: &mut Sink<'_>, pages: &Pages<'_, B::Chunk>) -> Result<()> {
        if let Some(packed) = &pages.packed {
            return sink.section(packed);
        }
        let mut sum = crc32fast::Hasher::new();
        self.each_page(plan, pages, |bytes| {
            sum.update(bytes);
            sink.out.write_all(bytes).map_err(|e| sink.failed(&e))
        })?;
        sink.sums.push(sum.finalize());
        Ok(())
    }

    /// Calls `take` with the bytes of each page, in which slots that were never filled are zeros: what a page held
    /// before, for another sequence, is nobody's business.
    fn each_page(
        &self,
        plan: &Compiled,
        pages: &Pages<'_, B::Chunk>,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (layer, head) = pages.head;
        let desc = &plan.layers[layer].codec.classes[head][pages.class].desc;
        let bytes = desc.page_bytes as usize;
        let (mut page, mut clean) = (vec![0; bytes], vec![0; bytes]);
        for entry in &pages.entries {
            self.backend.read_page(entry.page(), &mut page)?;
            clean.fill(0);
            copy_filled(desc, &page, &mut clean, entry.count());
            take(&clean)?;
        }
        Ok(())
    }
}
