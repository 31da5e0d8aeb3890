//! Random attention calls on random tables, and what every backend must make of them.

use super::exact;
use super::layer::layer;
use super::pages::{Stored, table};
use super::{Rng, Tensor};
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, Received, Results};
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, ViewMut};
use kvrs_core::page::Table;
use kvrs_core::statistics::{Fold, Reduce};
use std::sync::Arc;

/// A random call with everything that it borrows.
pub(crate) struct Case<B: Backend> {
    home: Arc<B>,
    layer: LayerCodec,
    tables: Vec<Vec<Table<B::Chunk>>>,
    pub(crate) lengths: Vec<usize>,
    pub(crate) columns: Vec<Vec<usize>>,
    q: Tensor,
    own: Option<(Tensor, Tensor)>,
    causal: bool,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
    top_k: Option<usize>,
}

/// What a call gives, as bits.
pub(crate) type Bits = (Vec<u8>, Vec<u32>);

impl<B: Backend> Case<B> {
    pub(crate) fn random(home: &Arc<B>, seed: u64, most_tokens: usize, poison: bool) -> Self {
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
        let row_tables = |length: usize| -> Vec<Table<B::Chunk>> {
            let groups = 0..layer.classes.len();
            let one = |group: usize| {
                let size = layer.classes[group][1].desc.group as usize;
                let stored = Stored { poison, ..Stored::new(length, sinks, recent, size) };
                table(&mut Rng(fill_seed + group as u64), home, &layer, group, stored, &keep)
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
        Self {
            home: Arc::clone(home),
            layer,
            tables,
            lengths,
            columns,
            q,
            own,
            causal,
            softcap,
            sinks,
            top_k,
        }
    }

    fn call(&self) -> AttendCall<'_, B::Chunk> {
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

    pub(crate) fn run(&self, backend: &B) -> Bits {
        let [rows, heads, columns, _] = self.q.shape;
        let shape = [rows, heads, columns, self.layer.shape.value_dim];
        let mut bytes = vec![0xFF; 4 * shape.iter().product::<usize>()];
        let mut lse = vec![f32::NAN; rows * heads * columns];
        let mut out = ViewMut::new("out", &mut bytes, Geometry::contiguous(Dtype::F32, shape)).unwrap();
        backend
            .attend(
                &self.call(),
                Results { out: Some(&mut out), lse: Some(&mut lse), received: None, value_tiles: None },
            )
            .unwrap();
        (bytes, lse.iter().map(|x| x.to_bits()).collect())
    }

    /// Attention that each token receives, of the mean over a group's heads.
    pub(crate) fn received(&self, backend: &B, fold: Fold) -> Vec<Vec<f32>> {
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
        backend
            .attend(&self.call(), Results { out: Some(&mut out), lse: None, received, value_tiles: None })
            .unwrap();
        let mut alone: Vec<Vec<f32>> = sums.iter().map(|sums| vec![0.0; sums.len()]).collect();
        let received = Some(Received { reduce: Reduce::Mean, fold, sums: &mut alone });
        backend.attend(&self.call(), Results { out: None, lse: None, received, value_tiles: None }).unwrap();
        assert_eq!(sums, alone, "a call without outputs gives the same attention");
        let (plain, _) = self.run(backend);
        if self.q.shape[2] == 1 {
            assert!(plain == bytes, "a call that keeps its logits gives the same output");
        }
        sums
    }

    /// Compares with attention by its definition.
    pub(crate) fn check(&self) {
        let exact = exact::attend(&*self.home, &self.call());
        let (out, lse) = self.run(&self.home);
        self.home.flush().unwrap();
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
        for (got, expected) in self.received(&self.home, Fold::Sum).iter().zip(&exact.received) {
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
