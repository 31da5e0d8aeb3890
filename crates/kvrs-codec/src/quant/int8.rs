//! Signed bytes scaled by the largest magnitude of the token.

use super::parts::{Parts, integers};
use super::{ConstantCache, Entry, Settings, SideBuild, SideContext};
use crate::desc::{Arith, Elem, RunDesc};
use crate::encode::{LargestEncoder, Target};
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "int8",
    paper: "absolute-maximum quantisation, one scale per token",
    parameters: &[],
    check: |_| Ok(()),
    build: |_: &Settings<'_>, context, cache| build(context, cache, Target::Int8),
};

/// One run of 8-bit channels under one scale per token, not rotated.
pub(super) fn build(
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
    target: Target,
) -> Result<SideBuild> {
    let (elem, arith, zero) = match target {
        Target::Int8 => (Elem::Int, Arith::I8x2, -128.0),
        Target::E4m3 => (Elem::E4m3, Arith::F32, 0.0),
        Target::E5m2 => (Elem::E5m2, Arith::F32, 0.0),
    };
    let run = RunDesc { elem, arith, zero, scale: 0, ..integers(8) };
    Parts::plain(context.d, run, LargestEncoder { target }).build(context, cache)
}
