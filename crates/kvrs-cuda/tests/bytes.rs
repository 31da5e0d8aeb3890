//! Bytes that the kernels write, against those of the scalar code: raw rows, sealed groups, copied slots.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

#[path = "../../kvrs-cpu/tests/common/mod.rs"]
mod common;

use common::pages::edit;
use common::specs::{codec, one_head};
use common::{Rng, Tensor};
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_codec::layout::movable;
use kvrs_codec::{Dtype, HeadCodec, Place, quant};
use kvrs_core::Rope;
use kvrs_core::page::{Arena, Page};
use kvrs_cpu::{Cpu, Isa};
use kvrs_cuda::{Cuda, Emulator};
use std::sync::Arc;

/// Keys, values, channels of a head.
const CASES: [(&str, &str, usize); 26] = [
    ("turboquant 4", "turboquant 4", 128),
    ("turboquant 1", "turboquant 2", 64),
    ("turboquant 3", "turboquant 3", 256),
    ("turboquant 5", "turboquant 6", 80),
    ("turboquant 7", "turboquant 8", 96),
    ("turboquant 2.5", "turboquant 3.5", 128),
    ("turboquant 4", "raw16", 112),
    ("raw16", "turboquant 1", 72),
    ("turboquant 3", "turboquant 1", 16),
    ("turboquant 1", "turboquant 3", 48),
    ("int8", "int8", 64),
    ("fp8 e4m3", "fp8 e5m2", 80),
    ("kivi 2 32", "kivi 2 32", 128),
    ("kivi 3 64", "kivi 1 16", 112),
    ("rabitq 1", "rabitq 2", 128),
    ("rabitq 3", "rabitq 4", 64),
    ("rabitq 5", "rabitq 6", 80),
    ("rabitq 7", "rabitq 8", 128),
    ("rabitq 4 bound", "rabitq 1", 64),
    ("prod 2", "prod 1", 80),
    ("prod 3", "prod 4", 128),
    ("prod 3 orthogonal", "prod 3 orthogonal", 80),
    ("qjl 256", "kivi 2 32", 128),
    ("qjl 64", "turboquant 2.5", 80),
    ("turboquant 8", "turboquant 8", 128),
    ("turboquant 6", "turboquant 5", 64),
];

fn emulated(seed: u64) -> Arc<Cuda<Emulator>> {
    Arc::new(Cuda::new(Emulator::new(seed).with_poison(), Place::Host).unwrap())
}

fn page<B: Backend>(backend: &Arc<B>, codec: &HeadCodec) -> Page<B::Chunk> {
    let arena = Arena::new(Arc::clone(backend), None).unwrap();
    let bytes = codec.desc.page_bytes;
    let mut page = arena.reserve("page", &[(bytes, 1)]).unwrap().take(bytes);
    edit(&**backend, &mut page, |bytes| bytes.fill(0));
    page
}

fn bytes<B: Backend>(backend: &B, page: &Page<B::Chunk>) -> Vec<u8> {
    let mut bytes = vec![0; page.bytes()];
    backend.read_page(page, &mut bytes).unwrap();
    bytes
}

/// Tokens of one head and the codecs that they go through.
struct Case {
    raw: HeadCodec,
    packed: HeadCodec,
    k: Tensor,
    v: Tensor,
    start: i64,
}

impl Case {
    fn new((keys, values, d): (&str, &str, usize), window: Dtype, centred: bool) -> Self {
        let mut rng = Rng(d as u64 + 1);
        let rope = Rope::new(1e4);
        let shape = one_head(1, d, &rope);
        let constants = [rng.vector(d, 2.0), rng.vector(d, 1.0)].map(|c| centred.then(|| Arc::from(c)));
        let packed = codec((keys, values, d), window, &rope, constants);
        let raw = quant::raw(&shape, window).unwrap();
        let tensor = |rng: &mut Rng| Tensor::random(rng, [1, 1, 64, d], 2.0);
        Self { raw, packed, k: tensor(&mut rng), v: tensor(&mut rng), start: 123_456 }
    }

    fn all() -> impl Iterator<Item = (String, Self)> {
        let variants = [(Dtype::F16, false), (Dtype::Bf16, true)];
        CASES.into_iter().flat_map(move |case| {
            variants.map(|(window, centred)| {
                (format!("{case:?}, {window:?}, centred {centred}"), Self::new(case, window, centred))
            })
        })
    }

