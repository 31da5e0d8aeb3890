//! A plan's layers with their page layouts, constants and window rules.

use crate::calibration;
use crate::evict::LayerEvict;
use crate::joint;
use crate::plan::PlanSpec;
use crate::top_k::AttendSpec;
use kvrs_codec::calibrated::Arrays;
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::quant::{self, ConstantCache, SideContext};
use kvrs_codec::{Dtype, HeadCodec, Inner, PageDesc, Path, Side, SideDesc};
use kvrs_core::window::WindowRule;
use kvrs_core::{LayerShape, Result};
use serde::Serialize;
use std::sync::Arc;

/// Class of raw 16-bit pages.
pub(crate) const RAW: u8 = 0;
/// Class of the plan's codec.
pub(crate) const PACKED: u8 = 1;
/// Class of the low rate of joint allocation.
pub(crate) const LOW: u8 = 2;
/// What the names of a calibration's arrays for the low rate begin with.
const LOW_ARRAYS: &str = "low.";
/// The codec that keeps 16-bit rows.
pub(crate) const RAW_CODEC: &str = "raw16";

/// One layer, ready to run.
#[derive(Debug)]
pub(crate) struct LayerPlan {
    pub(crate) codec: LayerCodec,
    pub(crate) rule: WindowRule,
    /// Why the layer stays raw although a codec was asked for.
    pub(crate) note: Option<String>,
    pub(crate) evict: Option<LayerEvict>,
    /// Scores that a query keeps; `None`: all.
    pub(crate) top_k: Option<usize>,
}

/// All layers, for one 16-bit window type.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) layers: Vec<LayerPlan>,
    pub(crate) constant_bytes: u64,
}

/// What a plan does with the tokens of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Codec of the keys.
    pub keys: String,
    /// Codec of the values.
    pub values: String,
    /// `dot`, `tile` or `raw`.
    pub path: &'static str,
    /// Bits of codes per key channel.
    pub key_bits: f64,
    /// Bits of codes per value channel.
    pub value_bits: f64,
    /// Tokens that are encoded together.
    pub group: usize,
    /// Sliding window.
    pub sliding: Option<usize>,
    /// Whether every token stays 16-bit.
    pub raw: bool,
    /// Why, where a codec was asked for.
    pub note: Option<String>,
    /// The policy that evicts.
    pub evict: Option<&'static str>,
    /// When it acts; what comes after the last time stays.
    pub evicts: Option<&'static str>,
}

impl Compiled {
    pub(crate) fn new(spec: &PlanSpec, window: Dtype) -> Result<Self> {
        let (mut cache, mut low) = (ConstantCache::default(), ConstantCache::default());
        let mut codecs = (0..spec.shape.layers.len())
            .map(|i| layer_codec(spec, i, window, &mut cache))
            .collect::<Result<Vec<_>>>()?;
        add_low(spec, window, &mut codecs, &mut low)?;
        let names = low.taken().iter().map(|name| format!("{LOW_ARRAYS}{name}"));
        calibration::check_taken(spec, &cache.taken().iter().cloned().chain(names).collect())?;
        let group = codecs.iter().flat_map(|c| &c.classes[0]).map(|c| c.desc.group).max().unwrap_or(16);
        for class in codecs.iter_mut().flat_map(|c| &mut c.classes).flat_map(|c| c.iter_mut().skip(1)) {
            class.desc.group = group;
            class.desc.validate()?;
        }
        let layers = codecs.into_iter().enumerate().map(|(i, mut codec)| {
            let evict = LayerEvict::of(spec, i);
            if evict.as_ref().is_some_and(LayerEvict::ragged) || codec.classes[0].len() > usize::from(LOW) {
                equal_pages(&mut codec);
            }
            LayerPlan::new(spec, codec, group as usize, evict)
        });
        Ok(Self { layers: layers.collect(), constant_bytes: cache.bytes() + low.bytes() })
    }
}

