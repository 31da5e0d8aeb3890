//! Every quantiser that needs no calibration, on every instruction set: sealed bytes and attention on them.
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod common;

use common::specs::{codec, one_head};
use common::{Rng, Tensor, exact};
use half::f16;
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, RawRows, Results};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::quant;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, HeadCodec, Side, ViewMut};
use kvrs_core::Rope;
use kvrs_core::page::{Arena, Page, Table, Zone};
use kvrs_cpu::memory::{Chunk, bytes, bytes_mut};
use kvrs_cpu::{Cpu, Isa};
use std::sync::Arc;

const TOKENS: usize = 203;
const RECENT: usize = 12;
const HEADS: usize = 3;
const START: i64 = 500;

/// Keys, values, channels of a head.
const CASES: [(&str, &str, usize); 22] = [
    ("int8", "int8", 64),
    ("int8", "int8", 72),
    ("fp8 e4m3", "fp8 e5m2", 80),
    ("fp8 e5m2", "fp8 e4m3", 128),
    ("kivi 2 32", "kivi 2 32", 128),
    ("kivi 4 16", "kivi 4 64", 80),
    ("kivi 3 64", "kivi 1 16", 112),
    ("kivi 8 32", "kivi 8 32", 72),
    ("rabitq 1", "rabitq 2", 128),
    ("rabitq 3", "rabitq 4", 64),
    ("rabitq 5", "rabitq 6", 80),
    ("rabitq 7", "rabitq 8", 128),
    ("rabitq 4 bound", "rabitq 1", 64),
    ("prod 1", "prod 2", 64),
    ("prod 2", "prod 1", 80),
    ("prod 3", "prod 4", 128),
    ("prod 4", "prod 5", 72),
    ("prod 8", "prod 7", 64),
    ("prod 3 orthogonal", "prod 3 orthogonal", 80),
    ("qjl 256", "kivi 2 32", 128),
    ("qjl 64", "turboquant 2.5", 80),
    ("qjl 1024", "int8", 64),
];

/// One head with its tokens.
struct Case {
    name: String,
    layer: LayerCodec,
    /// 16-bit rows instead of the codec.
    plain: LayerCodec,
    k: Tensor,
    v: Tensor,
    q: Tensor,
}

impl Case {
    fn new((keys, values, d): (&str, &str, usize), centred: bool) -> Self {
        let mut rng = Rng(d as u64 + 7);
        let rope = Rope::new(1e4);
        let shape = one_head(HEADS, d, &rope);
        let constants = [rng.vector(d, 2.0), rng.vector(d, 1.0)].map(|c| centred.then(|| Arc::from(c)));
        let layer = |keys, values| {
            let packed = codec((keys, values, d), Dtype::F16, &rope, constants.clone());
            let classes = vec![vec![quant::raw(&shape, Dtype::F16).unwrap(), packed]];
            LayerCodec { shape: shape.clone(), heads_per_group: 1, classes }
        };
        let (layer, plain) = (layer(keys, values), layer("raw16", "raw16"));
        let tensor = |rng: &mut Rng, heads, tokens| Tensor::random(rng, [1, heads, tokens, d], 2.0);
        let (k, v, q) =
            (tensor(&mut rng, 1, TOKENS), tensor(&mut rng, 1, TOKENS), tensor(&mut rng, HEADS, 20));
        let name = format!("{keys} and {values} at {d} channels, centred {centred}");
        Self { name, layer, plain, k, v, q }
    }

    fn all() -> impl Iterator<Item = Self> {
        CASES.into_iter().flat_map(|case| [false, true].map(|centred| Self::new(case, centred)))
    }

