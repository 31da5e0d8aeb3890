//! Codecs by their names.

use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::{Dtype, HeadCodec, Side};
use kvrs_core::{LayerShape, Rope};
use std::sync::Arc;

/// A codec by its name and settings in order.
pub(crate) fn spec(text: &str) -> CodecSpec {
    let words: Vec<&str> = text.split(' ').collect();
    let number = |i: usize| words[i].parse::<f64>().unwrap();
    let params = match words[0] {
        "int8" | "raw16" => serde_json::json!({}),
        "fp8" => serde_json::json!({ "format": words[1] }),
        "kivi" => serde_json::json!({ "bits": number(1), "group": number(2) }),
        "rabitq" => serde_json::json!({ "bits": number(1), "error_bound": words.len() > 2 }),
        "qjl" => serde_json::json!({ "m": number(1) }),
        "turboquant" => serde_json::json!({ "bits": number(1) }),
        _ => {
            let sketch = words.get(2).unwrap_or(&"gaussian");
            serde_json::json!({ "bits": number(1), "variant": "prod", "sketch": sketch })
        }
    };
    let name = if words[0] == "prod" { "turboquant" } else { words[0] };
    serde_json::from_value(serde_json::json!({ "name": name, "params": params })).unwrap()
}

/// A layer of one key-value head of `d` channels.
pub(crate) fn one_head(query_heads: usize, d: usize, rope: &Rope) -> LayerShape {
    let rope = Some(rope.clone());
    LayerShape { query_heads, kv_heads: 1, key_dim: d, value_dim: d, rope, sliding: None }
}

/// The codec of `d` channels with keys and values by their names, and what is taken out before encoding.
pub(crate) fn codec(
    (keys, values, d): (&str, &str, usize),
    window: Dtype,
    rope: &Rope,
    constants: [Option<Arc<[f32]>>; 2],
) -> HeadCodec {
    let cache = &mut ConstantCache::default();
    let sides = [(Side::Key, keys), (Side::Value, values)].into_iter().zip(constants);
    let [key, value] = sides
        .map(|((side, text), constant)| {
            let (seed, rope) = (3, Some(rope));
            let context =
                SideContext { side, d, layer: 0, seed, window, rope, constant, group: 0, arrays: None };
            spec(text).build(&context, cache).unwrap()
        })
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    quant::assemble(key, value, 1).unwrap()
}
