//! The store against the naive one, whatever the order of the calls.
#![allow(clippy::unwrap_used, reason = "a test may")]

use kvrs::{
    CodecSpec, Cpu, Dtype, Error, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Queries, Rope, SeqId,
    Tokens,
};
use kvrs_codec::Place;
use kvrs_codec::backend::Backend;
use kvrs_cuda::{Cuda, Emulator};
use kvrs_testkit::pair::{Rounding, Step, threads};
use kvrs_testkit::{Noise, Pair, Tensor};
use proptest::prelude::*;
use std::sync::Arc;

/// Full attention, a sliding window that is encoded, one that stays raw, and keys wider than values.
fn shape() -> ModelShape {
    let rope = Some(Rope::new(1e4));
    let full = LayerShape { query_heads: 4, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    ModelShape {
        layers: vec![
            full.clone(),
            LayerShape { query_heads: 1, kv_heads: 1, sliding: Some(90), ..full.clone() },
            LayerShape { query_heads: 2, kv_heads: 1, sliding: Some(20), ..full.clone() },
            LayerShape { query_heads: 3, kv_heads: 1, key_dim: 48, rope: None, ..full },
        ],
    }
}

fn spec(keys: &CodecSpec, values: &CodecSpec, sinks: usize, recent: usize) -> PlanSpec {
    PlanSpec { sinks, recent, ..PlanSpec::uniform(shape(), keys.clone(), values.clone()) }
}

/// A constant in the keys, which encoding takes out and scores get back.
fn with_offset(spec: PlanSpec) -> PlanSpec {
    let mut noise = Noise::new(71);
    let mut constant = |heads: usize, dim: usize| Some((0..heads * dim).map(|_| noise.normal()).collect());
    let layers = spec.shape.layers.clone();
    PlanSpec {
        key_offset: Some(layers.iter().map(|l| constant(l.kv_heads, l.key_dim)).collect()),
        value_offset: Some(layers.iter().map(|l| constant(l.kv_heads, l.value_dim)).collect()),
        ..spec
    }
}

/// A plan that prints in one line.
#[derive(Clone)]
struct Drawn(Plan);

impl std::fmt::Debug for Drawn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spec = self.0.spec();
        let (keys, values, offset) = (&spec.keys[0], &spec.values[0], spec.key_offset.is_some());
        write!(
            f,
            "keys {keys}, values {values}, sinks {}, recent {}, offset {offset}",
            spec.sinks, spec.recent
        )
    }
}

fn plans() -> impl Strategy<Value = Drawn> {
    let codec = prop_oneof![
        2 => Just(CodecSpec::raw16()),
        5 => prop_oneof![Just(2.0), Just(2.5), Just(3.0), Just(4.0), Just(5.0), Just(8.0)].prop_map(CodecSpec::turboquant),
    ];
    let windows = (prop_oneof![Just(0), Just(4), Just(19)], prop_oneof![Just(0), Just(16), Just(40)]);
    (codec.clone(), codec, windows, any::<bool>()).prop_map(|(keys, values, (sinks, recent), offset)| {
        let spec = spec(&keys, &values, sinks, recent);
        Drawn(Plan::new(if offset { with_offset(spec) } else { spec }).unwrap())
    })
}