    /// The tokens, all but the newest sealed.
    fn table(&self, cpu: &Arc<Cpu>, layer: &LayerCodec) -> Table<Chunk> {
        let arena = Arena::new(Arc::clone(cpu), None).unwrap();
        let [raw, packed] = &layer.classes[0][..] else { panic!("two classes") };
        let fresh = |codec: &HeadCodec| {
            let bytes = codec.desc.page_bytes;
            let mut page = arena.reserve("page", &[(bytes, 1)]).unwrap().take(bytes);
            bytes_mut(&mut page).fill(0);
            page
        };
        let (mut table, mut sealed) = (Table::default(), 0);
        let group = packed.desc.group as usize;
        for token in 0..TOKENS {
            let (page, slot) = table.push_raw(Zone::Window, token, || fresh(raw), |_, _| {});
            let rows = RawRows { k: self.k.view(), v: self.v.view(), row: 0, head: 0, columns: &[token] };
            cpu.store_raw(raw, page, slot, rows);
            if token + 1 < sealed + group + RECENT {
                continue;
            }
            let encode = |from: &[&Page<Chunk>], first: usize, page: &mut Page<Chunk>, slot: usize| {
                let positions: Vec<i64> = (0..group).map(|i| START + (first + i) as i64).collect();
                cpu.seal((raw, packed), from, &positions, page, slot);
            };
            table.seal(1, group, packed.desc.slots as usize, || fresh(packed), |_, _| {}, encode);
            sealed += group;
        }
        table
    }

