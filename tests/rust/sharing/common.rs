//! Plans and inputs of these tests.

use kvrs::{CodecSpec, Cpu, Dtype, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Queries, Rope, SeqId};
pub(crate) use kvrs_testkit::feeding::contents;
use kvrs_testkit::{Noise, Tensor, feeding};

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

/// As [`feeding::feed`], without the outputs.
pub(crate) fn feed(store: &KvStore<Cpu>, id: SeqId, tokens: usize, seed: u64) -> kvrs::Result<()> {
    feeding::feed(store, id, tokens, seed).map(drop)
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
