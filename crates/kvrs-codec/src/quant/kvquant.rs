//! `KVQuant` (Hooper et al., 2024, arXiv:2401.18079): codebooks out of data, keys before the rotary embedding, a few
//! outliers kept apart.
//!
//! Keys are shifted and scaled by channel, values by the range of each token; the largest entries of each tile of 16
//! tokens are stored as 16-bit differences to what their codes stand for. The first tokens stay 16-bit as the plan's
//! sinks. Where we differ: outliers are counted per tile, not by thresholds of each channel.

use super::parts::Parts;
use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext};
use crate::calibrated::Array;
use crate::desc::{Arith, Elem, Inner, NONE, RunDesc, Side, TILE, tile_ops};
use crate::nonuniform::NonuniformEncoder;
use crate::transform::Transform;
use kvrs_core::Result;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "kvquant",
    paper: "Hooper et al., 2024, arXiv:2401.18079",
    parameters: &[
        Parameter { name: "bits", allowed: "an integer in 1..=8", default: None },
        Parameter { name: "outliers", allowed: "a share of the entries in [0, 0.1]", default: Some("0.01") },
    ],
    check: |settings| check(settings).map(drop),
    build,
};

/// Bits and share of outliers.
fn check(settings: &Settings<'_>) -> Result<(u32, f64)> {
    let bits = settings.number_in("bits", |bits| (1.0..=8.0).contains(&bits) && bits.fract() == 0.0)?;
    let outliers = match settings.get("outliers") {
        Some(_) => settings.number_in("outliers", |share| (0.0..=0.1).contains(&share))?,
        None => 0.01,
    };
    Ok((bits as u32, outliers))
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    let (bits, outliers) = check(settings)?;
    let levels = codebook(settings, context, cache, bits)?;
    let d = context.d;
    let run = RunDesc {
        width: bits,
        elem: Elem::Lut32,
        arith: Arith::F32,
        scale: NONE,
        channels: d.next_multiple_of(16) as u32,
        vec_at: 0,
        at: 0,
        lut_at: 0,
        step: 1.0,
        zero: 0.0,
    };
    let encoder = Arc::new(NonuniformEncoder::new(&levels.values));
    let keys = context.side == Side::Key;
    let transform =
        if keys { by_channel(&scale(settings, context, cache)?) } else { Transform::Identity { d } };
    let parts = Parts { runs: vec![run], scales: 0, lut8: Vec::new(), transform, encoder };
    let mut side = if keys { parts.build_unturned(context, cache)? } else { parts.build(context, cache)? };
    let desc = &mut side.desc;
    desc.sparse_per_tile = (outliers * (TILE * d) as f64).round() as u32;
    if !keys {
        (desc.inner, desc.block) = (Inner::TokenBlock, desc.n);
    } else if desc.sparse_per_tile > 0 {
        desc.tile_ops |= tile_ops::SPARSE;
    }
    side.codec.lut32 = levels.values;
    Ok(side)
}

fn codebook(
    settings: &Settings<'_>,
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
    bits: u32,
) -> Result<Array> {
    let levels = cache.array(settings, context, "codebook")?;
    if levels.shape != [1 << bits] {
        return Err(context.array_error("codebook", &levels.shape, format!("[{}]", 1 << bits)));
    }
    if !levels.values.is_sorted() {
        return Err(context.array_error("codebook", &levels.values, "ascending levels"));
    }
    Ok(levels)
}

fn scale(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<Array> {
    let scale = cache.array(settings, context, "scale")?;
    if scale.shape != [context.d] {
        return Err(context.array_error("scale", &scale.shape, format!("[{}]", context.d)));
    }
    match scale.values.iter().find(|x| !(**x > 0.0 && x.recip().is_finite())) {
        Some(bad) => Err(context.array_error("scale", bad, "positive numbers")),
        None => Ok(scale),
    }
}

/// Divides each channel by its scale, and multiplies it back.
fn by_channel(scale: &Array) -> Transform {
    let d = scale.values.len();
    let n = d.next_multiple_of(16);
    let diagonal = |factor: fn(f32) -> f32| {
        let mut matrix = vec![0.0; n * d];
        scale.values.iter().enumerate().for_each(|(c, x)| matrix[c * d + c] = factor(*x));
        Arc::from(matrix)
    };
    Transform::Pair { analysis: diagonal(f32::recip), synthesis: diagonal(|x| x), d, n }
}
