//! Loading a sequence: everything is checked, then pages are reserved, then filled; only then the store changes.

use super::Compress;
use super::check;
use super::deflate::Inflater;
use super::header::{Section, wrong};
use super::source::Source;
use super::state::{self, ENTRY_COLUMNS, HEAD_COLUMNS, HeadImage, LAYER_COLUMNS, LayerImage, name};
use crate::compile::{Compiled, LayerPlan};
use crate::evict::facts::HeadFacts;
use crate::sequence::Sequence;
use crate::store::{KvStore, Types};
use kvrs_codec::Dtype;
use kvrs_codec::backend::Backend;
use kvrs_core::page::{Page, Supply};
use kvrs_core::{Result, SeqId};
use safetensors::Dtype as Element;
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Seek};

/// Bytes that a header takes for its fields, and for each section, at most.
const HEADER_FIELDS: u64 = 16 << 10;
const HEADER_SECTION: u64 = 192;
/// Bytes that are read at once: more than a buffered reader holds, so that they are not copied twice.
const PIECE: usize = 256 << 10;
/// Small arrays of a head.
const HEAD_ARRAYS: usize = 5;

impl<B: Backend> KvStore<B> {
    /// Reads a sequence as [`KvStore::load`] does, from anything that can be read and searched; `what` names it.
    ///
    /// # Errors
    /// As [`KvStore::load`].
    pub fn load_from(&self, what: &str, reader: impl Read + Seek) -> Result<SeqId> {
        let (sequence, types) = self.read_sequence(what, reader)?;
        if let Some(types) = types.filter(|types| self.types.get_or_init(|| *types).window != types.window) {
            return Err(wrong(what, "window", types.window.name(), "that of the store's first append"));
        }
        Ok(self.insert(vec![sequence])?[0])
    }

    /// Reads and checks a sequence, and the types that its store had.
    pub(crate) fn read_sequence(
        &self,
        what: &str,
        reader: impl Read + Seek,
    ) -> Result<(Sequence<B::Chunk>, Option<Types>)> {
        let shape = &self.plan.spec().shape;
        let heads: usize = shape.layers.iter().map(|layer| layer.kv_heads).sum();
        let sections = heads * (HEAD_ARRAYS + self.classes()?) + 3;
        let mut source = Source::open(what, reader, HEADER_FIELDS + sections as u64 * HEADER_SECTION)?;
        let fields = &source.fields;
        if fields.plan != self.plan.hash() {
            return Err(wrong(
                what,
                "plan",
                &fields.plan,
                format!("{}, that of the store", self.plan.hash()),
            ));
        }
        let types = self.types_of_file(what, fields.types)?;
        let plan = self.plan.compiled(types.map_or(Dtype::F16, |types| types.window))?;
        let images = read_images(&mut source, plan)?;
        check_images(&source, plan, &images)?;
        let supply = self.reserve_pages(&source, plan, &images)?;
        let sequence = self.restore(&mut source, plan, images, supply)?;
        sequence.check()?;
        source.end()?;
        Ok((sequence, types))
    }

    /// Page classes of a head at most.
    fn classes(&self) -> Result<usize> {
        let layers = &self.plan.compiled(Dtype::F16)?.layers;
        Ok(layers.iter().map(|layer| layer.codec.classes[0].len()).max().unwrap_or(1))
    }

    /// The types of a file, if its 16-bit rows are what the store keeps.
    fn types_of_file(&self, what: &str, types: Option<(Dtype, Dtype)>) -> Result<Option<Types>> {
        let Some((input, window)) = types else { return Ok(None) };
        let asked = self.plan.spec().window()?.filter(|asked| *asked != window);
        let fixed = self.types.get().map(|types| types.window).filter(|fixed| *fixed != window);
        match asked.or(fixed) {
            Some(other) => {
                Err(wrong(what, "window", window.name(), format!("{}, that of the store", other.name())))
            }
            None => Ok(Some(Types { input, window })),
        }
    }

