//! What the transform coders share: calibrated matrices, runs of 16 channels with their own widths, one scale a token.
//!
//! A vector without its constant goes through an analysis matrix into channels of unit variance, widest first;
//! each run of equal width has a Lloyd-Max book, and the root mean square of all stored channels is the token's scale.
//! Behind the rotary embedding the synthesis folds into the query (Dot path); before it, tiles of 16 tokens
//! are rebuilt and turned (Tile path).

use super::parts::{self, Parts};
use super::{ConstantCache, Settings, SideBuild, SideContext};
use crate::codebook::Book;
use crate::desc::{MAX_CHANNELS, Side, TILE};
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
    let books: Vec<_> =
        widths.chunk_by(|a, b| a == b).map(|run| (Book::gaussian(run[0]), 16 * run.len())).collect();
    let (runs, lut8) = parts::runs(&books);
    let books = books.into_iter().map(|(book, _)| *book).collect();
    let encoder = Arc::new(ScaledEncoder { rule: ScaleRule::Rms, books });
    let parts = Parts { runs, scales: 1, lut8, transform, encoder };
    if place == Place::PreRope && context.side == Side::Key {
        parts.build_unturned(context, cache)
    } else {
        parts.build(context, cache)
    }
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
