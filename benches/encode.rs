//! Encoding of groups of raw tokens into packed pages, on one thread.

mod common;

use common::{codecs, normal};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_codec::tile::decode_slot;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, Side, View};
use kvrs_core::LayerShape;
use kvrs_core::page::{Arena, Page};
use kvrs_cpu::Cpu;
use kvrs_cpu::memory::{Chunk, bytes};
use std::hint::black_box;
use std::sync::Arc;

const TOKENS: usize = 16;

fn page(arena: &Arena<Cpu>, bytes: u32) -> Page<Chunk> {
    arena.reserve("bench", &[(bytes, 1)]).expect("no limit").take(bytes)
}

fn encode(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("encode");
    for (bits, d) in [(4.0, 128), (3.0, 128), (4.0, 80)] {
        let shape =
            LayerShape { query_heads: 1, kv_heads: 1, key_dim: d, value_dim: d, rope: None, sliding: None };
        let [raw, packed] = codecs(bits, &shape);
        let cpu = Arc::new(Cpu::new(Some(1)).expect("one thread"));
        let arena = Arena::new(Arc::clone(&cpu), None).expect("no limit");
        let (mut from, mut to) = (page(&arena, raw.desc.page_bytes), page(&arena, packed.desc.page_bytes));
        let x: Vec<u8> = normal(3, TOKENS * d).flat_map(f32::to_le_bytes).collect();
        let view = View::new("k", &x, Geometry::contiguous(Dtype::F32, [1, 1, TOKENS, d])).expect("a tensor");
        let columns: Vec<usize> = (0..TOKENS).collect();
        let rows = RawRows { k: view, v: view, row: 0, head: 0, columns: &columns };
        cpu.store_raw(&raw, &mut from, 0, rows);
        cpu.seal((&raw, &packed), &[&from], 0, &mut to, 0);
        for side in [Side::Key, Side::Value] {
            let error =
                relative_error(&view, |slot, out| decode_slot(&packed, side, bytes(&to), slot, 0, 0, out));
            assert!(error < if bits > 3.5 { 0.02 } else { 0.06 }, "{side:?} at {bits} bits: {error}");
        }
        group.throughput(Throughput::Bytes((2 * TOKENS * d * 2) as u64));
        let name = BenchmarkId::new(format!("b{bits}/scalar"), format!("d{d}"));
        group.bench_function(name, |bencher| {
            bencher.iter(|| cpu.seal((&raw, &packed), &[&from], 0, black_box(&mut to), 0));
        });
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

criterion_group!(benches, encode);
criterion_main!(benches);