    /// Takes the pages of all entries, after a look at whether the file is long enough for them.
    fn reserve_pages(
        &self,
        source: &Source<'_, impl Read + Seek>,
        plan: &Compiled,
        layers: &[LayerImage],
    ) -> Result<Supply<B::Chunk>> {
        let mut wants = BTreeMap::<u32, usize>::new();
        for ((layer, head), image) in heads(layers) {
            for (_, parts) in &image.entries {
                *wants.entry(plan.layers[layer].class(head, parts.class).desc.page_bytes).or_default() += 1;
            }
        }
        let bytes: u64 = wants.iter().map(|(bytes, count)| u64::from(*bytes) * *count as u64).sum();
        if bytes > source.size.saturating_mul(2) {
            let allowed = format!("at most twice the {} bytes of the file", source.size);
            return Err(wrong(source.what, "pages", format!("{bytes} bytes"), allowed));
        }
        self.pages(&format!("loading {}", source.what), &wants.into_iter().collect::<Vec<_>>())
    }

    /// Fills pages and tables.
    fn restore(
        &self,
        source: &mut Source<'_, impl Read + Seek>,
        plan: &Compiled,
        layers: Vec<LayerImage>,
        mut supply: Supply<B::Chunk>,
    ) -> Result<Sequence<B::Chunk>> {
        let mut sequence = self.empty();
        sequence.start = source.fields.start;
        sequence.target = source.fields.tokens;
        for (layer, image) in layers.into_iter().enumerate() {
            let (state, layer_plan) = (&mut sequence.layers[layer], &plan.layers[layer]);
            (state.length, state.origin, state.longest) = (image.length, image.origin, image.longest);
            (state.evict.budget, state.evict.outcome) = (image.budget, image.outcome);
            for (head, image) in image.heads.into_iter().enumerate() {
                let mut pages = self.read_pages(source, layer_plan, (layer, head), &image, &mut supply)?;
                for (zone, parts) in &image.entries {
                    let page =
                        pages[usize::from(parts.class)].pop_front().expect("a page was read for each entry");
                    state.tables[head].restore(*zone, page, parts.clone());
                }
                state.evict.heads[head] = facts(layer_plan, image);
            }
        }
        Ok(sequence)
    }

    /// The pages of a head, by class.
    fn read_pages(
        &self,
        source: &mut Source<'_, impl Read + Seek>,
        plan: &LayerPlan,
        (layer, head): (usize, usize),
        image: &HeadImage,
        supply: &mut Supply<B::Chunk>,
    ) -> Result<Vec<VecDeque<Page<B::Chunk>>>> {
        let mut all = Vec::new();
        for (class, codec) in plan.codec.classes[head].iter().enumerate() {
            let count = image.entries.iter().filter(|(_, parts)| usize::from(parts.class) == class).count();
            let bytes = codec.desc.page_bytes;
            let mut pages: VecDeque<_> = (0..count).map(|_| supply.take(bytes)).collect();
            if count > 0 {
                let name = format!("{}.{class}", name("pages", layer, head));
                let packed = source.fields.compress == Compress::Deflate;
                let shape = if packed { None } else { Some([count, bytes as usize]) };
                let section =
                    source.next(&name, Element::U8, |found| shape.is_none_or(|shape| found == shape))?;
                self.fill(source, &section, bytes as usize, pages.make_contiguous())?;
            }
            all.push(pages);
        }
        Ok(all)
    }

    fn fill(
        &self,
        source: &mut Source<'_, impl Read + Seek>,
        section: &Section,
        page_bytes: usize,
        pages: &mut [Page<B::Chunk>],
    ) -> Result<()> {
        let what = format!("{}: {}", source.what, section.name);
        let packed = source.fields.compress == Compress::Deflate;
        let at_once = (PIECE / page_bytes).clamp(1, pages.len());
        let (mut bytes, mut inflater) = (vec![0; at_once * page_bytes], Inflater::new());
        let mut reader = source.section(section);
        for pages in pages.chunks_mut(at_once) {
            let bytes = &mut bytes[..pages.len() * page_bytes];
            if packed {
                inflater.fill(&what, &mut reader, bytes)?;
            } else {
                reader.fill(bytes)?;
            }
            for (page, bytes) in pages.iter_mut().zip(bytes.chunks_exact(page_bytes)) {
                self.backend.write_page(page, bytes)?;
            }
        }
        if packed {
            inflater.end(&what, &mut reader)?;
        }
        reader.end()
    }
}

