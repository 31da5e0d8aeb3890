//! What to keep and how: the validated, immutable settings of a store.

use crate::calibration::Calibration;
use crate::compile::{Compiled, LayerReport, RAW_CODEC};
use crate::evict::plan as evict;
use crate::joint::{self, JointSpec};
use crate::memory::Memory;
use crate::top_k::{self, AttendSpec};
use crate::{hash, plan_file};
use kvrs_codec::Dtype;
use kvrs_codec::quant::CodecSpec;
use kvrs_core::policy::PolicySpec;
use kvrs_core::{Error, ModelShape, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Most sinks or recent tokens of a plan.
const MAX_WINDOW: usize = 1 << 24;

/// One constant per layer, flattened `[kv_heads, dim]`; `None` for a layer without one.
pub(crate) type LayerConstants = Vec<Option<Vec<f32>>>;

/// The settings of a plan as they were given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanSpec {
    /// The model's attention.
    pub shape: ModelShape,
    /// Codec of the keys, one a layer.
    pub keys: Vec<CodecSpec>,
    /// Codec of the values, one a layer.
    pub values: Vec<CodecSpec>,
    /// First tokens of a sequence that stay 16-bit.
    #[serde(default = "default_sinks")]
    pub sinks: usize,
    /// Newest tokens that stay 16-bit.
    #[serde(default = "default_recent")]
    pub recent: usize,
    /// 16-bit type of uncompressed tokens; `None`: the input's own (f32 becomes f16).
    #[serde(default)]
    pub window_dtype: Option<String>,
    /// Seed of the rotations.
    #[serde(default)]
    pub seed: u64,
    /// Policy of each layer that evicts tokens; empty: none evicts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evict: Vec<Option<PolicySpec>>,
    /// Most tokens of an open prompt that wait, uncompressed, for a policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_budget: Option<usize>,
    /// Joint choice of tokens and rates at the end of prompts, in place of policies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joint: Option<JointSpec>,
    /// Another attention than over all kept tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attend: Option<AttendSpec>,
    /// What calibration measured, for codecs that are built from data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Name of the model, for people.
    #[serde(default)]
    pub name: Option<String>,
    /// Constant of the keys before RoPE, one per layer, flattened `[kv_heads, key_dim]`.
    #[serde(skip)]
    pub key_offset: Option<Vec<Option<Vec<f32>>>>,
    /// Mean of the values, one per layer, flattened `[kv_heads, value_dim]`.
    #[serde(skip)]
    pub value_offset: Option<Vec<Option<Vec<f32>>>>,
}

fn default_sinks() -> usize {
    4
}

fn default_recent() -> usize {
    128
}

impl PlanSpec {
    /// The same codecs in every layer, with the default window.
    #[must_use]
    pub fn uniform(shape: ModelShape, keys: CodecSpec, values: CodecSpec) -> Self {
        let n = shape.layers.len();
        Self {
            shape,
            keys: vec![keys; n],
            values: vec![values; n],
            sinks: default_sinks(),
            recent: default_recent(),
            window_dtype: None,
            seed: 0,
            evict: Vec::new(),
            prompt_budget: None,
            joint: None,
            attend: None,
            calibration: None,
            name: None,
            key_offset: None,
            value_offset: None,
        }
    }

    /// Whether the codecs of a layer pack anything.
    pub(crate) fn seals(&self, layer: usize) -> bool {
        [&self.keys[layer], &self.values[layer]].iter().any(|codec| codec.name != RAW_CODEC)
    }

    pub(crate) fn window(&self) -> Result<Option<Dtype>> {
        let Some(name) = &self.window_dtype else { return Ok(None) };
        match Dtype::from_name(name) {
            Some(dtype) if dtype != Dtype::F32 => Ok(Some(dtype)),
            _ => Err(Error::plan("window_dtype", name, "None, float16, bfloat16")),
        }
    }

    fn validate(&self) -> Result<()> {
        self.shape.validate()?;
        let layers = self.shape.layers.len();
        for (name, n) in [("keys", self.keys.len()), ("values", self.values.len())] {
            if n != layers {
                return Err(Error::plan(name, format!("{n} codecs"), format!("{layers}, one a layer")));
            }
        }
        for (name, n) in [("sinks", self.sinks), ("recent", self.recent)] {
            if n > MAX_WINDOW {
                return Err(Error::plan(name, n, format!("0..={MAX_WINDOW}")));
            }
        }
        self.window()?;
        evict::validate(self)?;
        joint::validate(self)?;
        top_k::validate(self)?;
        self.validate_offset("key_offset", self.key_offset.as_ref(), |l| l.kv_heads * l.key_dim)?;
        self.validate_offset("value_offset", self.value_offset.as_ref(), |l| l.kv_heads * l.value_dim)
    }

