//! What fuzzers call, and a test that replays their corpus: whatever the bytes, an error or an answer, never a panic.

use crate::feeding::feed;
use kvrs::{Compress, Cpu, Error, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Rope, SeqId};
use kvrs_codec::desc::{Arith, Elem, Inner, NONE, PageDesc, Path, RunDesc, Side, SideDesc, TILE};
use kvrs_codec::layout::{copy_filled, copy_slot, movable, run_range, unpack_cells};
use std::io::Cursor;

/// Largest page of a descriptor that is looked into.
const MAX_PAGE: u32 = 1 << 20;

/// A plan whose files and sequences the corpus holds: an evicting layer and two with sliding windows.
///
/// # Panics
/// Never: the plan is a sound one.
#[must_use]
pub fn plan() -> Plan {
    let rope = Some(Rope::new(1e4));
    let full = LayerShape { query_heads: 2, kv_heads: 1, key_dim: 16, value_dim: 16, rope, sliding: None };
    let sliding = |window| LayerShape { sliding: Some(window), ..full.clone() };
    let shape = ModelShape { layers: vec![full.clone(), sliding(60), sliding(20)] };
    let codec = kvrs::CodecSpec::turboquant(2.0);
    let scissorhands = serde_json::json!({"name": "scissorhands", "params": {"budget": 40, "history": 8}});
    let evict = vec![Some(serde_json::from_value(scissorhands).expect("a policy")), None, None];
    let spec = PlanSpec::uniform(shape, codec.clone(), codec);
    Plan::new(PlanSpec { sinks: 2, recent: 8, evict, ..spec }).expect("a sound plan")
}

/// A store of [`plan`] that may hold 8 MiB.
///
/// # Panics
/// Never: see [`plan`].
#[must_use]
pub fn store() -> KvStore<Cpu> {
    KvStore::new(plan(), Cpu::shared(), Some(8 << 20)).expect("a store")
}

/// Loads a sequence file; what could be loaded is used and freed. Whether it could.
///
/// # Panics
/// If an error is not typed, the store changes with it, or what was loaded cannot be used.
#[must_use]
pub fn sequence_file(bytes: &[u8]) -> bool {
    thread_local!(static STORE: KvStore<Cpu> = store());
    STORE.with(|store| loaded_and_used(store, bytes))
}

fn loaded_and_used(store: &KvStore<Cpu>, bytes: &[u8]) -> bool {
    let before = store.stats().expect("stats");
    match store.load_from("a file", Cursor::new(bytes)) {
        Err(error) => {
            assert!(!matches!(error, Error::Internal(_)), "{error}");
            assert_eq!(store.stats().expect("stats"), before);
            false
        }
        Ok(id) => {
            use_up(store, id);
            store.free(id).expect("a live sequence");
            store.check().expect("sound pages");
            assert_eq!(store.stats().expect("stats").bytes_total, before.bytes_total);
            true
        }
    }
}

/// What a sequence may meet after it was loaded.
fn use_up(store: &KvStore<Cpu>, id: SeqId) {
    store.check().expect("sound pages and tables");
    let length = store.length(id, None).expect("a length");
    let mut file = Vec::new();
    store.save_to("memory", &mut file, id, Compress::Deflate).expect("a file");
    for (step, tokens) in [1, 1, 70, 3].into_iter().enumerate() {
        match feed(store, id, tokens, step as u64) {
            Ok(_) | Err(Error::Capacity { .. } | Error::Sequence { .. }) => {}
            Err(error) => panic!("{tokens} tokens more: {error}"),
        }
        store.check().expect("sound pages and tables");
    }
    for n in [length, length / 2, 1.min(length), 0] {
        match store.truncate(id, n) {
            Ok(()) => drop(feed(store, id, 20, 9).expect("tokens after a truncation")),
            Err(error) => assert!(matches!(error, Error::Sequence { .. }), "{error}"),
        }
        store.check().expect("sound pages and tables");
    }
}

/// Reads a plan file. Whether it could be read.
///
/// # Panics
/// If an error is not typed.
#[must_use]
pub fn plan_file(bytes: &[u8]) -> bool {
    match Plan::from_bytes("a file", bytes) {
        Err(Error::Internal(text)) => panic!("{text}"),
        read => read.is_ok(),
    }
}

/// Makes a page descriptor out of bytes and, if it is accepted, moves and unpacks a page by it. Whether it was.
///
/// # Panics
/// If an accepted descriptor leads outside of its page.
#[must_use]
pub fn page_descriptor(bytes: &[u8]) -> bool {
    let mut words = Words(bytes);
    let desc = words.page();
    if desc.page_bytes > MAX_PAGE || desc.validate().is_err() {
        return false;
    }
    let rest = words.0;
    let page: Vec<u8> = (0..desc.page_bytes as usize)
        .map(|i| rest.get(i % rest.len().max(1)).copied().unwrap_or(7))
        .collect();
    let mut copy = vec![0; page.len()];
    copy_filled(&desc, &page, &mut copy, desc.slots as usize / 2 + 1);
    if movable(&desc) {
        copy_slot(&desc, (&page, 0), (&mut copy, desc.slots as usize - 1));
    }
    for side in [Side::Key, Side::Value] {
        for (run, tile) in
            desc.side(side).runs.iter().flat_map(|run| (0..desc.tiles()).map(move |tile| (run, tile)))
        {
            let codes = &page[run_range(&desc, side, run, tile)];
            let blocks = if run.width == 16 { 0 } else { run.channels as usize / TILE };
            for block in 0..blocks {
                unpack_cells(run.width, codes, block, run.channels as usize, &mut [[0; 64]; 4]);
            }
        }
    }
    true
}