/// Each head of each layer.
fn heads(layers: &[LayerImage]) -> impl Iterator<Item = ((usize, usize), &HeadImage)> {
    let layers = layers.iter().enumerate();
    layers.flat_map(|(i, layer)| layer.heads.iter().enumerate().map(move |(head, image)| ((i, head), image)))
}

/// Reads the small arrays.
fn read_images(source: &mut Source<'_, impl Read + Seek>, plan: &Compiled) -> Result<Vec<LayerImage>> {
    let what = source.what;
    let layers = plan.layers.len();
    let rows = source.rows::<u64, LAYER_COLUMNS>("layers", Element::U64, Some(layers))?;
    let place = |i: usize| format!("{what}: layer {i}");
    let mut images: Vec<LayerImage> =
        rows.into_iter().enumerate().map(|(i, row)| state::layer(&place(i), row)).collect::<Result<_>>()?;
    let total = plan.layers.iter().map(|layer| layer.codec.classes.len()).sum();
    let mut rows = source.rows::<u64, HEAD_COLUMNS>("heads", Element::U64, Some(total))?.into_iter();
    for (layer, (image, plan)) in images.iter_mut().zip(&plan.layers).enumerate() {
        for head in 0..plan.codec.classes.len() {
            let what = format!("{}, head {head}", place(layer));
            let mut read = state::head(&what, rows.next().expect("one row for each head"))?;
            read_head(source, &what, (layer, head), &mut read)?;
            image.heads.push(read);
        }
    }
    Ok(images)
}

fn read_head(
    source: &mut Source<'_, impl Read + Seek>,
    what: &str,
    (layer, head): (usize, usize),
    image: &mut HeadImage,
) -> Result<()> {
    let named = |kind| name(kind, layer, head);
    let rows = source.rows::<u32, ENTRY_COLUMNS>(&named("entries"), Element::U32, None)?;
    let indices = source.numbers::<u32>(&named("indices"), Element::U32)?;
    image.entries = state::entries(what, &rows, &indices)?;
    image.attention = source.numbers(&named("attention"), Element::F32)?;
    image.norms = source.numbers(&named("norms"), Element::F32)?;
    let counts = source.rows::<u16, 2>(&named("history"), Element::U16, None)?;
    match &mut image.history {
        Some((_, own)) => *own = counts,
        None if counts.is_empty() => {}
        None => return Err(wrong(what, "history", "counts", "none: no query was counted")),
    }
    Ok(())
}

fn check_images(source: &Source<'_, impl Read + Seek>, plan: &Compiled, images: &[LayerImage]) -> Result<()> {
    let (what, tokens) = (source.what, source.fields.tokens);
    let (start, types) = (source.fields.start.is_none(), source.fields.types.is_none());
    if start != (tokens == 0) || types != (tokens == 0) {
        return Err(wrong(
            what,
            "start, input and window",
            "another",
            "none if there are no tokens, only then",
        ));
    }
    for (i, (image, plan)) in images.iter().zip(&plan.layers).enumerate() {
        check::layer(&format!("{what}: layer {i}"), plan, tokens, image)?;
    }
    Ok(())
}

fn facts(plan: &LayerPlan, image: HeadImage) -> HeadFacts {
    let counted = |(seen, counts)| check::history(plan.evict.as_ref(), seen, counts);
    HeadFacts {
        attention: image.attention,
        history: image.history.and_then(counted),
        norms: image.norms,
        evicted: image.evicted,
    }
}