    fn validate_offset(
        &self,
        name: &str,
        offset: Option<&LayerConstants>,
        len: impl Fn(&kvrs_core::LayerShape) -> usize,
    ) -> Result<()> {
        let Some(offset) = offset else { return Ok(()) };
        let layers = &self.shape.layers;
        if offset.len() != layers.len() {
            return Err(Error::plan(name, format!("{} layers", offset.len()), layers.len()));
        }
        for (i, (constants, shape)) in offset.iter().zip(layers).enumerate() {
            let Some(constants) = constants else { continue };
            if constants.len() != len(shape) {
                let got = format!("{} numbers", constants.len());
                return Err(Error::plan(
                    format!("{name}[{i}]"),
                    got,
                    format!("{} (kv_heads * dim)", len(shape)),
                ));
            }
            if let Some(bad) = constants.iter().find(|x| x.is_nan() || x.abs() > 65504.0) {
                return Err(Error::plan(format!("{name}[{i}]"), bad, "finite numbers up to 65504"));
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Inner {
    spec: PlanSpec,
    f16: Compiled,
    bf16: OnceLock<Compiled>,
    hash: String,
}

/// A validated plan; cheap to clone.
#[derive(Debug, Clone)]
pub struct Plan(Arc<Inner>);

impl Plan {
    /// Validates a plan and derives every layer's page layout and constants.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field, its value and what is allowed.
    pub fn new(mut spec: PlanSpec) -> Result<Self> {
        spec.validate()?;
        if spec.evict.iter().all(Option::is_none) {
            spec.evict.clear();
        }
        let f16 = Compiled::new(&spec, Dtype::F16)?;
        evict::validate_bytes(&f16)?;
        let hash = hash::of_spec(&spec);
        Ok(Self(Arc::new(Inner { spec, f16, bf16: OnceLock::new(), hash })))
    }

    /// The same codec for keys and values in every layer, with the default window.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn uniform(shape: ModelShape, codec: &CodecSpec) -> Result<Self> {
        Self::new(PlanSpec::uniform(shape, codec.clone(), codec.clone()))
    }

    /// The settings as they were given.
    #[must_use]
    pub fn spec(&self) -> &PlanSpec {
        &self.0.spec
    }

    /// SHA-256 of everything that decides codes: 64 hex digits.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.0.hash
    }

    /// Layouts and constants for tokens kept as `window` (f16 or bf16).
    pub(crate) fn compiled(&self, window: Dtype) -> Result<&Compiled> {
        if window != Dtype::Bf16 {
            return Ok(&self.0.f16);
        }
        if let Some(compiled) = self.0.bf16.get() {
            return Ok(compiled);
        }
        let compiled = Compiled::new(&self.0.spec, Dtype::Bf16)?;
        Ok(self.0.bf16.get_or_init(|| compiled))
    }

    /// Writes the plan as one safetensors file, replacing an older one as a whole.
    ///
    /// # Errors
    /// [`Error::Io`] naming the path.
    pub fn save(&self, path: &Path) -> Result<()> {
        plan_file::save(self, path)
    }

    /// Reads a plan file.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::Format`] if it is cut, of another version or not a plan,
    /// [`Error::Plan`] if its settings are not allowed.
    pub fn load(path: &Path) -> Result<Self> {
        plan_file::load(path)
    }

    /// Reads the bytes of a plan file; `what` names it in errors.
    ///
    /// # Errors
    /// As [`Plan::load`].
    pub fn from_bytes(what: &str, bytes: &[u8]) -> Result<Self> {
        plan_file::parse(what, bytes)
    }

    /// Bytes that a store will take for `batch` sequences of `tokens` tokens, before anything is run.
    ///
    /// # Errors
    /// [`Error::Argument`] if a count is too large to be a cache.
    pub fn memory(&self, tokens: usize, batch: usize) -> Result<Memory> {
        Memory::of(self, tokens, batch)
    }

    /// What each layer does with its tokens.
    #[must_use]
    pub fn describe(&self) -> Vec<LayerReport> {
        self.0.f16.layers.iter().enumerate().map(|(i, layer)| layer.report(&self.0.spec, i)).collect()
    }
}
