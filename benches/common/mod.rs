//! One sequence of gaussian keys and values in one layer, stored as a store would.
#![allow(dead_code)] // every bench uses a part

use criterion::Criterion;
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, RawRows, Results};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, HeadCodec, Side, View, ViewMut};
use kvrs_core::LayerShape;
use kvrs_core::page::{Arena, Page, Table, Zone};
use kvrs_cpu::memory::Chunk;
use kvrs_cpu::{Cpu, Isa};
use std::sync::Arc;
use std::time::Duration;

const SINKS: usize = 4;
const RECENT: usize = 128;
/// Tokens after which keys and values come again: what is read does not depend on what it says.
const DISTINCT: usize = 4096;

/// Short runs: a record of all benchmarks takes a minute.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
}

/// One thread on the kernels of an instruction set.
pub(crate) fn cpu(isa: Isa) -> Arc<Cpu> {
    Arc::new(
        Cpu::new(Some(1))
            .and_then(|cpu| cpu.with_isa(isa))
            .expect("one thread on an available instruction set"),
    )
}

/// Numbers close to gaussian: sums of twelve uniform ones.
pub(crate) fn normal(seed: u64, n: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 2f32.powi(24)
    };
    (0..n).map(move |_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
}

/// A layer with one sequence in it.
pub(crate) struct Store {
    cpu: Arc<Cpu>,
    pub(crate) layer: LayerCodec,
    pub(crate) tables: Vec<Table<Chunk>>,
    pub(crate) tokens: usize,
}

/// The layer's codec: raw pages and TurboQuant.
pub(crate) fn codecs(bits: f64, shape: &LayerShape) -> [HeadCodec; 2] {
    let mut cache = ConstantCache::default();
    let mut side = |side: Side, d: usize| {
        let context = SideContext {
            side,
            d,
            layer: 0,
            seed: 1,
            window: Dtype::Bf16,
            rope: None,
            constant: None,
            group: 0,
            arrays: None,
        };
        CodecSpec::turboquant(bits).build(&context, &mut cache).expect("a legal rate")
    };
    let (key, value) = (side(Side::Key, shape.key_dim), side(Side::Value, shape.value_dim));
    let raw = quant::raw(shape, Dtype::Bf16).expect("a legal shape");
    [raw, quant::assemble(key, value, 1).expect("sides that fit a page")]
}

impl Store {
    /// `bits` of 16 leave every token in a raw page.
    pub(crate) fn new(bits: f64, [query_heads, kv_heads]: [usize; 2], d: usize, tokens: usize) -> Self {
        let shape = LayerShape { query_heads, kv_heads, key_dim: d, value_dim: d, rope: None, sliding: None };
        let head = if bits < 16.0 {
            codecs(bits, &shape).to_vec()
        } else {
            vec![quant::raw(&shape, Dtype::Bf16).expect("a legal shape")]
        };
        let layer = LayerCodec { shape, heads_per_group: 1, classes: vec![head; kv_heads] };
        let mut store = Self { cpu: cpu(Isa::detected()), layer, tables: Vec::new(), tokens };
        let columns = tokens.min(DISTINCT);
        let [k, v] = [1, 2].map(|seed| -> Vec<u8> {
            normal(seed, kv_heads * columns * d).flat_map(f32::to_le_bytes).collect()
        });
        let geometry = Geometry::contiguous(Dtype::F32, [1, kv_heads, columns, d]);
        let [k, v] =
            [("k", &k), ("v", &v)].map(|(name, x)| View::new(name, x, geometry).expect("tensors fit"));
        store.tables = (0..kv_heads).map(|head| store.fill(k, v, head)).collect();
        store
    }

    fn fill(&self, k: View<'_>, v: View<'_>, head: usize) -> Table<Chunk> {
        let arena = Arena::new(Arc::clone(&self.cpu), None).expect("no limit");
        let page = |codec: &HeadCodec| {
            let bytes = codec.desc.page_bytes;
            arena.reserve("bench", &[(bytes, 1)]).expect("no limit").take(bytes)
        };
        let (classes, mut table) = (&self.layer.classes[head], Table::default());
        for token in 0..self.tokens {
            let zone = if token < SINKS { Zone::Sinks } else { Zone::Window };
            let (to, slot) = table.push_raw(zone, token, || page(&classes[0]), |_, _| {});
            let rows = RawRows { k, v, row: 0, head, columns: &[token % DISTINCT] };
            self.cpu.store_raw(&classes[0], to, slot, rows);
            if let [raw, packed] = &classes[..] {
                self.seal(&mut table, (raw, packed), token + 1, || page(packed));
            }
        }
        table
    }