#[derive(Debug, Clone)]
enum Op {
    Step { rows: u8, tokens: usize, padding: u64, extend: bool },
    Truncate { row: usize, back: usize },
    Empty { row: usize },
    Keep { row: usize, layer: usize, every: usize },
    Renew { row: usize, start: i64 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = prop_oneof![4 => 1usize..4, 3 => 4usize..70, 2 => 70usize..260];
    let step = (1u8..8, tokens, any::<u64>(), any::<bool>())
        .prop_map(|(rows, tokens, padding, extend)| Op::Step { rows, tokens, padding, extend });
    let op = prop_oneof![
        8 => step,
        2 => (0usize..3, 0usize..80).prop_map(|(row, back)| Op::Truncate { row, back }),
        1 => (0usize..3).prop_map(|row| Op::Empty { row }),
        2 => (0usize..3, 0usize..4, 1usize..6).prop_map(|(row, layer, every)| Op::Keep { row, layer, every }),
        1 => (0usize..3, 0i64..5000).prop_map(|(row, start)| Op::Renew { row, start }),
    ];
    prop::collection::vec(op, 1..10)
}

/// Which columns are tokens: all where `padding` is even, else a random left part and random holes are not.
fn mask(rows: usize, tokens: usize, padding: u64) -> Vec<bool> {
    let mut noise = Noise::new(padding);
    let left: Vec<usize> = (0..rows).map(|_| noise.below(tokens + 1)).collect();
    (0..rows * tokens)
        .map(|i| padding.is_multiple_of(2) || (i % tokens >= left[i / tokens] && noise.below(9) > 0))
        .collect()
}

fn apply<B: Backend>(pair: &mut Pair<B>, live: &mut [SeqId], op: &Op) {
    match *op {
        Op::Step { rows, tokens, padding, extend } => {
            let seqs: Vec<SeqId> = (0..3).rev().filter(|r| rows >> r & 1 == 1).map(|r| live[r]).collect();
            let mask = mask(seqs.len(), tokens, padding);
            pair.step(&Step { seqs, tokens, mask, extend }).unwrap();
        }
        Op::Truncate { row, back } => {
            let length = pair.store.length(live[row], None).unwrap();
            pair.truncate(live[row], length.saturating_sub(back));
        }
        Op::Empty { row } => pair.truncate(live[row], 0),
        Op::Keep { row, layer, every } => pair.keep(live[row], layer, every),
        Op::Renew { row, start } => {
            pair.free(live[row]);
            live[row] = pair.create(start);
        }
    }
}

/// Three sequences, all calls, and everything compared after each.
fn live_through<B: Backend>(pair: &mut Pair<B>, ops: &[Op]) {
    let mut live: Vec<SeqId> = [0, 0, 300].map(|start| pair.create(start)).to_vec();
    for op in ops {
        apply(pair, &mut live, op);
        pair.verify();
    }
    for id in live {
        pair.free(id);
    }
    pair.verify();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_store_on_the_kernels_answers_as_the_naive_one(plan in plans(), ops in ops(), seed in any::<u64>()) {
        let device = Cuda::new(Emulator::new(seed).with_poison().with_threads(2), Place::Host).unwrap();
        live_through(&mut Pair::with(&plan.0, None, seed, device, Rounding::Digits), &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_store_answers_as_the_naive_one_after_any_calls(plan in plans(), ops in ops(), seed in any::<u64>()) {
        live_through(&mut Pair::new(&plan.0, None, seed), &ops);
    }

    #[test]
    fn codes_do_not_depend_on_the_sizes_of_calls(plan in plans(), cuts in prop::collection::vec(1usize..120, 1..8)) {
        let total: usize = cuts.iter().sum();
        let plan = plan.0;
        let inputs = Inputs::new(plan.spec(), 1, total, 5);
        let (whole, parts) = (inputs.store(&plan, 2), inputs.store(&plan, 2));
        inputs.append(&whole, 0..total);
        let mut from = 0;
        for cut in cuts {
            inputs.append(&parts, from..from + cut);
            from += cut;
        }
        prop_assert_eq!(bits(&whole), bits(&parts));
        prop_assert_eq!(inputs.attend(&whole, total), inputs.attend(&parts, total));
    }
}

/// One random input for every layer, fed in any way to several stores.
struct Inputs {
    layers: Vec<(Tensor, Tensor, Tensor)>,
    rows: usize,
}

impl Inputs {
    fn new(spec: &PlanSpec, rows: usize, tokens: usize, seed: u64) -> Self {
        let mut noise = Noise::new(seed);
        let mut random = |heads, dim| Tensor::normal(Dtype::Bf16, [rows, heads, tokens, dim], &mut noise);
        let layers = spec.shape.layers.iter().map(|l| {
            (random(l.query_heads, l.key_dim), random(l.kv_heads, l.key_dim), random(l.kv_heads, l.value_dim))
        });
        Self { layers: layers.collect(), rows }
    }

    fn store(&self, plan: &Plan, threads_: usize) -> KvStore<Cpu> {
        let store = KvStore::new(plan.clone(), threads(threads_), None).unwrap();
        assert_eq!(store.create(self.rows).unwrap(), (0..self.rows as u64).map(SeqId).collect::<Vec<_>>());
        store
    }

    fn seqs(&self) -> Vec<SeqId> {
        (0..self.rows as u64).map(SeqId).collect()
    }

    fn append(&self, store: &KvStore<Cpu>, columns: std::ops::Range<usize>) {
        for (layer, (_, k, v)) in self.layers.iter().enumerate() {
            let (k, v) = (k.columns(columns.start, columns.end), v.columns(columns.start, columns.end));
            store.append(layer, &self.seqs(), &Tokens::new(k.view(), v.view())).unwrap();
        }
    }

    /// Outputs of all layers for the last queries, as bytes.
    fn attend(&self, store: &KvStore<Cpu>, tokens: usize) -> Vec<Tensor> {
        let answer = |(layer, (q, _, v)): (usize, &(Tensor, Tensor, Tensor))| {
            let q = q.columns(tokens.saturating_sub(5), tokens);
            let [b, h, t, _] = q.shape();
            let mut out = Tensor::zeros(Dtype::F32, [b, h, t, v.shape()[3]]);
            store.attend(layer, &self.seqs(), &Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
            out
        };
        self.layers.iter().enumerate().map(answer).collect()
    }
}

/// Everything that a store of sequence 0 decodes to, as bits.
fn bits(store: &KvStore<Cpu>) -> Vec<Vec<u32>> {
    let layers = store.plan().spec().shape.layers.clone();
    let places = layers.iter().enumerate().flat_map(|(l, shape)| (0..shape.kv_heads).map(move |h| (l, h)));
    places
        .map(|(layer, head)| {
            let d = store.decode(layer, SeqId(0), head).unwrap();
            d.keys.iter().chain(&d.values).map(|x| x.to_bits()).collect()
        })
        .collect()
}

fn four_bits() -> Plan {
    Plan::new(with_offset(spec(&CodecSpec::turboquant(4.0), &CodecSpec::turboquant(3.0), 4, 16))).unwrap()
}

#[test]
fn one_and_two_threads_give_the_same_bits() {
    let plan = four_bits();
    let inputs = Inputs::new(plan.spec(), 3, 700, 9);
    let stores = [1, 2].map(|n| inputs.store(&plan, n));
    for store in &stores {
        inputs.append(store, 0..700);
    }
    assert_eq!(bits(&stores[0]), bits(&stores[1]));
    assert_eq!(inputs.attend(&stores[0], 700), inputs.attend(&stores[1], 700));
}

#[test]
fn a_row_does_not_feel_the_rows_beside_it() {
    let plan = four_bits();
    let together = Inputs::new(plan.spec(), 4, 300, 11);
    let alone = Inputs {
        layers: together
            .layers
            .iter()
            .map(|(q, k, v)| (q.batch_row(0), k.batch_row(0), v.batch_row(0)))
            .collect(),
        rows: 1,
    };
    let (batch, single) = (together.store(&plan, 2), alone.store(&plan, 2));
    together.append(&batch, 0..300);
    alone.append(&single, 0..300);
    assert_eq!(bits(&batch), bits(&single));
    for (many, one) in together.attend(&batch, 300).iter().zip(alone.attend(&single, 300)) {
        assert_eq!(many.batch_row(0), one);
    }
}

/// A store that holds 100 tokens and has room for few more.
fn nearly_full() -> (Pair, SeqId) {
    let plan = four_bits();
    let mut free = Pair::new(&plan, None, 3);
    let id = free.create(0);
    free.step(&full_step(id, 100)).unwrap();
    let mut pair = Pair::new(&plan, Some(free.store.stats().unwrap().bytes_total + (64 << 10)), 3);
    let id = pair.create(0);
    pair.step(&full_step(id, 100)).unwrap();
    (pair, id)
}

fn full_step(id: SeqId, tokens: usize) -> Step {
    Step { seqs: vec![id], tokens, mask: vec![true; tokens], extend: false }
}

#[test]
fn a_step_that_does_not_fit_changes_nothing() {
    let (mut pair, id) = nearly_full();
    let before = (pair.store.stats().unwrap(), bits(&pair.store));
    for extend in [false, true] {
        let step = Step { extend, ..full_step(id, 20_000) };
        let error = pair.store.reserve(&[id], 20_000).unwrap_err();
        assert!(matches!(error, Error::Capacity { .. }), "{error}");
        assert!(matches!(pair.step(&step), Err(Error::Capacity { .. })));
        assert_eq!((pair.store.stats().unwrap(), bits(&pair.store)), before);
        pair.verify();
    }
    pair.step(&full_step(id, 1)).unwrap();
    pair.verify();
}

#[test]
fn capacity_that_runs_out_in_the_middle_of_a_step_is_repaired_by_truncate() {
    let (mut pair, id) = nearly_full();
    let append = |pair: &Pair, layer: usize, tokens: usize| {
        let shape = pair.naive.shape(layer);
        let k = Tensor::zeros(Dtype::F32, [1, shape.kv_heads, tokens, shape.key_dim]);
        let v = Tensor::zeros(Dtype::F32, [1, shape.kv_heads, tokens, shape.value_dim]);
        pair.store.append(layer, &[id], &Tokens::new(k.view(), v.view()))
    };
    append(&pair, 0, 3).unwrap();
    assert!(matches!(append(&pair, 1, 20_000), Err(Error::Capacity { .. })));
    assert_eq!([0, 1].map(|l| pair.store.length(id, Some(l)).unwrap()), [103, 100]);
    pair.store.check().unwrap();
    pair.store.truncate(id, 100).unwrap();
    pair.verify();
    pair.step(&full_step(id, 2)).unwrap();
    pair.verify();
}

#[test]
fn after_the_first_layer_of_a_step_no_layer_can_run_out() {
    let plan = four_bits();
    let store = Arc::new(KvStore::new(plan.clone(), Cpu::shared(), Some(3 << 20)).unwrap());
    let inputs = Inputs::new(plan.spec(), 1, 64, 1);
    let ids = store.create(2).unwrap();
    let feed = |id: SeqId, layer: usize| {
        let (_, k, v) = &inputs.layers[layer];
        store.append(layer, &[id], &Tokens::new(k.view(), v.view()))
    };
    let mut refused = [false; 2];
    while refused != [true; 2] {
        for (id, refused) in ids.iter().zip(&mut refused) {
            *refused = feed(*id, 0).is_err();
        }
        for id in ids.iter().zip(refused).filter(|(_, refused)| !refused).map(|(id, _)| *id) {
            (1..4).for_each(|layer| feed(id, layer).unwrap());
        }
        store.check().unwrap();
    }
    assert!(store.length(ids[0], None).unwrap() > 640);
}