    fn call<'a>(&'a self, layer: &'a LayerCodec, table: &'a Table<Chunk>) -> AttendCall<'a, Chunk> {
        let row = AttendRow {
            tables: vec![table],
            start: START,
            length: TOKENS,
            columns: (0..self.q.shape[2]).collect(),
            first_index: TOKENS - self.q.shape[2],
        };
        AttendCall {
            layer,
            rows: vec![row],
            q: self.q.view(),
            own: None,
            causal: true,
            scale: 0.5 * (self.layer.shape.key_dim as f32).powf(-0.5),
            softcap: None,
            sink_logits: None,
            top_k: None,
        }
    }

    fn attend(&self, cpu: &Cpu, table: &Table<Chunk>) -> Vec<f64> {
        let shape = [1, HEADS, self.q.shape[2], self.layer.shape.value_dim];
        let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
        let mut out = ViewMut::new("out", &mut bytes, Geometry::contiguous(Dtype::F32, shape)).unwrap();
        let call = self.call(&self.layer, table);
        cpu.attend(&call, Results { out: Some(&mut out), lse: None, received: None, value_tiles: None })
            .unwrap();
        bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_le_bytes(*x))).collect()
    }

    /// The same tokens without a codec.
    fn uncompressed(&self, cpu: &Arc<Cpu>) -> Vec<f64> {
        let table = self.table(cpu, &self.plain);
        exact::attend(&**cpu, &self.call(&self.plain, &table)).out
    }
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let square: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    (square / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

fn cpus() -> Vec<(Isa, Arc<Cpu>)> {
    Isa::available().map(|isa| (isa, Arc::new(Cpu::new(Some(1)).unwrap().with_isa(isa).unwrap()))).collect()
}

#[test]
fn attention_on_packed_bytes_is_attention_on_what_they_decode_to() {
    for case in Case::all() {
        for (isa, cpu) in cpus() {
            let table = case.table(&cpu, &case.layer);
            let same = exact::attend(&*cpu, &case.call(&case.layer, &table)).out;
            let (kernel, codec) =
                (distance(&case.attend(&cpu, &table), &same), distance(&same, &case.uncompressed(&cpu)));
            println!("{:7} {}: kernel {kernel:.1e}, codec {codec:.1e}", isa.name(), case.name);
            // Digits of integer kernels are a fifth of the codec's own error at most; f32 sums are no digits.
            let allowed = if isa == Isa::Scalar { 3e-6 } else { (codec / 5.0).max(3e-6) };
            assert!(kernel <= allowed, "{isa:?}, {}: {kernel:e}, codec {codec:e}", case.name);
            assert!(codec > 1e-5 && codec < 5.0, "{}: {codec}", case.name);
        }
    }
}

#[test]
fn every_instruction_set_seals_the_same_bytes() {
    for case in Case::all() {
        let mut pages = Vec::new();
        for (isa, cpu) in cpus() {
            let table = case.table(&cpu, &case.layer);
            let packed = table.entries().filter(|entry| entry.class() == 1);
            let all: Vec<u8> = packed.flat_map(|entry| bytes(entry.page()).to_vec()).collect();
            assert!(all.len() >= 2 * case.layer.classes[0][1].desc.page_bytes as usize);
            pages.push((isa, all));
        }
        for (isa, other) in &pages[1..] {
            assert!(*other == pages[0].1, "{isa:?} and {:?}, {}", pages[0].0, case.name);
        }
    }
}

#[test]
fn live_slots_decode_together_as_each_does_alone() {
    let cpu = Cpu::shared();
    for case in CASES.iter().flat_map(|case| [true, false].map(|centred| Case::new(*case, centred))) {
        let mut table = case.table(&cpu, &case.layer);
        table.retain(|index| index % 3 != 1 && !(40..75).contains(&index), &[Zone::Sealed]);
        for entry in table.entries() {
            let codec = &case.layer.classes[0][entry.class()];
            for side in [Side::Key, Side::Value] {
                let (mut together, mut row) = (vec![9.0; 5], vec![0.0; codec.desc.side(side).d as usize]);
                cpu.decode_live(codec, entry, START, (side, 0), &mut together);
                let mut alone = Vec::new();
                for (slot, index) in entry.live_slots() {
                    let position = START + index as i64;
                    kvrs_codec::tile::decode_slot(
                        codec,
                        side,
                        bytes(entry.page()),
                        slot,
                        position,
                        0,
                        &mut row,
                    );
                    alone.extend(row.iter().map(|x| x.to_bits()));
                }
                let together: Vec<u32> = together.iter().map(|x| x.to_bits()).collect();
                assert!(together == alone, "{} {side:?}", case.name);
            }
        }
    }
}

#[test]
fn a_copied_slot_of_a_movable_codec_decodes_the_same() {
    let cpu = Cpu::shared();
    for (keys, values) in [("rabitq 4 bound", "kivi 2 32"), ("prod 3", "fp8 e4m3"), ("qjl 256", "int8")] {
        let case = Case::new((keys, values, 80), true);
        let (table, codec) = (case.table(&cpu, &case.layer), &case.layer.classes[0][1]);
        let mut entries = table.entries().filter(|entry| entry.class() == 1);
        let (from, to) = (entries.next().unwrap(), entries.next().unwrap());
        let arena = Arena::new(Arc::clone(&cpu), None).unwrap();
        let size = codec.desc.page_bytes;
        let mut page = arena.reserve("page", &[(size, 1)]).unwrap().take(size);
        bytes_mut(&mut page).copy_from_slice(bytes(to.page()));
        cpu.copy_slot(codec, (from.page(), 37), (&mut page, 5));
        let decode = |page: &[u8], side, slot, position| {
            let mut out = vec![0.0; 80];
            kvrs_codec::tile::decode_slot(codec, side, page, slot, position, 0, &mut out);
            out
        };
        for side in [Side::Key, Side::Value] {
            assert_eq!(
                decode(bytes(&page), side, 5, 0),
                decode(bytes(from.page()), side, 37, 0),
                "{keys}, {values}"
            );
            assert_eq!(
                decode(bytes(&page), side, 6, 0),
                decode(bytes(to.page()), side, 6, 0),
                "{keys}, {values}"
            );
        }
        let scales = |page: &[u8], slot: usize| -> Vec<f16> {
            let desc = &codec.desc.key;
            let at = |i: u32| desc.scales_at as usize + 2 * (i as usize * 64 + slot);
            (0..desc.scales).map(|i| f16::from_le_bytes([page[at(i)], page[at(i) + 1]])).collect()
        };
        assert_eq!(
            scales(bytes(&page), 5),
            scales(bytes(from.page()), 37),
            "numbers that no run reads move too"
        );
    }
}
