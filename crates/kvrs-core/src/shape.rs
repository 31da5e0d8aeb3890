//! The shape of a model's attention: heads, dimensions, rotary embedding and sliding windows of each layer.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest head dimension that a page can describe.
pub const MAX_HEAD_DIM: usize = 1024;
/// Largest number of layers of a model.
pub const MAX_LAYERS: usize = 4096;
/// Largest number of heads of a layer.
pub const MAX_HEADS: usize = 4096;

/// Which channels a rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pairing {
    /// Channel `j` with channel `j + dim / 2` (Llama, Qwen, Gemma in transformers).
    #[default]
    Half,
    /// Channel `2 j` with channel `2 j + 1` (the original paper, GPT-J).
    Interleaved,
}

/// Rotary position embedding of a layer (Su et al., 2021, arXiv:2104.09864).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the geometric series of frequencies; ignored if `inv_freq` is given.
    pub theta: f64,
    /// Channels that are turned, from channel 0 on; `None`: all.
    #[serde(default)]
    pub dim: Option<usize>,
    /// Which channels form a pair.
    #[serde(default)]
    pub pairing: Pairing,
    /// The model's own inverse frequencies, one per pair.
    #[serde(default)]
    pub inv_freq: Option<Vec<f32>>,
    /// Factor on cosine and sine (`YaRN`); 1 for plain rotary embeddings.
    #[serde(default = "one")]
    pub attention_factor: f32,
}

fn one() -> f32 {
    1.0
}

impl Rope {
    /// A plain rotary embedding over all channels.
    #[must_use]
    pub fn new(theta: f64) -> Self {
        Self { theta, dim: None, pairing: Pairing::Half, inv_freq: None, attention_factor: 1.0 }
    }

    /// Channels that are turned, of `key_dim`.
    #[must_use]
    pub fn rotary_dim(&self, key_dim: usize) -> usize {
        self.dim.unwrap_or(key_dim)
    }

    fn validate(&self, layer: usize, key_dim: usize) -> Result<()> {
        let name = |field: &str| format!("shape.rope[{layer}].{field}");
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(Error::plan(name("theta"), self.theta, "a finite number above 0"));
        }
        let dim = self.rotary_dim(key_dim);
        if dim == 0 || dim > key_dim || !dim.is_multiple_of(2) {
            return Err(Error::plan(name("dim"), dim, format!("an even number in 2..={key_dim}")));
        }
        if let Some(freq) = &self.inv_freq {
            if freq.len() != dim / 2 {
                return Err(Error::plan(name("inv_freq"), format!("{} numbers", freq.len()), dim / 2));
            }
            if let Some(bad) = freq.iter().find(|f| !(f.is_finite() && **f >= 0.0 && **f < 6.0)) {
                return Err(Error::plan(name("inv_freq"), bad, "finite numbers in 0..6"));
            }
        }
        if !(self.attention_factor.is_finite() && self.attention_factor > 0.0) {
            return Err(Error::plan(
                name("attention_factor"),
                self.attention_factor,
                "a finite number above 0",
            ));
        }
        Ok(())
    }
}

/// The attention of one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Query heads.
    pub query_heads: usize,
    /// Key-value heads; query head `j` reads key-value head `j / (query_heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of a key.
    pub key_dim: usize,
    /// Channels of a value.
    pub value_dim: usize,
    /// Rotary embedding that the keys went through; `None`: no rotation.
    pub rope: Option<Rope>,
    /// Sliding window: key `j` is visible to query `i` if `i - j < sliding`; `None`: full attention.
    pub sliding: Option<usize>,
}

impl LayerShape {
    /// Query heads per key-value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    fn validate(&self, layer: usize) -> Result<()> {
        let name = |field: &str| format!("shape.{field}[{layer}]");
        let within = |field: &str, value: usize, max: usize| {
            if value == 0 || value > max {
                return Err(Error::plan(name(field), value, format!("1..={max}")));
            }
            Ok(())
        };
        within("query_heads", self.query_heads, MAX_HEADS)?;
        within("kv_heads", self.kv_heads, MAX_HEADS)?;
        within("head_dim", self.key_dim, MAX_HEAD_DIM)?;
        within("value_dim", self.value_dim, MAX_HEAD_DIM)?;
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            let allowed = format!("a multiple of kv_heads = {}", self.kv_heads);
            return Err(Error::plan(name("query_heads"), self.query_heads, allowed));
        }
        if self.sliding == Some(0) {
            return Err(Error::plan(name("sliding"), 0, "None or a number of tokens above 0"));
        }
        self.rope.as_ref().map_or(Ok(()), |rope| rope.validate(layer, self.key_dim))
    }
}

/// The attention of a whole model, one entry a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelShape {
    /// The layers in order.
    pub layers: Vec<LayerShape>,
}

impl ModelShape {
    /// A model whose layers are all alike.
    #[must_use]
    pub fn uniform(layers: usize, layer: LayerShape) -> Self {
        Self { layers: vec![layer; layers] }
    }

    /// Checks every field of every layer.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field, its layer, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return Err(Error::plan("shape.layers", self.layers.len(), format!("1..={MAX_LAYERS}")));
        }
        self.layers.iter().enumerate().try_for_each(|(i, layer)| layer.validate(i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer() -> LayerShape {
        LayerShape {
            query_heads: 8,
            kv_heads: 2,
            key_dim: 64,
            value_dim: 64,
            rope: Some(Rope::new(1e4)),
            sliding: None,
        }
    }

    #[test]
    fn a_group_is_query_heads_per_kv_head() {
        assert_eq!(layer().group(), 4);
    }

    #[test]
    fn uneven_groups_are_refused_by_name() {
        let shape = ModelShape::uniform(2, LayerShape { query_heads: 7, ..layer() });
        let message = shape.validate().unwrap_err().to_string();
        assert!(
            message.contains("query_heads[0] is 7") && message.contains("multiple of kv_heads = 2"),
            "{message}"
        );
    }

    #[test]
    fn an_odd_rotary_dim_is_refused() {
        let rope = Rope { dim: Some(33), ..Rope::new(1e4) };
        assert!(ModelShape::uniform(1, LayerShape { rope: Some(rope), ..layer() }).validate().is_err());
    }
}
