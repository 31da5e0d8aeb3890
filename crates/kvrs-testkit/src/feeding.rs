//! Feeding a store by itself, and everything that a sequence of it holds.

use crate::tensor::{Noise, Tensor};
use kvrs::{Cpu, Dtype, KvStore, Queries, SeqId, Tokens};

/// Feeds `tokens` random tokens, the same for the same seed, to every layer of one sequence; the outputs as bits.
///
/// # Errors
/// What the store answers.
pub fn feed(store: &KvStore<Cpu>, id: SeqId, tokens: usize, seed: u64) -> kvrs::Result<Vec<u32>> {
    let (mut noise, mut bits) = (Noise::new(seed), Vec::new());
    for (layer, shape) in store.plan().spec().shape.layers.iter().enumerate() {
        let mut random = |heads, dim| Tensor::normal(Dtype::F16, [1, heads, tokens, dim], &mut noise);
        let (q, k) = (random(shape.query_heads, shape.key_dim), random(shape.kv_heads, shape.key_dim));
        let v = random(shape.kv_heads, shape.value_dim);
        let mut out = Tensor::zeros(Dtype::F32, [1, shape.query_heads, tokens, shape.value_dim]);
        let new = Tokens::new(k.view(), v.view());
        store.extend(layer, &[id], &Queries::new(q.view()), &new, &mut out.view_mut(), None)?;
        let rows = (0..shape.query_heads).flat_map(|head| (0..tokens).map(move |t| [0, head, t]));
        bits.extend(rows.flat_map(|at| out.row(at)).map(f32::to_bits));
    }
    Ok(bits)
}

/// Everything that a sequence holds: positions and the bits of keys and values of each layer and head.
///
/// # Panics
/// If the sequence is not in the store.
#[must_use]
pub fn contents(store: &KvStore<Cpu>, id: SeqId) -> Vec<(Vec<i64>, Vec<u32>)> {
    let layers = store.plan().spec().shape.layers.iter().enumerate();
    let places = layers.flat_map(|(layer, shape)| (0..shape.kv_heads).map(move |head| (layer, head)));
    places
        .map(|(layer, head)| {
            let held = store.decode(layer, id, head).expect("a sequence of the store");
            (held.positions, held.keys.iter().chain(&held.values).map(|x| x.to_bits()).collect())
        })
        .collect()
}
