//! The quantisers: each file in this folder is one method, registered by its [`Entry`].
//!
//! A quantiser is data: a descriptor, constants and an encoder. No kernel knows its name.

mod raw16;
mod turboquant;

use crate::codec::{HeadCodec, SideCodec};
use crate::desc::{PageDesc, Path, RunDesc, Side, SideDesc};
use crate::offset::{KeyOffset, phase_table};
use crate::phasor::Phasors;
use crate::view::Dtype;
use kvrs_core::{Error, LayerShape, Result, Rope};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::Arc;

/// Slots of a packed page.
const PACKED_SLOTS: u32 = 64;
/// Slots of a raw page.
const RAW_SLOTS: u32 = 16;

/// A codec's settings as they stand in a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodecSpec {
    /// Name in the registry.
    pub name: String,
    /// Settings by name; those left out have their defaults.
    #[serde(default)]
    pub params: Map<String, Value>,
}

/// A setting of a codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What is allowed, for people.
    pub allowed: &'static str,
    /// The default as JSON; `None`: the setting must be given.
    pub default: Option<&'static str>,
}

/// A quantiser of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Name in plans.
    pub name: &'static str,
    /// Where the method is described.
    pub paper: &'static str,
    /// Its settings.
    pub parameters: &'static [Parameter],
    /// Checks the settings, as far as no layer is needed.
    check: fn(&Settings<'_>) -> Result<()>,
    /// Builds one side of one head.
    build: fn(&Settings<'_>, &SideContext<'_>, &mut ConstantCache) -> Result<SideBuild>,
}

static ENTRIES: [Entry; 2] = [raw16::ENTRY, turboquant::ENTRY];

/// Every quantiser, by name.
#[must_use]
pub fn entries() -> &'static [Entry] {
    &ENTRIES
}

/// The layer and side that a codec is built for.
#[derive(Debug)]
pub struct SideContext<'a> {
    /// Keys or values.
    pub side: Side,
    /// Channels of a head.
    pub d: usize,
    /// The layer, for messages.
    pub layer: usize,
    /// Seed of the plan.
    pub seed: u64,
    /// 16-bit type of uncompressed tokens.
    pub window: Dtype,
    /// The layer's rotary embedding; used with a constant of keys.
    pub rope: Option<&'a Rope>,
    /// Keys: the constant before RoPE `[d]`; values: the mean `[d]`.
    pub constant: Option<Arc<[f32]>>,
}

/// One side of a codec before its place in a page is known.
#[derive(Debug, Clone)]
pub struct SideBuild {
    /// Layout; page offsets are 0.
    pub desc: SideDesc,
    /// Constants and encoder.
    pub codec: SideCodec,
    /// Tokens that are encoded together.
    pub group: u32,
}

/// Constants that layers and heads share.
#[derive(Debug, Default)]
pub struct ConstantCache {
    floats: HashMap<(u64, u64, Side, usize), Arc<[f32]>>,
    levels: HashMap<Vec<i8>, Arc<[i8]>>,
    tables: HashMap<Vec<u64>, Arc<[f32]>>,
    own_bytes: usize,
}

