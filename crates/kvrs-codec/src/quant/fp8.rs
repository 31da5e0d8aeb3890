//! 8-bit floats (Micikevicius et al., 2022, arXiv:2209.05433) scaled by the largest magnitude of the token.
//!
//! Both formats bring the largest magnitude to 448. That of `e5m2` could be 57344, but its scale would then leave
//! f16's normal range below magnitudes of 3.5, and its codes reach far enough down as it is.

use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext, int8};
use crate::encode::Target;
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "fp8",
    paper: "Micikevicius et al., 2022, arXiv:2209.05433",
    parameters: &[Parameter { name: "format", allowed: "e4m3, e5m2", default: Some("\"e4m3\"") }],
    check: |settings| format(settings).map(drop),
    build,
};

fn format(settings: &Settings<'_>) -> Result<Target> {
    settings.choice("format", &[("e4m3", Target::E4m3), ("e5m2", Target::E5m2)])
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    int8::build(context, cache, format(settings)?)
}
