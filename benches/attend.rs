//! Decode steps and chunks of queries over packed pages, on one thread.

mod common;

use common::{Store, normal};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrs_codec::backend::{AttendCall, AttendRow, Backend};
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, View, ViewMut};
use kvrs_cpu::memory::Chunk;
use std::hint::black_box;

/// Queries of one sequence and what they give.
struct Step {
    store: Store,
    columns: usize,
    q: Vec<u8>,
    out: Vec<u8>,
}

impl Step {
    fn new(bits: f64, d: usize, tokens: usize, columns: usize) -> Self {
        let store = Store::new(bits, [32, 8], d, tokens);
        let q = normal(7, 32 * columns * d).flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        Self { out: vec![0; q.len()], q, columns, store }
    }

    fn geometry(&self) -> Geometry {
        Geometry::contiguous(Dtype::F32, [1, 32, self.columns, self.store.d()])
    }

    fn run(&mut self) {
        let geometry = self.geometry();
        let length = self.store.tokens;
        let row: AttendRow<'_, Chunk> = AttendRow {
            tables: self.store.tables.iter().collect(),
            start: 0,
            length,
            columns: (0..self.columns).collect(),
            first_index: length - self.columns,
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
        };
        let mut out = ViewMut::new("out", &mut self.out, geometry).expect("out fits");
        self.store.cpu.attend(&call, &mut out, None);
    }

    /// Compares the last query of head 0 with attention over decoded slots in f64.
    fn check(&mut self) {
        self.run();
        let (d, row) = (self.store.d(), self.columns - 1);
        let read = |bytes: &[u8]| -> Vec<f64> {
            let row = &bytes[4 * row * d..][..4 * d];
            row.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
        };
        let (q, got) = (read(&self.q), read(&self.out));
        let scale = f64::from((d as f32).powf(-0.5));
        let (mut total, mut sum) = (0.0, vec![0.0; d]);
        self.store.each_decoded(0, |k, v| {
            let logit: f64 = q.iter().zip(k).map(|(q, k)| q * f64::from(*k)).sum();
            let weight = (logit * scale).exp();
            total += weight;
            sum.iter_mut().zip(v).for_each(|(s, v)| *s += weight * f64::from(*v));
        });
        let largest = sum.iter().fold(0f64, |m, s| m.max((s / total).abs()));
        for (got, sum) in got.iter().zip(&sum) {
            assert!((got - sum / total).abs() <= 2e-5 * largest, "{got} for {}", sum / total);
        }
    }
}

fn attend(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attend");
    let cases = [
        (4.0, 128, 4096, 1),
        (3.0, 128, 4096, 1),
        (2.0, 128, 4096, 1),
        (4.0, 80, 1000, 1),
        (4.0, 128, 512, 1),
        (4.0, 128, 1024, 16),
    ];
    for (bits, d, tokens, columns) in cases {
        let mut step = Step::new(bits, d, tokens, columns);
        step.check();
        group.throughput(Throughput::Bytes(step.store.bytes()));
        let name = BenchmarkId::new(format!("b{bits}/scalar/d{d}"), format!("{tokens}x{columns}"));
        group.bench_function(name, |bencher| bencher.iter(|| black_box(&mut step).run()));
    }
    group.finish();
}

criterion_group!(benches, attend);
criterion_main!(benches);
