//! Plans and inputs of these tests.

use kvrs::{
    CodecSpec, Cpu, Dtype, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Queries, Rope, SeqId, Tokens,
};
use kvrs_testkit::{Noise, Tensor};

/// Full attention, a sliding window that is encoded, and one that stays raw.
pub(crate) fn shape() -> ModelShape {
    let rope = Some(Rope::new(1e4));
    let full = LayerShape { query_heads: 4, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    let sliding = |window| LayerShape { query_heads: 1, kv_heads: 1, sliding: Some(window), ..full.clone() };
    ModelShape { layers: vec![full.clone(), sliding(90), sliding(20)] }
}

pub(crate) fn plan(codec: &CodecSpec, sinks: usize, recent: usize) -> Plan {
    let spec = PlanSpec::uniform(shape(), codec.clone(), codec.clone());
    Plan::new(PlanSpec { sinks, recent, ..spec }).unwrap()
}

pub(crate) fn codec(bits: f64) -> CodecSpec {
    if bits == 0.0 { CodecSpec::raw16() } else { CodecSpec::turboquant(bits) }
}

pub(crate) fn store(plan: &Plan, capacity: Option<u64>) -> KvStore<Cpu> {
    KvStore::new(plan.clone(), Cpu::shared(), capacity).unwrap()
}

/// Feeds `tokens` random tokens, the same for the same seed, to every layer of one sequence.
pub(crate) fn feed(store: &KvStore<Cpu>, id: SeqId, tokens: usize, seed: u64) -> kvrs::Result<()> {
    let mut noise = Noise::new(seed);
    for (layer, shape) in store.plan().spec().shape.layers.iter().enumerate() {
        let mut random = |heads, dim| Tensor::normal(Dtype::F16, [1, heads, tokens, dim], &mut noise);
        let (q, k) = (random(shape.query_heads, shape.key_dim), random(shape.kv_heads, shape.key_dim));
        let v = random(shape.kv_heads, shape.value_dim);
        let mut out = Tensor::zeros(Dtype::F32, [1, shape.query_heads, tokens, shape.value_dim]);
        let tokens = Tokens::new(k.view(), v.view());
        store.extend(layer, &[id], &Queries::new(q.view()), &tokens, &mut out.view_mut(), None)?;
    }
    Ok(())
}

/// Everything that a sequence holds: positions and the bits of keys and values of each layer and head.
pub(crate) fn contents(store: &KvStore<Cpu>, id: SeqId) -> Vec<(Vec<i64>, Vec<u32>)> {
    let layers = store.plan().spec().shape.layers.iter().enumerate();
    let places = layers.flat_map(|(layer, shape)| (0..shape.kv_heads).map(move |head| (layer, head)));
    places
        .map(|(layer, head)| {
            let held = store.decode(layer, id, head).unwrap();
            (held.positions, held.keys.iter().chain(&held.values).map(|x| x.to_bits()).collect())
        })
        .collect()
}

/// Attention of one query on every layer, as bits.
pub(crate) fn attend(store: &KvStore<Cpu>, id: SeqId) -> Vec<u32> {
    let mut bits = Vec::new();
    for (layer, shape) in store.plan().spec().shape.layers.iter().enumerate() {
        let q = Tensor::normal(Dtype::F32, [1, shape.query_heads, 1, shape.key_dim], &mut Noise::new(5));
        let mut out = Tensor::zeros(Dtype::F32, [1, shape.query_heads, 1, shape.value_dim]);
        store.attend(layer, &[id], &Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
        let heads = 0..shape.query_heads;
        bits.extend(heads.flat_map(|head| out.row([0, head, 0])).map(f32::to_bits));
    }
    bits
}