impl LayerPlan {
    fn new(spec: &PlanSpec, codec: LayerCodec, group: usize, evict: Option<LayerEvict>) -> Self {
        let sliding = codec.shape.sliding;
        let packed = codec.classes[0].len() > 1;
        let seals = packed || evict.as_ref().is_some_and(LayerEvict::acts_later);
        let rule = WindowRule { sinks: spec.sinks, recent: spec.recent, group, sliding, seals };
        let note = (seals && rule.stays_raw()).then(|| {
            let least = spec.recent + group;
            format!("stays 16-bit: its sliding window is not above recent + group = {least} tokens")
        });
        let top_k = spec.attend.as_ref().map(AttendSpec::top_k);
        Self { codec, rule, note, evict, top_k }
    }

    /// Whether every token of the layer stays 16-bit.
    pub(crate) fn raw(&self) -> bool {
        self.rule.stays_raw() || self.target() == RAW
    }

    /// Class of the pages that tokens go to when they leave the window.
    pub(crate) fn target(&self) -> u8 {
        if self.codec.classes[0].len() > 1 { PACKED } else { RAW }
    }

    /// Codec of a head group and class.
    pub(crate) fn class(&self, group: usize, class: u8) -> &HeadCodec {
        &self.codec.classes[group][usize::from(class)]
    }

    /// Bytes of a raw page; all head groups share them.
    pub(crate) fn raw_page_bytes(&self) -> u32 {
        self.class(0, RAW).desc.page_bytes
    }

    /// Bytes of the packed pages of a head group; 0 if nothing is packed.
    pub(crate) fn packed_page_bytes(&self, group: usize) -> u32 {
        self.codec.classes[group].get(usize::from(PACKED)).map_or(0, |c| c.desc.page_bytes)
    }

    /// Whether the end of a prompt chooses tokens and rates jointly.
    pub(crate) fn joint(&self) -> bool {
        self.codec.classes[0].len() > usize::from(LOW)
    }

    /// Bytes of a page of the low rate, which all head groups share; 0 if there is none.
    pub(crate) fn low_page_bytes(&self) -> u32 {
        self.codec.classes[0].get(usize::from(LOW)).map_or(0, |c| c.desc.page_bytes)
    }

    pub(crate) fn path(&self) -> &'static str {
        if self.raw() {
            return "raw";
        }
        let desc = &self.class(0, PACKED).desc;
        if desc.key.path == Path::Tile || desc.value.path == Path::Tile { "tile" } else { "dot" }
    }

    pub(crate) fn report(&self, spec: &PlanSpec, layer: usize) -> LayerReport {
        let bits = |side: Side| {
            let groups = self.codec.classes.len();
            let of = |group: usize| code_bits(self.class(group, PACKED).desc.side(side));
            if self.raw() { 16.0 } else { (0..groups).map(of).sum::<f64>() / groups as f64 }
        };
        LayerReport {
            keys: spec.keys[layer].to_string(),
            values: spec.values[layer].to_string(),
            path: self.path(),
            key_bits: bits(Side::Key),
            value_bits: bits(Side::Value),
            group: self.rule.group,
            sliding: self.rule.sliding,
            raw: self.raw(),
            note: self.note.clone(),
            evict: self.evict.as_ref().map(LayerEvict::name),
            evicts: self.evict.as_ref().map(LayerEvict::moment),
        }
    }
}

/// Makes the pages of all head groups as large as the largest: a ragged budget says only how many pages a layer takes.
fn equal_pages(codec: &mut LayerCodec) {
    for class in usize::from(PACKED)..codec.classes[0].len() {
        let largest = codec.classes.iter().map(|classes| classes[class].desc.page_bytes).max().unwrap_or(0);
        codec.classes.iter_mut().for_each(|classes| classes[class].desc.page_bytes = largest);
    }
}

