//! One sequence of gaussian keys and values in one layer, stored as a store would.
#![allow(dead_code)] // every bench uses a part

use kvrs_codec::backend::{Backend, RawRows};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, HeadCodec, Side, View};
use kvrs_core::LayerShape;
use kvrs_core::page::{Arena, Table, Zone};
use kvrs_cpu::Cpu;
use kvrs_cpu::memory::Chunk;
use std::sync::Arc;

const SINKS: usize = 4;
const RECENT: usize = 128;

/// Numbers close to gaussian: sums of twelve uniform ones.
pub(crate) fn normal(seed: u64, n: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 2f32.powi(24)
    };
    (0..n).map(move |_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0)
}

/// A layer with one sequence in it, on one thread.
pub(crate) struct Store {
    pub(crate) cpu: Arc<Cpu>,
    pub(crate) layer: LayerCodec,
    pub(crate) tables: Vec<Table<Chunk>>,
    pub(crate) tokens: usize,
}

/// The layer's codec: raw pages and TurboQuant.
pub(crate) fn codecs(bits: f64, shape: &LayerShape) -> [HeadCodec; 2] {
    let mut cache = ConstantCache::default();
    let mut side = |side: Side, d: usize| {
        let context =
            SideContext { side, d, layer: 0, seed: 1, window: Dtype::Bf16, rope: None, constant: None };
        CodecSpec::turboquant(bits).build(&context, &mut cache).expect("a legal rate")
    };
    let (key, value) = (side(Side::Key, shape.key_dim), side(Side::Value, shape.value_dim));
    let raw = quant::raw(shape, Dtype::Bf16).expect("a legal shape");
    [raw, quant::assemble(key, value, 1).expect("sides that fit a page")]
}

impl Store {
    pub(crate) fn new(bits: f64, [query_heads, kv_heads]: [usize; 2], d: usize, tokens: usize) -> Self {
        let shape = LayerShape { query_heads, kv_heads, key_dim: d, value_dim: d, rope: None, sliding: None };
        let classes = vec![codecs(bits, &shape).to_vec(); kv_heads];
        let layer = LayerCodec { shape, heads_per_group: 1, classes };
        let cpu = Arc::new(Cpu::new(Some(1)).expect("one thread"));
        let mut store = Self { cpu, layer, tables: Vec::new(), tokens };
        let [k, v] = [1, 2].map(|seed| -> Vec<u8> {
            normal(seed, kv_heads * tokens * d).flat_map(f32::to_le_bytes).collect()
        });
        let geometry = Geometry::contiguous(Dtype::F32, [1, kv_heads, tokens, d]);
        let [k, v] =
            [("k", &k), ("v", &v)].map(|(name, x)| View::new(name, x, geometry).expect("tensors fit"));
        store.tables = (0..kv_heads).map(|head| store.fill(k, v, head)).collect();
        store
    }

    fn fill(&self, k: View<'_>, v: View<'_>, head: usize) -> Table<Chunk> {
        let arena = Arena::new(Arc::clone(&self.cpu), None).expect("no limit");
        let [raw, packed] = &self.layer.classes[head][..] else { panic!("two classes") };
        let (group, mut table) = (packed.desc.group as usize, Table::default());
        let page = |codec: &HeadCodec| {
            let bytes = codec.desc.page_bytes;
            arena.reserve("bench", &[(bytes, 1)]).expect("no limit").take(bytes)
        };
        for token in 0..self.tokens {
            let zone = if token < SINKS { Zone::Sinks } else { Zone::Window };
            let (to, slot) = table.push_raw(zone, token, || page(raw));
            self.cpu.store_raw(raw, to, slot, RawRows { k, v, row: 0, head, columns: &[token] });
            let window = token + 1 - SINKS.min(token + 1);
            if window >= RECENT + group && (window - RECENT).is_multiple_of(group) {
                table.seal(
                    1,
                    group,
                    packed.desc.slots as usize,
                    || page(packed),
                    |pages, first, to, slot| {
                        self.cpu.seal((raw, packed), pages, first as i64, to, slot);
                    },
                );
            }
        }
        table
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
        let (mut k, mut v) = (vec![0.0; self.d()], vec![0.0; self.d()]);
        for entry in self.tables[head].entries() {
            let codec = &self.layer.classes[head][entry.class()];
            for (slot, _) in entry.live_slots() {
                self.cpu.decode_slot(codec, entry, 0, slot, 0, (&mut k, &mut v));
                with(&k, &v);
            }
        }
    }
}
