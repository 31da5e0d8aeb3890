//! Top-k attention against softmax over the k largest scores of decoded tokens.
#![allow(clippy::unwrap_used, reason = "a test may")]

use kvrs::{
    AttendSpec, CodecSpec, Cpu, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Queries, SeqId, Tokens,
};
use kvrs_testkit::tensor::{Noise, Tensor};
use std::sync::Arc;

const TOKENS: usize = 700;
const DIM: usize = 64;

fn store(codec: &CodecSpec, k: Option<usize>, threads: usize) -> KvStore {
    let layer =
        LayerShape { query_heads: 4, kv_heads: 2, key_dim: DIM, value_dim: DIM, rope: None, sliding: None };
    let spec = PlanSpec::uniform(ModelShape::uniform(1, layer), codec.clone(), codec.clone());
    let plan = Plan::new(PlanSpec { attend: k.map(|k| AttendSpec::TopK { k }), ..spec }).unwrap();
    KvStore::new(plan, Arc::new(Cpu::new(Some(threads)).unwrap()), None).unwrap()
}

fn filled(store: &KvStore) -> Vec<SeqId> {
    let seqs = store.create(1).unwrap();
    let mut noise = Noise::new(5);
    let [k, v] = [0, 1].map(|_| Tensor::normal(kvrs::Dtype::F32, [1, 2, TOKENS, DIM], &mut noise));
    store.append(0, &seqs, &Tokens { k: k.view(), v: v.view(), mask: None, positions: None }).unwrap();
    seqs
}

fn query(rows: usize) -> Tensor {
    Tensor::normal(kvrs::Dtype::F32, [1, 4, rows, DIM], &mut Noise::new(9))
}

fn attend(store: &KvStore, seqs: &[SeqId], q: &Tensor) -> Vec<f32> {
    let mut out = Tensor::zeros(kvrs::Dtype::F32, [1, 4, q.view().shape()[2], DIM]);
    store.attend(0, seqs, &Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
    let mut row = vec![0.0; DIM];
    let heads = (0..4).flat_map(|head| (0..q.view().shape()[2]).map(move |column| [0, head, column]));
    heads
        .flat_map(|at| {
            out.view().read_row(at, &mut row);
            row.clone()
        })
        .collect()
}

/// Softmax over the k largest scores of what the store decodes to, in f64.
fn expected(store: &KvStore, seq: SeqId, q: &Tensor, k: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for head in 0..4 {
        let decoded = store.decode(0, seq, head / 2).unwrap();
        let mut row = vec![0.0; DIM];
        q.view().read_row([0, head, 0], &mut row);
        let dot =
            |key: &[f32]| -> f64 { row.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
        let scores: Vec<f64> =
            decoded.keys.chunks_exact(DIM).map(|key| dot(key) / (DIM as f64).sqrt()).collect();
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let weights: Vec<(usize, f64)> =
            order[..k.min(order.len())].iter().map(|i| (*i, scores[*i].exp())).collect();
        let total: f64 = weights.iter().map(|w| w.1).sum();
        let value = |i: usize, c: usize| f64::from(decoded.values[i * DIM + c]);
        out.extend((0..DIM).map(|c| weights.iter().map(|(i, w)| w / total * value(*i, c)).sum::<f64>()));
    }
    out
}

fn error(got: &[f32], expected: &[f64]) -> f64 {
    let largest = expected.iter().fold(0f64, |m, x| m.max(x.abs()));
    got.iter().zip(expected).fold(0f64, |m, (a, b)| m.max((f64::from(*a) - b).abs())) / largest
}

#[test]
fn a_query_sees_its_largest_scores_and_nothing_else() {
    for k in [1, 7, 64, TOKENS, 4 * TOKENS] {
        let store = store(&CodecSpec::raw16(), Some(k), 1);
        let (seqs, q) = (filled(&store), query(1));
        let error = error(&attend(&store, &seqs, &q), &expected(&store, seqs[0], &q, k));
        assert!(error < 1e-4, "k {k}: {error:e}");
    }
}

#[test]
fn packed_codes_are_ranked_by_their_own_scores() {
    // Integer kernels have noise of their own: a token at the cut may change places with its neighbour.
    let store = store(&CodecSpec::turboquant(4.0), Some(64), 1);
    let (seqs, q) = (filled(&store), query(1));
    let error = error(&attend(&store, &seqs, &q), &expected(&store, seqs[0], &q, 64));
    assert!(error < 0.15, "{error:e}");
}

#[test]
fn all_scores_kept_are_plain_attention() {
    let codec = CodecSpec::turboquant(4.0);
    let q = query(3);
    let [top, plain] = [Some(TOKENS), None].map(|k| {
        let store = store(&codec, k, 1);
        let seqs = filled(&store);
        attend(&store, &seqs, &q)
    });
    let plain: Vec<f64> = plain.iter().map(|x| f64::from(*x)).collect();
    assert!(error(&top, &plain) < 1e-3);
}

#[test]
fn values_of_other_tokens_are_not_read_and_that_is_counted() {
    let store = store(&CodecSpec::turboquant(4.0), Some(4), 1);
    let (seqs, q) = (filled(&store), query(1));
    attend(&store, &seqs, &q);
    let stats = store.stats().unwrap();
    // 44 tiles of 16 per head; two query heads keep 4 tokens each: at most 8 of them.
    assert_eq!(stats.value_tiles_seen, 2 * TOKENS.div_ceil(16) as u64 + 2);
    assert!((2..=16).contains(&stats.value_tiles_read), "{}", stats.value_tiles_read);
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let q = query(2);
    let results = [1, 2, 4].map(|threads| {
        let store = store(&CodecSpec::turboquant(3.0), Some(20), threads);
        let seqs = filled(&store);
        attend(&store, &seqs, &q).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

#[test]
fn extend_ranks_its_own_tokens_too() {
    let store = store(&CodecSpec::raw16(), Some(1), 1);
    let seqs = filled(&store);
    let q = query(1);
    // The new key is the query of head 0 itself, the largest score there can be.
    let mut row = vec![0.0; DIM];
    q.view().read_row([0, 0, 0], &mut row);
    let mut k = Tensor::zeros(kvrs::Dtype::F32, [1, 2, 1, DIM]);
    let mut v = Tensor::zeros(kvrs::Dtype::F32, [1, 2, 1, DIM]);
    for x in &mut row {
        *x *= 8.0;
    }
    k.view_mut().write_row([0, 0, 0], &row);
    v.view_mut().write_row([0, 0, 0], &[3.0; DIM]);
    let mut out = Tensor::zeros(kvrs::Dtype::F32, [1, 4, 1, DIM]);
    let tokens = Tokens { k: k.view(), v: v.view(), mask: None, positions: None };
    store.extend(0, &seqs, &Queries::new(q.view()), &tokens, &mut out.view_mut(), None).unwrap();
    out.view().read_row([0, 0, 0], &mut row);
    assert!(row.iter().all(|x| (x - 3.0).abs() < 1e-5), "{row:?}");
}

#[test]
fn no_score_at_all_is_refused() {
    let layer =
        LayerShape { query_heads: 1, kv_heads: 1, key_dim: DIM, value_dim: DIM, rope: None, sliding: None };
    let spec = PlanSpec::uniform(ModelShape::uniform(1, layer), CodecSpec::raw16(), CodecSpec::raw16());
    let spec = PlanSpec { attend: Some(AttendSpec::TopK { k: 0 }), ..spec };
    let message = Plan::new(spec).unwrap_err().to_string();
    assert!(message.contains("attend.k is 0; allowed: 1 or more"), "{message}");
}
