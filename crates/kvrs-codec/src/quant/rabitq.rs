//! `RaBitQ` (Gao et al., 2024, arXiv:2405.12497; extended in arXiv:2409.09913): rotation, an evenly spaced grid, unbiased
//! inner products, and on request a bound on their error.
//!
//! Where we differ from the paper: the grid has the step of least squared error for gaussian channels instead of one
//! that is searched per vector (4 bits: mean cosine .9944 instead of .9950), the centre is the plan's key offset or value
//! mean, and values take the scale that keeps lengths, which errs less where nothing must be unbiased.

use super::parts::{self, Parts};
use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext, turboquant};
use crate::codebook::Book;
use crate::desc::Side;
use crate::encode::{BoundEncoder, Encode, ScaledEncoder};
use crate::scale::ScaleRule;
use kvrs_core::Result;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "rabitq",
    paper: "Gao et al., 2024, arXiv:2405.12497 and arXiv:2409.09913",
    parameters: &[
        Parameter { name: "bits", allowed: "an integer in 1..=8", default: None },
        Parameter { name: "error_bound", allowed: "true (keys only), false", default: Some("false") },
    ],
    check: |settings| parse(settings).map(drop),
    build,
};

/// Standard deviations of the paper's bound: 94 % of inner products err less.
pub const DEVIATIONS: f32 = 1.9;

/// How far the inner product of a query of length `query_length` with a decoded key may be from that with the key.
///
/// `stored` is the key's per-token scale [`crate::encode::BOUND_SCALE`] of a codec with `error_bound`; the error stays
/// below the bound with the probability that a normal variable stays within `deviations` ([`DEVIATIONS`]: .943). A scale
/// factor of the scores multiplies the bound too.
#[must_use]
pub fn error_bound(stored: f32, query_length: f32, deviations: f32) -> f32 {
    stored * query_length * deviations
}

/// Bits, and whether a bound is stored.
fn parse(settings: &Settings<'_>) -> Result<(u32, bool)> {
    let bits = settings.number_in("bits", super::is_width)?;
    Ok((bits as u32, settings.flag("error_bound", false)?))
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    let (width, bounded) = parse(settings)?;
    if bounded && context.side == Side::Value {
        let allowed = "false for values: the bound is one on inner products with queries";
        return Err(settings.error("error_bound", true, allowed));
    }
    let rule = if context.side == Side::Key { ScaleRule::Unbiased } else { ScaleRule::Norm };
    let book = Book::even(width);
    let (runs, lut8) = parts::runs(&[(book, context.d.next_multiple_of(16))]);
    let scaled = ScaledEncoder { rule, books: vec![*book] };
    let encoder: Arc<dyn Encode> = if bounded { Arc::new(BoundEncoder(scaled)) } else { Arc::new(scaled) };
    let transform = turboquant::rotation(context, false, cache);
    Parts { runs, scales: 1 + u32::from(bounded), lut8, transform, encoder }.build(context, cache)
}