impl ConstantCache {
    /// Bytes of everything that was built through this cache.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let floats = self.floats.values().chain(self.tables.values()).map(|c| size_of_val(&**c));
        (floats.sum::<usize>() + self.levels.keys().map(Vec::len).sum::<usize>() + self.own_bytes) as u64
    }

    /// The constant of a random stream, made once.
    fn floats(
        &mut self,
        purpose: u64,
        context: &SideContext<'_>,
        make: impl FnOnce(u64) -> Vec<f32>,
    ) -> Arc<[f32]> {
        let SideContext { seed, side, d, .. } = *context;
        let made = || make(crate::rng::stream(seed, purpose, side, d)).into();
        self.floats.entry((seed, purpose, side, d)).or_insert_with(made).clone()
    }

    fn levels(&mut self, levels: Vec<i8>) -> Arc<[i8]> {
        self.levels.entry(levels).or_insert_with_key(|levels| levels.as_slice().into()).clone()
    }

    /// The key constant or the value mean of a side, as the stages that every codec shares.
    fn centre(&mut self, context: &SideContext<'_>) -> Result<(Option<KeyOffset>, Option<Arc<[f32]>>)> {
        let Some(constant) = &context.constant else { return Ok((None, None)) };
        if constant.len() != context.d {
            let what = format!("{} offset of layer {}", side_name(context.side), context.layer);
            return Err(Error::plan(what, format!("{} numbers", constant.len()), context.d));
        }
        if context.side == Side::Value {
            self.own_bytes += size_of_val(&**constant);
            return Ok((None, Some(constant.clone())));
        }
        let phasors = match context.rope {
            Some(rope) => Phasors::new(rope, context.d)?,
            None => Phasors::still(context.d),
        };
        let mut table = |turns: &[u64]| {
            self.tables.entry(turns.to_vec()).or_insert_with_key(|turns| phase_table(turns).into()).clone()
        };
        let offset = KeyOffset::with_table(constant, &phasors, &mut table);
        self.own_bytes += offset.bytes();
        Ok(((offset.base_pairs() > 0).then_some(offset), None))
    }
}

impl CodecSpec {
    /// TurboQuant with `bits` bits per channel and defaults otherwise.
    #[must_use]
    pub fn turboquant(bits: f64) -> Self {
        let params = std::iter::once(("bits".to_owned(), Value::from(bits))).collect();
        Self { name: turboquant::ENTRY.name.to_owned(), params }
    }

    /// Uncompressed 16-bit rows.
    #[must_use]
    pub fn raw16() -> Self {
        Self { name: raw16::ENTRY.name.to_owned(), params: Map::new() }
    }

    /// Builds one side of one head.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the codec or its setting, the value and what is allowed.
    pub fn build(&self, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
        let prefix = format!("{}[{}]", side_name(context.side), context.layer);
        let settings = self.settings(&prefix)?;
        (settings.entry.build)(&settings, context, cache)
    }

    fn settings(&self, prefix: &str) -> Result<Settings<'_>> {
        let names = || entries().iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
        let entry = entries().iter().find(|e| e.name == self.name);
        let entry = entry.ok_or_else(|| Error::plan(format!("{prefix}.name"), &self.name, names()))?;
        let known = |name: &String| entry.parameters.iter().any(|p| p.name == name);
        if let Some(unknown) = self.params.keys().find(|name| !known(name)) {
            let allowed = entry.parameters.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
            let allowed = if allowed.is_empty() { "no settings".to_owned() } else { allowed };
            return Err(Error::plan(format!("a setting of {prefix}.{}", entry.name), unknown, allowed));
        }
        Ok(Settings { entry, prefix: prefix.to_owned(), params: &self.params })
    }
}

impl std::fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        for (i, (name, value)) in self.params.iter().filter(|(_, v)| !v.is_null()).enumerate() {
            write!(f, "{}{name}=", if i == 0 { "(" } else { ", " })?;
            match value {
                Value::String(text) => f.write_str(text)?,
                other => write!(f, "{other}")?,
            }
        }
        if self.params.values().all(Value::is_null) { Ok(()) } else { f.write_str(")") }
    }
}

/// Checks a codec's name and settings, as far as no layer is needed.
///
/// # Errors
/// [`Error::Plan`] naming the codec or its setting, the value and what is allowed.
pub fn check(spec: &CodecSpec) -> Result<()> {
    let settings = spec.settings("codec")?;
    (settings.entry.check)(&settings)
}

fn side_name(side: Side) -> &'static str {
    match side {
        Side::Key => "keys",
        Side::Value => "values",
    }
}

/// The settings of one codec, with their names for messages.
struct Settings<'a> {
    entry: &'static Entry,
    prefix: String,
    params: &'a Map<String, Value>,
}

