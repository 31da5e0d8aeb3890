//! QJL (Zandieh et al., 2024, arXiv:2406.03482): signs of a gaussian sketch of the keys, and their lengths.
//!
//! The score `sqrt(pi/2) / m * |k| <S q, sign(S k)>` is unbiased over the draw of the sketch. Where we differ from the
//! paper: no channels are kept apart as outliers (the plan's key offset takes a constant out), the first layers
//! have no wider sketch unless the plan says so, and one sketch serves all layers and heads.

use super::parts::Parts;
use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext, sketch};
use crate::desc::Side;
use crate::encode::SketchEncoder;
use kvrs_core::{Error, Result};
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "qjl",
    paper: "Zandieh et al., 2024, arXiv:2406.03482",
    parameters: &[Parameter { name: "m", allowed: "a multiple of 16 in 16..=1024", default: Some("256") }],
    check: |settings| rows(settings).map(drop),
    build,
};

fn rows(settings: &Settings<'_>) -> Result<usize> {
    if settings.get("m").is_none() {
        return Ok(256);
    }
    let fits = |m: f64| (16.0..=1024.0).contains(&m) && m % 16.0 == 0.0;
    settings.number_in("m", fits).map(|m| m as usize)
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    let m = rows(settings)?;
    if context.side == Side::Value {
        let allowed =
            "a codec for values, as kivi with 2 bits in the paper; or turboquant, rabitq, int8, fp8, raw16";
        return Err(Error::plan(
            format!("values[{}].name", context.layer),
            "qjl, which serves keys only",
            allowed,
        ));
    }
    let sketch = sketch::gaussian(m, context, cache);
    let runs = vec![sketch::run(m, 0, sketch::Kind::Gaussian.step(m, context.d))];
    let encoder = Arc::new(SketchEncoder { first: None, sketch: sketch.clone(), live: m });
    let lut8 = sketch::LEVELS.to_vec();
    Parts { runs, scales: 1, lut8, transform: sketch, encoder }.build(context, cache)
}
