//! Plans and stores of these tests.

use kvrs::{
    CodecSpec, Compress, Cpu, KvStore, LayerShape, ModelShape, Plan, PlanSpec, PolicySpec, Rope, SeqId,
};
pub(crate) use kvrs_testkit::feeding::{contents, feed};
use kvrs_testkit::pair::threads;
use serde_json::{Value, json};
use std::io::Cursor;

pub(crate) fn codec(name: &str, params: &Value) -> CodecSpec {
    serde_json::from_value(json!({"name": name, "params": params})).unwrap()
}

pub(crate) fn policy(name: &str, params: &Value) -> PolicySpec {
    serde_json::from_value(json!({"name": name, "params": params})).unwrap()
}

/// Full attention, a sliding window that is encoded, one that stays raw.
pub(crate) fn shape() -> ModelShape {
    let rope = Some(Rope::new(1e4));
    let full = LayerShape { query_heads: 2, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    let sliding = |window| LayerShape { query_heads: 1, kv_heads: 1, sliding: Some(window), ..full.clone() };
    ModelShape { layers: vec![full.clone(), sliding(90), sliding(20)] }
}

/// A plan without a policy for [`shape`].
pub(crate) fn plan(codec: &CodecSpec) -> Plan {
    let spec = PlanSpec::uniform(shape(), codec.clone(), codec.clone());
    Plan::new(PlanSpec { sinks: 3, recent: 8, ..spec }).unwrap()
}

/// Two layers with full attention and a policy.
pub(crate) fn evicting(codec: &CodecSpec, policy: &PolicySpec) -> Plan {
    let rope = Some(Rope::new(1e4));
    let layer = LayerShape { query_heads: 2, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    let spec = PlanSpec::uniform(ModelShape::uniform(2, layer), codec.clone(), codec.clone());
    Plan::new(PlanSpec { sinks: 3, recent: 8, evict: vec![Some(policy.clone()); 2], ..spec }).unwrap()
}

pub(crate) fn raw() -> CodecSpec {
    CodecSpec::raw16()
}

pub(crate) fn packed() -> CodecSpec {
    CodecSpec::turboquant(4.0)
}

pub(crate) fn store(plan: &Plan) -> KvStore<Cpu> {
    KvStore::new(plan.clone(), Cpu::shared(), None).unwrap()
}

pub(crate) fn store_on(plan: &Plan, n: usize) -> KvStore<Cpu> {
    KvStore::new(plan.clone(), threads(n), None).unwrap()
}

/// A sequence of `tokens` tokens.
pub(crate) fn fed(store: &KvStore<Cpu>, tokens: usize, seed: u64) -> SeqId {
    let id = store.create(1).unwrap()[0];
    if tokens > 0 {
        feed(store, id, tokens, seed).unwrap();
    }
    id
}

pub(crate) fn saved(store: &KvStore<Cpu>, id: SeqId, compress: Compress) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.save_to("a file", &mut bytes, id, compress).unwrap();
    bytes
}

pub(crate) fn loaded(store: &KvStore<Cpu>, bytes: &[u8]) -> kvrs::Result<SeqId> {
    store.load_from("a file", Cursor::new(bytes))
}
