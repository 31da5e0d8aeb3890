//! Joint allocation of tokens and rates, as it stands in a plan.

use crate::plan::PlanSpec;
use kvrs_codec::quant::{self, CodecSpec};
use kvrs_core::budget::Budget;
use kvrs_core::policy::{Caote, PolicySpec, SnapKv};
use kvrs_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// At the end of a prompt every token of the layers with full attention goes, is stored at a low rate, or at the plan's
/// own, as one predicted distortion says for the bytes.
///
/// The distortion is that of attention-aware transform coding (Laus et al., 2026, arXiv:2608.14191, section 3): the
/// attention of the prompt's last queries, squared, times how far a value lies from the output (keys, and tokens that
/// go) or from zero (values), times the square error of the rate. A layer's heads share its bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JointSpec {
    /// Bytes of a sequence, everything counted.
    pub bytes: Budget,
    /// Codec of the keys at the low rate, one a layer.
    pub keys: Vec<CodecSpec>,
    /// Codec of the values at the low rate, one a layer.
    pub values: Vec<CodecSpec>,
    /// Queries at the end of a prompt whose attention counts.
    #[serde(default = "default_window")]
    pub window: usize,
}

fn default_window() -> usize {
    32
}

impl JointSpec {
    /// The policy whose statistics and budget it takes.
    pub(crate) fn policy(&self) -> PolicySpec {
        let scores = SnapKv { budget: Some(self.bytes), window: self.window, kernel: 1, ..SnapKv::default() };
        PolicySpec::Caote(Caote { scores: Box::new(PolicySpec::SnapKv(scores)), fast: false })
    }
}

/// Where a layer's tokens are allocated jointly.
pub(crate) fn of_layer(spec: &PlanSpec, layer: usize) -> Option<&JointSpec> {
    spec.joint.as_ref().filter(|_| spec.shape.layers[layer].sliding.is_none() && spec.seals(layer))
}

pub(crate) fn validate(spec: &PlanSpec) -> Result<()> {
    let Some(joint) = &spec.joint else { return Ok(()) };
    let layers = spec.shape.layers.len();
    if spec.evict.iter().any(Option::is_some) {
        return Err(Error::plan("joint", "given beside evict", "one of the two"));
    }
    for (name, codecs) in [("joint.keys", &joint.keys), ("joint.values", &joint.values)] {
        if codecs.len() != layers {
            return Err(Error::plan(
                name,
                format!("{} codecs", codecs.len()),
                format!("{layers}, one a layer"),
            ));
        }
        codecs.iter().try_for_each(quant::check)?;
    }
    if !matches!(joint.bytes, Budget::Bytes(_)) {
        return Err(Error::plan("joint.bytes", joint.bytes, "bytes per sequence"));
    }
    if (0..layers).all(|layer| of_layer(spec, layer).is_none()) {
        return Err(Error::plan("joint", "given", "None: no layer has full attention and a codec"));
    }
    joint.policy().validate_as("joint", spec.sinks, spec.recent)
}
