//! What the transform coders share: calibrated matrices, runs of 16 channels with their own widths, one scale a token.
//!
//! A vector without its constant goes through an analysis matrix into channels of unit variance, widest first;
//! each run of equal width has a Lloyd-Max book, and the root mean square of all stored channels is the token's scale.
//! Behind the rotary embedding the synthesis folds into the query (Dot path); before it, tiles of 16 tokens
//! are rebuilt and turned (Tile path).

use super::{ConstantCache, Settings, SideBuild, SideContext, dot_side};
use crate::codebook::Book;
use crate::codec::SideCodec;
use crate::desc::{Arith, Elem, MAX_CHANNELS, NONE, Path, RunDesc, Side, TILE, tile_ops};
use crate::encode::ScaledEncoder;
use crate::scale::ScaleRule;
use crate::transform::Transform;
use kvrs_core::Result;
use std::sync::Arc;

/// Where keys are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// As they are cached.
    PostRope,
    /// With the rotary embedding undone.
    PreRope,
}

pub(super) fn build(
    settings: &Settings<'_>,
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
    place: Place,
) -> Result<SideBuild> {
    let transform = transform(settings, context, cache)?;
    let widths = widths(settings, context, cache, transform.n())?;
    let (runs, lut8) = runs(&widths);
    let turned = place == Place::PreRope && context.side == Side::Key;
    let (centre, rope) = if turned { cache.turned_centre(context)? } else { (cache.centre(context)?, None) };
    let mut desc = dot_side(context.d, runs, 1, centre.base_pairs());
    if turned {
        (desc.path, desc.vec_len) = (Path::Tile, desc.d);
        desc.tile_ops = tile_ops::MATRIX | if rope.is_some() { tile_ops::ROPE } else { 0 };
    }
    let books = desc.runs.iter().map(|run| *Book::gaussian(run.width)).collect();
    let encoder = Arc::new(ScaledEncoder { rule: ScaleRule::Rms, books });
    let codec = SideCodec {
        transform,
        lut8: cache.levels(lut8),
        lut32: [].into(),
        offset: centre.offset,
        mean: centre.mean,
        rope,
        encoder: Some(encoder),
    };
    Ok(SideBuild { desc, codec, group: 16 })
}

fn transform(
    settings: &Settings<'_>,
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
) -> Result<Transform> {
    let d = context.d;
    let analysis = cache.array(settings, context, "analysis")?;
    let n = analysis.shape[0];
    let fits = analysis.shape.len() == 2 && analysis.shape[1] == d && n.is_multiple_of(16);
    if !fits || n == 0 || n > MAX_CHANNELS {
        let allowed = format!("[n, {d}] with n a multiple of 16, up to {MAX_CHANNELS}");
        return Err(context.array_error("analysis", &analysis.shape, allowed));
    }
    let synthesis = cache.array(settings, context, "synthesis")?;
    if synthesis.shape != analysis.shape {
        let allowed = format!("{:?}, as the analysis", analysis.shape);
        return Err(context.array_error("synthesis", &synthesis.shape, allowed));
    }
    Ok(Transform::Pair { analysis: analysis.values, synthesis: synthesis.values, d, n })
}

/// Bits of each block of 16 stored channels, not rising.
fn widths(
    settings: &Settings<'_>,
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
    n: usize,
) -> Result<Vec<u32>> {
    let array = cache.array(settings, context, "widths")?;
    if array.shape != [n / TILE] {
        return Err(context.array_error("widths", &array.shape, format!("[{}]", n / TILE)));
    }
    let whole = |x: &f32| (1.0..=8.0).contains(x) && x.fract() == 0.0;
    let values = &*array.values;
    if !values.iter().all(whole) || values.iter().zip(values.iter().skip(1)).any(|(a, b)| a < b) {
        return Err(context.array_error("widths", values, "whole numbers in 1..=8, not rising"));
    }
    Ok(values.iter().map(|x| *x as u32).collect())
}

/// Neighbouring blocks of one width form a run.
fn runs(widths: &[u32]) -> (Vec<RunDesc>, Vec<i8>) {
    let (mut lut8, mut vec_at, mut at) = (Vec::new(), 0, 0);
    let runs = widths.chunk_by(|a, b| a == b).map(|blocks| {
        let (width, channels) = (blocks[0], 16 * blocks.len() as u32);
        let run = gaussian_run(width, channels, (vec_at, at), &mut lut8);
        vec_at += channels;
        at += 2 * channels * width;
        run
    });
    (runs.collect(), lut8)
}

/// A run with the gaussian book of its width and the token's scale; its levels go to the end of `lut8`.
pub(super) fn gaussian_run(
    width: u32,
    channels: u32,
    (vec_at, at): (u32, u32),
    lut8: &mut Vec<i8>,
) -> RunDesc {
    let book = Book::gaussian(width);
    let table = !book.levels.is_empty();
    let lut_at = if table { lut8.len() as u32 } else { NONE };
    lut8.extend_from_slice(book.levels);
    RunDesc {
        width,
        elem: if table { Elem::Lut8 } else { Elem::Int },
        arith: if width <= 5 { Arith::I8 } else { Arith::I8x2 },
        scale: 0,
        channels,
        vec_at,
        at,
        lut_at,
        step: book.step,
        zero: book.zero(),
    }
}
