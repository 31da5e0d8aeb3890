//! Attention on packed pages against its definition in f64 over decoded slots.

#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod common;

use common::exact;
use common::layer::layer;
use common::pages::{Stored, table};
use common::{Rng, Tensor};
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, Received, Results};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, ViewMut};
use kvrs_core::page::Table;
use kvrs_core::statistics::{Fold, Reduce};
use kvrs_cpu::Cpu;
use kvrs_cpu::memory::Chunk;
use proptest::prelude::*;
use std::sync::Arc;

/// A random call with everything that it borrows.
struct Case {
    layer: LayerCodec,
    tables: Vec<Vec<Table<Chunk>>>,
    lengths: Vec<usize>,
    columns: Vec<Vec<usize>>,
    q: Tensor,
    own: Option<(Tensor, Tensor)>,
    causal: bool,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
    top_k: Option<usize>,
}

/// What a call gives, as bits.
type Bits = (Vec<u8>, Vec<u32>);

impl Case {
    fn random(seed: u64, most_tokens: usize, poison: bool) -> Self {
        let mut rng = Rng(seed);
        let layer = layer(&mut rng);
        let rows = 1 + rng.below(2);
        let width = rng.pick(&[1, 1, 1, 3, 3, 20, 20, 70, 150]);
        let own = rng.coin();
        let lengths: Vec<usize> = (0..rows).map(|_| rng.below(most_tokens)).collect();
        let columns: Vec<Vec<usize>> = lengths
            .iter()
            .map(|&length| {
                let mut columns: Vec<usize> = (0..width).filter(|_| rng.below(4) > 0).collect();
                columns.truncate(if own { width } else { length });
                columns
            })
            .collect();
        let dead = rng.pick(&[0, 0, 3, 10]);
        let keep_seed = rng.bits();
        let keep = move |token: usize| Rng(keep_seed ^ token as u64).below(10) >= dead;
        let (sinks, recent, fill_seed) = (rng.below(6), rng.below(90), rng.bits());
        let cpu = Cpu::shared();
        let row_tables = |length: usize| -> Vec<Table<Chunk>> {
            let groups = 0..layer.classes.len();
            let one = |group: usize| {
                let size = layer.classes[group][1].desc.group as usize;
                let stored = Stored { poison, ..Stored::new(length, sinks, recent, size) };
                table(&mut Rng(fill_seed + group as u64), &cpu, &layer, group, stored, &keep)
            };
            groups.map(one).collect()
        };
        let tables = lengths.iter().map(|&length| row_tables(length)).collect();
        let shape = &layer.shape;
        let own = own.then(|| {
            let k = Tensor::random(&mut rng, [rows, shape.kv_heads, width, shape.key_dim], 2.0);
            (k, Tensor::random(&mut rng, [rows, shape.kv_heads, width, shape.value_dim], 1.0))
        });
        let q = Tensor::random(&mut rng, [rows, shape.query_heads, width, shape.key_dim], 2.0);
        let causal = own.is_some() || rng.coin();
        let softcap = rng.pick(&[None, None, Some(8.0)]);
        let sinks = rng.coin().then(|| rng.vector(shape.query_heads, 4.0));
        // The draw for top-k comes last: the cases without it stay what they were.
        let top_k = rng.pick(&[None, None, Some(1), Some(20)]);
        Self { layer, tables, lengths, columns, q, own, causal, softcap, sinks, top_k }
    }