    /// One group, raw and sealed.
    fn seal<B: Backend>(&self, backend: &Arc<B>) -> (Vec<Page<B::Chunk>>, Page<B::Chunk>) {
        let group = self.packed.desc.group as usize;
        let mut raw: Vec<_> = (0..group / 16).map(|_| page(backend, &self.raw)).collect();
        for (i, page) in raw.iter_mut().enumerate() {
            let rows = RawRows { k: self.k.view(), v: self.v.view(), row: 0, head: 0, columns: &[] };
            let columns: Vec<usize> = (16 * i..16 * i + 16).collect();
            backend.store_raw(&self.raw, page, 0, RawRows { columns: &columns[..5], ..rows });
            backend.store_raw(&self.raw, page, 5, RawRows { columns: &columns[5..], ..rows });
        }
        let mut to = page(backend, &self.packed);
        let positions: Vec<i64> = (0..group as i64).map(|i| self.start + 3 * i).collect();
        let from: Vec<&Page<B::Chunk>> = raw.iter().collect();
        let slot = 64 - group;
        backend.seal((&self.raw, &self.packed), &from, &positions, &mut to, slot);
        (raw, to)
    }
}

#[test]
fn raw_rows_codes_and_scales_are_those_of_the_scalar_code_bit_for_bit() {
    let cpu = Arc::new(Cpu::new(Some(1)).unwrap().with_isa(Isa::Scalar).unwrap());
    for (seed, (name, case)) in Case::all().enumerate() {
        let device = emulated(seed as u64);
        let ((raw, expected), (device_raw, got)) = (case.seal(&cpu), case.seal(&device));
        device.flush().unwrap();
        for (raw, device_raw) in raw.iter().zip(&device_raw) {
            assert!(bytes(&*cpu, raw) == bytes(&*device, device_raw), "{name}: raw rows");
        }
        let (expected, got) = (bytes(&*cpu, &expected), bytes(&*device, &got));
        let wrong = expected.iter().zip(&got).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "{name}: first different byte of {}, {:?}", got.len(), case.packed.desc);
    }
}

#[test]
fn copied_slots_are_those_of_the_scalar_code_bit_for_bit() {
    let cpu = Arc::new(Cpu::new(Some(1)).unwrap());
    for (seed, (name, case)) in Case::all().enumerate().filter(|(_, (_, case))| movable(&case.packed.desc)) {
        let device = emulated(seed as u64);
        let ((_, from), (_, device_from)) = (case.seal(&cpu), case.seal(&device));
        let (mut to, mut device_to) = (case.seal(&cpu).1, case.seal(&device).1);
        let first = 64 - case.packed.desc.group as usize;
        for (a, b) in [(first, first + 9), (first + 15, first), (first + 7, 3), (first + 2, first + 1)] {
            cpu.copy_slot(&case.packed, (&from, a), (&mut to, b));
            device.copy_slot(&case.packed, (&device_from, a), (&mut device_to, b));
        }
        device.flush().unwrap();
        assert!(bytes(&*cpu, &to) == bytes(&*device, &device_to), "{name}");
    }
}

#[test]
fn vectors_that_are_not_finite_become_zeros_and_are_counted() {
    let case = Case::new(("turboquant 4", "turboquant 4", 64), Dtype::F16, false);
    let device = emulated(0);
    let mut bad = case.k.row([0, 0, 3]);
    for value in [f32::NAN, f32::INFINITY, 1e6, 65504.0] {
        bad[17] = value;
        let k = Tensor::of([1, 1, 1, 64], &bad);
        let mut to = page(&device, &case.raw);
        let rows = RawRows { k: k.view(), v: k.view(), row: 0, head: 0, columns: &[0] };
        let before = device.refused().unwrap();
        device.store_raw(&case.raw, &mut to, 0, rows);
        assert_eq!(device.refused().unwrap() - before, if value == 65504.0 { 0 } else { 2 }, "{value}");
        let zero = bytes(&*device, &to).iter().all(|&b| b == 0);
        assert_eq!(zero, value != 65504.0);
    }
}
