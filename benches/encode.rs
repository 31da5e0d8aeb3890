//! Encoding of groups of raw tokens into packed pages, on one thread, for every instruction set.

mod common;

use common::{codecs, cpu, normal};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_codec::tile::decode_slot;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, HeadCodec, Side, View};
use kvrs_core::LayerShape;
use kvrs_core::page::{Arena, Page};
use kvrs_cpu::memory::{Chunk, bytes};
use kvrs_cpu::{Cpu, Isa};
use std::hint::black_box;
use std::sync::Arc;

const TOKENS: usize = 16;

fn page(arena: &Arena<Cpu>, bytes: u32) -> Page<Chunk> {
    arena.reserve("bench", &[(bytes, 1)]).expect("no limit").take(bytes)
}

/// A raw page with 16 tokens, their exact rows, and a packed page for them.
struct Group {
    raw: HeadCodec,
    packed: HeadCodec,
    x: Vec<u8>,
    geometry: Geometry,
    from: Page<Chunk>,
    to: Page<Chunk>,
}

impl Group {
    fn new(bits: f64, d: usize) -> Self {
        let shape =
            LayerShape { query_heads: 1, kv_heads: 1, key_dim: d, value_dim: d, rope: None, sliding: None };
        let [raw, packed] = codecs(bits, &shape);
        let cpu = cpu(Isa::Scalar);
        let arena = Arena::new(Arc::clone(&cpu), None).expect("no limit");
        let (mut from, to) = (page(&arena, raw.desc.page_bytes), page(&arena, packed.desc.page_bytes));
        let x: Vec<u8> = normal(3, TOKENS * d).flat_map(f32::to_le_bytes).collect();
        let geometry = Geometry::contiguous(Dtype::F32, [1, 1, TOKENS, d]);
        let view = View::new("k", &x, geometry).expect("a tensor");
        let columns: Vec<usize> = (0..TOKENS).collect();
        cpu.store_raw(&raw, &mut from, 0, RawRows { k: view, v: view, row: 0, head: 0, columns: &columns });
        Self { raw, packed, x, geometry, from, to }
    }

    fn seal(&mut self, cpu: &Cpu) {
        cpu.seal(
            (&self.raw, &self.packed),
            &[&self.from],
            &std::array::from_fn::<_, TOKENS, _>(|i| i as i64),
            &mut self.to,
            0,
        );
    }

    fn check(&self, limit: f32) {
        let view = View::new("k", &self.x, self.geometry).expect("a tensor");
        for side in [Side::Key, Side::Value] {
            let decode =
                |slot, out: &mut [f32]| decode_slot(&self.packed, side, bytes(&self.to), slot, 0, 0, out);
            let error = relative_error(&view, decode);
            assert!(error < limit, "{side:?}: {error}");
        }
    }
}

fn encode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("encode");
    for (bits, d, limit) in [(4.0, 128, 0.02), (3.0, 128, 0.06), (2.0, 128, 0.2), (4.0, 80, 0.02)] {
        let mut tokens = Group::new(bits, d);
        group.throughput(Throughput::Bytes((2 * TOKENS * d * 2) as u64));
        let mut scalar = None;
        for isa in Isa::available() {
            let cpu = cpu(isa);
            tokens.seal(&cpu);
            tokens.check(limit);
            let codes = scalar.get_or_insert_with(|| bytes(&tokens.to).to_vec());
            assert_eq!(codes, bytes(&tokens.to), "codes do not depend on the instruction set");
            group.bench_function(format!("b{bits}/{}/d{d}", isa.name()), |bencher| {
                bencher.iter(|| black_box(&mut tokens).seal(&cpu));
            });
        }
    }
    group.finish();
}

/// Squared error of decoded rows over the squared length of the exact ones.
fn relative_error(view: &View<'_>, decode: impl Fn(usize, &mut [f32])) -> f32 {
    let d = view.shape()[3];
    let (mut exact, mut got) = (vec![0.0; d], vec![0.0; d]);
    let (mut error, mut length) = (0.0, 0.0);
    for slot in 0..TOKENS {
        view.read_row([0, 0, slot], &mut exact);
        decode(slot, &mut got);
        error += exact.iter().zip(&got).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
        length += exact.iter().map(|a| a * a).sum::<f32>();
    }
    error / length
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = encode
}
criterion_main!(benches);
