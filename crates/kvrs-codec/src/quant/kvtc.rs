//! KVTC (2025, arXiv:2511.01815) in kind: principal components before the rotary embedding, bits by dynamic programming.
//!
//! Where we differ: the paper entropy-codes what it stores or sends; here the codes are packed at their widths, in runs
//! of 16 components, and attention reads them as they lie.

use super::transform_coding::{self, Place};
use super::{Entry, Parameter, Settings};
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "kvtc",
    paper: "arXiv:2511.01815",
    parameters: &[Parameter { name: "bits", allowed: "a number above 0, up to 8", default: None }],
    check,
    build: |settings, context, cache| {
        check(settings)?;
        transform_coding::build(settings, context, cache, Place::PreRope)
    },
};

fn check(settings: &Settings<'_>) -> Result<()> {
    settings.number_in("bits", |bits| bits > 0.0 && bits <= 8.0).map(drop)
}