/// Adds the low rate of joint allocation to the layers that have one.
fn add_low(
    spec: &PlanSpec,
    window: Dtype,
    codecs: &mut [LayerCodec],
    cache: &mut ConstantCache,
) -> Result<()> {
    let arrays = spec
        .named_arrays()
        .filter_map(|(name, array)| Some((name.strip_prefix(LOW_ARRAYS)?.to_owned(), array.clone())));
    let arrays = arrays.collect();
    for (layer, codec) in codecs.iter_mut().enumerate() {
        let Some(joint) = joint::of_layer(spec, layer) else { continue };
        for (head, classes) in codec.classes.iter_mut().enumerate() {
            let codecs = [&joint.keys[layer], &joint.values[layer]];
            classes.push(head_codec(spec, (layer, head), codecs, window, Some(&arrays), cache)?);
        }
    }
    Ok(())
}

/// Bytes of codes of 16 tokens.
pub(crate) fn tile_code_bytes(desc: &PageDesc) -> u64 {
    u64::from(desc.key.tile_bytes) + u64::from(desc.value.tile_bytes)
}

/// Bytes of scales of packed tokens: per token, on the summed axis, and of sparse differences.
pub(crate) fn scale_bytes(desc: &PageDesc, tokens: u64) -> u64 {
    let of_tile = |side: &SideDesc| {
        let inner = match side.inner {
            Inner::None => 0,
            Inner::GroupChannel => 64 * side.n / side.block,
            Inner::TokenBlock => 64 * side.n.div_ceil(side.block),
        };
        u64::from(32 * side.scales + inner + 4 * side.sparse_per_tile)
    };
    tokens * (of_tile(&desc.key) + of_tile(&desc.value)) / 16
}

/// Bytes of one token as 16-bit rows.
pub(crate) fn token_raw_bytes(shape: &LayerShape) -> u64 {
    2 * (shape.key_dim + shape.value_dim) as u64
}

fn code_bits(side: &SideDesc) -> f64 {
    let bits: u32 = side.runs.iter().map(|r| r.width * r.channels).sum();
    f64::from(bits) / f64::from(side.d * side.parts)
}

fn layer_codec(
    spec: &PlanSpec,
    layer: usize,
    window: Dtype,
    cache: &mut ConstantCache,
) -> Result<LayerCodec> {
    let shape = spec.shape.layers[layer].clone();
    let raw = quant::raw(&shape, window)?;
    let codecs = [&spec.keys[layer], &spec.values[layer]];
    let classes = (0..shape.kv_heads)
        .map(|head| {
            let mut classes = vec![raw.clone()];
            // Both sides are built even if nothing seals, so that every setting is checked.
            let packed = head_codec(spec, (layer, head), codecs, window, spec.arrays(), cache)?;
            if spec.seals(layer) {
                classes.push(packed);
            }
            Ok(classes)
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(LayerCodec { shape, heads_per_group: 1, classes })
}

fn head_codec(
    spec: &PlanSpec,
    (layer, head): (usize, usize),
    [keys, values]: [&quant::CodecSpec; 2],
    window: Dtype,
    arrays: Option<&Arrays>,
    cache: &mut ConstantCache,
) -> Result<HeadCodec> {
    let shape = &spec.shape.layers[layer];
    let constant = |offset: &Option<Vec<Option<Vec<f32>>>>, d: usize| -> Option<Arc<[f32]>> {
        let all = offset.as_ref()?[layer].as_ref()?;
        Some(all[head * d..(head + 1) * d].into())
    };
    let mut side = |side: Side, codec: &quant::CodecSpec, d: usize, constant: Option<Arc<[f32]>>| {
        let (seed, rope) = (spec.seed, shape.rope.as_ref());
        let context = SideContext { side, d, layer, seed, window, rope, constant, group: head, arrays };
        codec.build(&context, cache)
    };
    let (dk, dv) = (shape.key_dim, shape.value_dim);
    let key = side(Side::Key, keys, dk, constant(&spec.key_offset, dk))?;
    let value = side(Side::Value, values, dv, constant(&spec.value_offset, dv))?;
    quant::assemble(key, value, 1)
}