/// Numbers out of bytes; zeros behind their end.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn word(&mut self) -> u32 {
        let (word, rest) = self.0.split_at(self.0.len().min(4));
        self.0 = rest;
        word.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.word() as usize % all.len()]
    }

    fn page(&mut self) -> PageDesc {
        let [slots, group, heads, page_bytes] = std::array::from_fn(|_| self.word());
        PageDesc { slots, group, heads, page_bytes, key: self.side(), value: self.side() }
    }

    fn side(&mut self) -> SideDesc {
        let path = self.one_of(&[Path::Dot, Path::Tile]);
        let inner = self.one_of(&[Inner::None, Inner::GroupChannel, Inner::TokenBlock]);
        let [parts, d, n, vec_len, block, base_pairs, sparse_per_tile] = std::array::from_fn(|_| self.word());
        let [tile_ops, tile_bytes, codes_at, scales_at, scales, inner_at, sparse_at] =
            std::array::from_fn(|_| self.word());
        let runs = (0..self.word() % 45).map(|_| self.run()).collect();
        SideDesc {
            path,
            parts,
            d,
            n,
            vec_len,
            inner,
            block,
            base_pairs,
            sparse_per_tile,
            tile_ops,
            tile_bytes,
            codes_at,
            scales_at,
            scales,
            inner_at,
            sparse_at,
            runs,
        }
    }

    fn run(&mut self) -> RunDesc {
        let elems = [Elem::Lut8, Elem::Int, Elem::F16, Elem::Bf16, Elem::E4m3, Elem::E5m2, Elem::Lut32];
        RunDesc {
            elem: self.one_of(&elems),
            arith: self.one_of(&[Arith::I8, Arith::I8x2, Arith::F32]),
            width: self.word(),
            scale: self.word(),
            channels: self.word(),
            vec_at: self.word(),
            at: self.word(),
            lut_at: self.word(),
            step: f32::from_bits(self.word()),
            zero: f32::from_bits(self.word()),
        }
    }
}

/// The bytes that [`page_descriptor`] takes for a descriptor.
#[must_use]
pub fn descriptor_bytes(desc: &PageDesc) -> Vec<u8> {
    let mut words = vec![desc.slots, desc.group, desc.heads, desc.page_bytes];
    for side in [&desc.key, &desc.value] {
        words.extend([
            side.path as u32,
            side.inner as u32,
            side.parts,
            side.d,
            side.n,
            side.vec_len,
            side.block,
        ]);
        words.extend([side.base_pairs, side.sparse_per_tile, side.tile_ops, side.tile_bytes, side.codes_at]);
        words.extend([side.scales_at, side.scales, side.inner_at, side.sparse_at, side.runs.len() as u32]);
        for run in &side.runs {
            words.extend([
                run.elem as u32,
                run.arith as u32,
                run.width,
                run.scale,
                run.channels,
                run.vec_at,
                run.at,
            ]);
            words.extend([run.lut_at, run.step.to_bits(), run.zero.to_bits()]);
        }
    }
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The descriptors of a few codecs, as [`descriptor_bytes`].
///
/// # Panics
/// Never: the codecs are sound.
#[must_use]
pub fn descriptors() -> Vec<Vec<u8>> {
    let run = |width, elem, channels, at, vec_at| RunDesc {
        width,
        elem,
        arith: Arith::F32,
        scale: if width == 16 { NONE } else { 0 },
        channels,
        vec_at,
        at,
        lut_at: if elem == Elem::Lut8 { 0 } else { NONE },
        step: 1.0,
        zero: 0.0,
    };
    let side = |runs: Vec<RunDesc>, tile_bytes, codes_at, scales_at| SideDesc {
        path: Path::Dot,
        parts: 1,
        d: 32,
        n: 32,
        vec_len: 32,
        inner: Inner::None,
        block: 0,
        base_pairs: 0,
        sparse_per_tile: 0,
        tile_ops: 0,
        tile_bytes,
        codes_at,
        scales_at,
        scales: 1,
        inner_at: 0,
        sparse_at: 0,
        runs,
    };
    let page =
        |slots, page_bytes, key, value| PageDesc { slots, group: 16, heads: 1, page_bytes, key, value };
    let rows = |at, scales| side(vec![run(16, Elem::F16, 32, 0, 0)], 1024, at, scales);
    let codes = |at, scales| {
        side(vec![run(4, Elem::Lut8, 16, 0, 0), run(3, Elem::Int, 16, 128, 16)], 224, at, scales)
    };
    let pages =
        [page(16, 2112, rows(0, 2048), rows(1024, 2080)), page(64, 2048, codes(0, 1792), codes(896, 1920))];
    let sound = |page: &PageDesc| page.validate().map(|()| descriptor_bytes(page));
    pages.iter().map(|page| sound(page).expect("a sound descriptor")).collect()
}
