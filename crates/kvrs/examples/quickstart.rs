//! Ten lines of kvrs from Rust: append 300 tokens, attend with one query.
#![allow(clippy::print_stdout, reason = "an example shows its result")]

use kvrs::{
    CodecSpec, Cpu, Dtype, Geometry, KvStore, LayerShape, ModelShape, Plan, Queries, Rope, Tokens, View,
    ViewMut,
};

fn main() -> kvrs::Result<()> {
    let rope = Some(Rope::new(1e4));
    let layer = LayerShape { query_heads: 4, kv_heads: 2, key_dim: 64, value_dim: 64, rope, sliding: None };
    let store = KvStore::new(
        Plan::uniform(ModelShape::uniform(1, layer), &CodecSpec::turboquant(4.0))?,
        Cpu::shared(),
        None,
    )?;
    let data: Vec<u8> = (0..2 * 300 * 64).flat_map(|i| (i as f32 * 0.7).sin().to_le_bytes()).collect();
    let (seqs, kv) =
        (store.create(1)?, View::new("k", &data, Geometry::contiguous(Dtype::F32, [1, 2, 300, 64]))?);
    store.append(0, &seqs, &Tokens::new(kv, kv))?;
    let q = View::new("q", &data, Geometry::contiguous(Dtype::F32, [1, 4, 1, 64]))?;
    let mut out = vec![0; 4 * 64 * 4];
    let mut out = ViewMut::new("out", &mut out, Geometry::contiguous(Dtype::F32, [1, 4, 1, 64]))?;
    store.attend(0, &seqs, &Queries::new(q), &mut out, None)?;
    println!("{} tokens in {} bytes of codes", store.length(seqs[0], None)?, store.stats()?.bytes_codes);
    Ok(())
}
