//! PALU (Chang et al., 2024, arXiv:2407.21118) in kind: a low-rank latent before the rotary embedding, evenly quantised.
//!
//! Where we differ: the ranks of layers come from their squared singular values under one budget instead of
//! Fisher information, and the back-projection of the values is applied once to the output instead of being fused into
//! the model's weights.

use super::transform_coding::{self, Place};
use super::{Entry, Parameter, Settings};
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "palu",
    paper: "Chang et al., 2024, arXiv:2407.21118",
    parameters: &[
        Parameter { name: "rank", allowed: "a share of the channels above 0, up to 1", default: None },
        Parameter { name: "bits", allowed: "an integer in 1..=8", default: None },
    ],
    check,
    build: |settings, context, cache| {
        check(settings)?;
        transform_coding::build(settings, context, cache, Place::PreRope)
    },
};

fn check(settings: &Settings<'_>) -> Result<()> {
    settings.number_in("rank", |rank| rank > 0.0 && rank <= 1.0)?;
    settings.number_in("bits", |bits| (1.0..=8.0).contains(&bits) && bits.fract() == 0.0).map(drop)
}