    /// Encodes the group that `length` tokens push out of the window, if it is whole.
    fn seal(
        &self,
        table: &mut Table<Chunk>,
        codecs: (&HeadCodec, &HeadCodec),
        length: usize,
        page: impl FnMut() -> Page<Chunk>,
    ) {
        let desc = &codecs.1.desc;
        let (group, window) = (desc.group as usize, length - SINKS.min(length));
        if window < RECENT + group || !(window - RECENT).is_multiple_of(group) {
            return;
        }
        table.seal(
            1,
            group,
            desc.slots as usize,
            page,
            |_, _| {},
            |pages, first, to, slot| {
                let positions: Vec<i64> = (first as i64..).take(group).collect();
                self.cpu.seal(codecs, pages, &positions, to, slot);
            },
        );
    }

    pub(crate) fn d(&self) -> usize {
        self.layer.shape.key_dim
    }

    /// Bytes of all pages: what a decode step reads.
    pub(crate) fn bytes(&self) -> u64 {
        self.tables.iter().flat_map(Table::entries).map(|entry| entry.page().bytes() as u64).sum()
    }

    /// Calls `with` on every key and value of a head.
    pub(crate) fn each_decoded(&self, head: usize, mut with: impl FnMut(&[f32], &[f32])) {
        let [mut k, mut v] = [Vec::new(), Vec::new()];
        for entry in self.tables[head].entries() {
            let codec = &self.layer.classes[head][entry.class()];
            self.cpu.decode_live(codec, entry, 0, (Side::Key, 0), &mut k);
            self.cpu.decode_live(codec, entry, 0, (Side::Value, 0), &mut v);
            k.chunks_exact(self.d()).zip(v.chunks_exact(self.d())).for_each(|(k, v)| with(k, v));
        }
    }
}

/// Queries of one sequence and what they give.
pub(crate) struct Step<'a> {
    store: &'a Store,
    rows: usize,
    q: Vec<u8>,
    out: Vec<u8>,
}

impl<'a> Step<'a> {
    pub(crate) fn new(store: &'a Store, rows: usize) -> Self {
        let heads = store.layer.shape.query_heads;
        let q = normal(7, heads * rows * store.d()).flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        Self { out: vec![0; q.len()], q, rows, store }
    }

    pub(crate) fn run(&mut self, cpu: &Cpu) {
        let heads = self.store.layer.shape.query_heads;
        let geometry = Geometry::contiguous(Dtype::F32, [1, heads, self.rows, self.store.d()]);
        let row: AttendRow<'_, Chunk> = AttendRow {
            tables: self.store.tables.iter().collect(),
            start: 0,
            length: self.store.tokens,
            columns: (0..self.rows).collect(),
            first_index: self.store.tokens - self.rows,
        };
        let call = AttendCall {
            layer: &self.store.layer,
            rows: vec![row],
            q: View::new("q", &self.q, geometry).expect("q fits"),
            own: None,
            causal: true,
            scale: (self.store.d() as f32).powf(-0.5),
            softcap: None,
            sink_logits: None,
            top_k: None,
        };
        let mut out = ViewMut::new("out", &mut self.out, geometry).expect("out fits");
        cpu.attend(&call, Results { out: Some(&mut out), lse: None, received: None, value_tiles: None })
            .expect("no device that fails");
    }

    /// The last query of head 0, and what it gives.
    pub(crate) fn last(&self) -> [Vec<f64>; 2] {
        let row_bytes = 4 * self.store.d();
        [&self.q, &self.out].map(|bytes| {
            let row = &bytes[(self.rows - 1) * row_bytes..][..row_bytes];
            row.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
        })
    }

    /// Attention of the last query of head 0 over decoded slots.
    pub(crate) fn expected(&self) -> Vec<f64> {
        let [q, _] = self.last();
        let scale = (self.store.d() as f64).powf(-0.5);
        let (mut total, mut sum) = (0.0, vec![0.0; self.store.d()]);
        self.store.each_decoded(0, |k, v| {
            let logit: f64 = q.iter().zip(k).map(|(q, k)| q * f64::from(*k)).sum();
            let weight = (logit * scale).exp();
            total += weight;
            sum.iter_mut().zip(v).for_each(|(s, v)| *s += weight * f64::from(*v));
        });
        sum.into_iter().map(|s| s / total).collect()
    }
}