impl Settings<'_> {
    fn error(&self, name: &str, got: impl ToString, allowed: impl ToString) -> Error {
        Error::plan(format!("{}.{name}", self.prefix), got, allowed)
    }

    fn parameter(&self, name: &str) -> &'static Parameter {
        self.entry.parameters.iter().find(|p| p.name == name).expect("a codec reads its own parameters")
    }

    /// A given, non-null value.
    fn get(&self, name: &str) -> Option<&Value> {
        self.params.get(name).filter(|v| !v.is_null())
    }

    fn number(&self, name: &str) -> Result<f64> {
        let allowed = self.parameter(name).allowed;
        let value = self.get(name).ok_or_else(|| self.error(name, "missing", allowed))?;
        value.as_f64().ok_or_else(|| self.error(name, value, allowed))
    }

    /// One of `choices`; the first if it is not given.
    fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<T> {
        let Some(value) = self.get(name) else { return Ok(choices[0].1) };
        let found = choices.iter().find(|(choice, _)| Some(*choice) == value.as_str());
        found.map(|(_, t)| *t).ok_or_else(|| self.error(name, plain(value), self.parameter(name).allowed))
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The layout of `runs` that lie one after the other on the Dot path, with one scale per token or none.
fn dot_side(d: usize, runs: Vec<RunDesc>, scales: u32, base_pairs: usize) -> SideDesc {
    let n = runs.iter().map(|r| r.channels).sum();
    SideDesc {
        path: Path::Dot,
        parts: 1,
        d: d as u32,
        n,
        vec_len: n,
        inner: crate::desc::Inner::None,
        block: 0,
        base_pairs: base_pairs as u32,
        sparse_per_tile: 0,
        tile_ops: 0,
        tile_bytes: runs.iter().map(|r| 2 * r.channels * r.width).sum(),
        codes_at: 0,
        scales_at: 0,
        scales,
        inner_at: 0,
        sparse_at: 0,
        runs,
    }
}

/// Lays keys and values out in pages of 64 slots for groups of `heads` key-value heads: key tiles, value tiles,
/// key scales, value scales, then inner scales and sparse entries.
///
/// # Errors
/// [`Error::Plan`] if the descriptor breaks an invariant.
pub fn assemble(key: SideBuild, value: SideBuild, heads: u32) -> Result<HeadCodec> {
    lay_out(key, value, heads, PACKED_SLOTS)
}

/// The codec of uncompressed tokens: pages of 16 slots, rows of keys, then rows of values.
///
/// # Errors
/// [`Error::Plan`] if a dimension does not fit a page.
pub fn raw(shape: &LayerShape, window: Dtype) -> Result<HeadCodec> {
    lay_out(raw16::side(shape.key_dim, window), raw16::side(shape.value_dim, window), 1, RAW_SLOTS)
}

fn lay_out(mut key: SideBuild, mut value: SideBuild, heads: u32, slots: u32) -> Result<HeadCodec> {
    let mut at = 0;
    let mut place = |bytes: u32| {
        let here = at;
        at += bytes.next_multiple_of(32);
        here
    };
    for side in [&mut key.desc, &mut value.desc] {
        side.codes_at = place(slots / 16 * side.tile_bytes);
    }
    for side in [&mut key.desc, &mut value.desc] {
        side.scales_at = place(2 * slots * side.scales);
    }
    for side in [&mut key.desc, &mut value.desc] {
        side.inner_at = place(4 * inner_pairs(side, slots));
        side.sparse_at = place(4 * slots / 16 * side.sparse_per_tile);
    }
    let page_bytes = at.next_multiple_of(64);
    let group = key.group.max(value.group);
    let desc = PageDesc { slots, group, heads, page_bytes, key: key.desc, value: value.desc };
    desc.validate()?;
    Ok(HeadCodec { desc, key: key.codec, value: value.codec })
}

/// (scale, minimum) pairs of a side with scales on the summed axis.
fn inner_pairs(side: &SideDesc, slots: u32) -> u32 {
    match side.inner {
        crate::desc::Inner::None => 0,
        crate::desc::Inner::GroupChannel => slots.div_ceil(side.block.max(1)) * side.n,
        crate::desc::Inner::TokenBlock => slots * side.n.div_ceil(side.block.max(1)),
    }
}

#[cfg(test)]
mod tests;
