//! Decode steps and chunks of queries over packed and raw pages, on one thread, for every instruction set.

mod common;

use common::{Step, Store, cpu};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvrs_cpu::Isa;
use std::hint::black_box;

const HEADS: [usize; 2] = [32, 8];

/// What is read, and by how many queries of each head.
struct Case {
    bits: f64,
    d: usize,
    tokens: usize,
    rows: usize,
    /// Whether the portable code is timed too.
    scalar: bool,
}

const fn case(bits: f64, d: usize, tokens: usize, rows: usize) -> Case {
    Case { bits, d, tokens, rows, scalar: true }
}

/// 4096 tokens of 4 bits are 4.4 MB, 65536 are 68 MB: more than a cache.
const CASES: [Case; 12] = [
    case(4.0, 128, 512, 1),
    case(4.0, 128, 4096, 1),
    case(3.0, 128, 4096, 1),
    case(2.0, 128, 4096, 1),
    case(6.0, 128, 4096, 1),
    case(4.0, 80, 1000, 1),
    case(3.0, 80, 1000, 1),
    Case { scalar: false, ..case(4.0, 128, 65536, 1) },
    Case { scalar: false, ..case(2.0, 128, 65536, 1) },
    Case { scalar: false, ..case(4.0, 128, 4096, 16) },
    case(16.0, 128, 512, 1),
    case(16.0, 80, 500, 1),
];

impl Case {
    /// Largest distance from the output over decoded slots, relative to the output's length.
    fn tolerance(&self, isa: Isa) -> f64 {
        // What the codec itself costs on each side, and how far below that kernels stay.
        let (codec, factor) = match self.bits {
            2.0 => (0.34, 9.0),
            3.0 => (0.18, 9.0),
            4.0 => (0.097, 7.0),
            _ => (0.01, 7.0),
        };
        if isa == Isa::Scalar { 2e-5 } else { codec * 2f64.sqrt() / factor }
    }
}

fn distance(got: &[f64], expected: &[f64]) -> f64 {
    let length = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    length(&mut got.iter().zip(expected).map(|(a, b)| a - b)) / length(&mut expected.iter().copied())
}

fn attend(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attend");
    for case in CASES {
        let store = Store::new(case.bits, HEADS, case.d, case.tokens);
        let mut step = Step::new(&store, case.rows);
        let expected = step.expected();
        group.throughput(Throughput::Bytes(store.bytes()));
        for isa in Isa::available().filter(|isa| case.scalar || *isa != Isa::Scalar) {
            let cpu = cpu(isa);
            step.run(&cpu);
            let error = distance(&step.last()[1], &expected);
            assert!(error <= case.tolerance(isa), "{} bits on {}: error {error:e}", case.bits, isa.name());
            let kind = format!("b{}/{}/d{}", case.bits, isa.name(), case.d);
            let size = format!("{}x{}", case.tokens, case.rows);
            group.bench_function(BenchmarkId::new(kind, size), |bencher| {
                bencher.iter(|| black_box(&mut step).run(&cpu));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = common::criterion();
    targets = attend
}
criterion_main!(benches);
