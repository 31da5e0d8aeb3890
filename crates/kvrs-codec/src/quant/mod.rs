//! The quantisers: each file in this folder is one method, registered by its [`Entry`].
//!
//! A quantiser is data: a descriptor, constants and an encoder. No kernel knows its name.

mod aatc;
mod constants;
mod fp8;
mod int8;
mod kivi;
mod kvquant;
mod kvtc;
mod palu;
mod parts;
mod qjl;
mod rabitq;
mod raw16;
mod sketch;
mod spec;
mod transform_coding;
mod turboquant;

pub use constants::ConstantCache;
pub use rabitq::{DEVIATIONS, error_bound};
pub use spec::{CodecSpec, check};

use crate::calibrated::Arrays;
use crate::codec::{CodecId, HeadCodec, SideCodec};
use crate::desc::{Inner, PageDesc, Path, RunDesc, Side, SideDesc};
use crate::view::Dtype;
use kvrs_core::{Error, LayerShape, Result, Rope};
use spec::Settings;
use std::sync::Arc;

/// Slots of a packed page.
const PACKED_SLOTS: u32 = 64;
/// Slots of a raw page.
const RAW_SLOTS: u32 = 16;

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

static ENTRIES: [Entry; 11] = [
    raw16::ENTRY,
    turboquant::ENTRY,
    rabitq::ENTRY,
    qjl::ENTRY,
    kivi::ENTRY,
    int8::ENTRY,
    fp8::ENTRY,
    aatc::ENTRY,
    kvquant::ENTRY,
    kvtc::ENTRY,
    palu::ENTRY,
];

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
    /// Keys: the constant before the rotary embedding `[d]`; values: the mean `[d]`.
    pub constant: Option<Arc<[f32]>>,
    /// The group of key-value heads.
    pub group: usize,
    /// What calibration measured.
    pub arrays: Option<&'a Arrays>,
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

impl SideContext<'_> {
    /// Name of a calibrated array of this side.
    fn array_name(&self, name: &str) -> String {
        format!("{}.{}.{}.{name}", side_name(self.side), self.layer, self.group)
    }

    /// Why a calibrated array cannot be used.
    fn array_error(&self, name: &str, got: impl std::fmt::Debug, allowed: impl ToString) -> Error {
        Error::plan(format!("calibration.{}", self.array_name(name)), format!("{got:?}"), allowed)
    }
}

/// Whether `bits` is a width that codes can have.
fn is_width(bits: f64) -> bool {
    (1.0..=8.0).contains(&bits) && bits.fract() == 0.0
}

fn side_name(side: Side) -> &'static str {
    match side {
        Side::Key => "keys",
        Side::Value => "values",
    }
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
        inner: Inner::None,
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
/// [`kvrs_core::Error::Plan`] if the descriptor breaks an invariant.
pub fn assemble(key: SideBuild, value: SideBuild, heads: u32) -> Result<HeadCodec> {
    lay_out(key, value, heads, PACKED_SLOTS)
}

/// The codec of uncompressed tokens: pages of 16 slots, rows of keys, then rows of values.
///
/// # Errors
/// [`kvrs_core::Error::Plan`] if a dimension does not fit a page.
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
    Ok(HeadCodec { id: CodecId::fresh(), desc, key: key.codec, value: value.codec })
}

/// (scale, minimum) pairs of a side with scales on the summed axis.
fn inner_pairs(side: &SideDesc, slots: u32) -> u32 {
    match side.inner {
        Inner::None => 0,
        Inner::GroupChannel => slots.div_ceil(side.block.max(1)) * side.n,
        Inner::TokenBlock => slots * side.n.div_ceil(side.block.max(1)),
    }
}

#[cfg(test)]
mod tests;