    fn call(&self) -> AttendCall<'_, Chunk> {
        let row = |i: usize| AttendRow {
            tables: self.tables[i].iter().collect(),
            start: 1000 * i as i64,
            length: self.lengths[i],
            columns: self.columns[i].clone(),
            first_index: if self.own.is_some() {
                self.lengths[i]
            } else {
                self.lengths[i] - self.columns[i].len()
            },
        };
        AttendCall {
            layer: &self.layer,
            rows: (0..self.lengths.len()).map(row).collect(),
            q: self.q.view(),
            own: self.own.as_ref().map(|(k, v)| (k.view(), v.view())),
            causal: self.causal,
            scale: (self.layer.shape.key_dim as f32).powf(-0.5),
            softcap: self.softcap,
            sink_logits: self.sinks.as_deref(),
            top_k: self.top_k,
        }
    }

    fn run(&self, cpu: &Cpu) -> Bits {
        let [rows, heads, columns, _] = self.q.shape;
        let shape = [rows, heads, columns, self.layer.shape.value_dim];
        let mut bytes = vec![0xFF; 4 * shape.iter().product::<usize>()];
        let mut lse = vec![f32::NAN; rows * heads * columns];
        let mut out = ViewMut::new("out", &mut bytes, Geometry::contiguous(Dtype::F32, shape)).unwrap();
        cpu.attend(
            &self.call(),
            Results { out: Some(&mut out), lse: Some(&mut lse), received: None, value_tiles: None },
        );
        (bytes, lse.iter().map(|x| x.to_bits()).collect())
    }

    /// Attention that each token receives, of the mean over a group's heads.
    fn received(&self, cpu: &Cpu, fold: Fold) -> Vec<Vec<f32>> {
        let [rows, heads, columns, _] = self.q.shape;
        let shape = [rows, heads, columns, self.layer.shape.value_dim];
        let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
        let mut out = ViewMut::new("out", &mut bytes, Geometry::contiguous(Dtype::F32, shape)).unwrap();
        let own = |row: usize| if self.own.is_some() { self.columns[row].len() } else { 0 };
        let per_group = self.layer.heads_per_group;
        let tokens = |row: usize, head: usize| self.tables[row][head / per_group].kept() + own(row);
        let pairs = (0..rows).flat_map(|row| (0..self.layer.shape.kv_heads).map(move |head| (row, head)));
        let mut sums: Vec<Vec<f32>> = pairs.map(|(row, head)| vec![0.0; tokens(row, head)]).collect();
        let received = Some(Received { reduce: Reduce::Mean, fold, sums: &mut sums });
        cpu.attend(&self.call(), Results { out: Some(&mut out), lse: None, received, value_tiles: None });
        let mut alone: Vec<Vec<f32>> = sums.iter().map(|sums| vec![0.0; sums.len()]).collect();
        let received = Some(Received { reduce: Reduce::Mean, fold, sums: &mut alone });
        cpu.attend(&self.call(), Results { out: None, lse: None, received, value_tiles: None });
        assert_eq!(sums, alone, "a call without outputs gives the same attention");
        let (plain, _) = self.run(cpu);
        if self.q.shape[2] == 1 {
            assert!(plain == bytes, "a call that keeps its logits gives the same output");
        }
        sums
    }

    fn check(&self) {
        let cpu = Cpu::shared();
        let exact = exact::attend(&cpu, &self.call());
        let (out, lse) = self.run(&cpu);
        let bound = 1e-5 + 4.0 * 2f64.powi(-23) * exact.max_logit;
        let largest = exact.out.iter().fold(0f64, |m, x| m.max(x.abs()));
        for (i, (got, expected)) in out.as_chunks().0.iter().zip(&exact.out).enumerate() {
            let got = f64::from(f32::from_le_bytes(*got));
            let error = (got - expected).abs();
            assert!(
                expected.is_nan() || error <= bound * largest,
                "element {i}: {got} for {expected}, max {largest}, bound {bound}"
            );
        }
        for (got, &expected) in lse.iter().zip(&exact.lse) {
            let got = f64::from(f32::from_bits(*got));
            let both_empty = got == f64::NEG_INFINITY && expected == f64::NEG_INFINITY;
            assert!(
                expected.is_nan() || both_empty || (got - expected).abs() <= 2.0 * bound,
                "lse {got} for {expected}"
            );
        }
        for (got, expected) in self.received(&cpu, Fold::Sum).iter().zip(&exact.received) {
            assert_eq!(got.len(), expected.len());
            for (got, &expected) in got.iter().zip(expected) {
                let error = (f64::from(*got) - expected).abs();
                assert!(
                    expected.is_nan() || error <= 4.0 * bound * expected.max(1e-3),
                    "received {got} for {expected}"
                );
            }
        }
    }
}

/// `PROPTEST_CASES`, or enough to meet most combinations.
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").map_or(150, |cases| cases.parse().unwrap());
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn attention_on_random_descriptors_equals_attention_on_what_they_decode_to(seed: u64) {
        Case::random(seed, 300, false).check();
    }

    #[test]
    fn bytes_of_dead_slots_change_nothing(seed: u64) {
        let [clean, poisoned] = [false, true].map(|p| Case::random(seed, 200, p).run(&Cpu::shared()));
        prop_assert!(clean == poisoned);
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let cpus = [1, 2, 4].map(|threads| Cpu::new(Some(threads)).unwrap());
    for seed in 0..4 {
        let case = Case::random(seed, 3000, false);
        let first = case.run(&cpus[0]);
        for cpu in cpus.iter().chain(&cpus) {
            assert!(case.run(cpu) == first, "seed {seed} with {} threads", cpu.threads());
        }
    }
}

#[test]
fn attention_received_does_not_depend_on_the_number_of_threads() {
    let cpus = [1, 2, 4].map(|threads| Cpu::new(Some(threads)).unwrap());
    for seed in 0..4 {
        let case = Case::random(seed, 3000, false);
        for fold in [Fold::Sum, Fold::Above, Fold::Last] {
            let first = case.received(&cpus[0], fold);
            assert!(cpus.iter().all(|cpu| case.received(cpu, fold) == first), "seed {seed}, {fold:?}");
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    let cases = (0..40).map(|seed| Case::random(seed, 300, false));
    for mut case in cases.filter(|case| case.lengths.len() == 2) {
        let (whole, _) = case.run(&Cpu::shared());
        case.columns[0].clear();
        let (alone, _) = case.run(&Cpu::shared());
        let half = whole.len() / 2;
        assert!(whole[half..] == alone[half..]);
        assert!(alone[..half].iter().all(|&b| b == 0), "a row without queries is zero");
    }
}

#[test]
fn a_pool_of_the_caller_is_used() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let cpu = Cpu::with_pool(Arc::new(pool));
    assert_eq!(cpu.install(rayon::current_num_threads), 3);
}

#[test]
fn absurd_numbers_of_threads_are_refused() {
    let message = Cpu::new(Some(0)).unwrap_err().to_string();
    assert_eq!(message, "threads is 0; allowed: 1..=1024");
}
