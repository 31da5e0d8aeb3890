//! What calibration measured of a model, inside a plan.

use crate::plan::PlanSpec;
use kvrs_codec::calibrated::{Array, Arrays};
use kvrs_core::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Data that codecs of a plan are built from, and where it comes from.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Identity of the model's weights; a plan refuses another model.
    pub fingerprint: String,
    /// What was measured and decided, for people; not part of the plan's hash.
    #[serde(default)]
    pub report: serde_json::Value,
    /// Arrays by name, `SIDE.LAYER.GROUP.ARRAY` ([`Arrays`]).
    #[serde(skip)]
    pub arrays: Arrays,
}

impl PlanSpec {
    /// The arrays that codecs are built from.
    pub(crate) fn arrays(&self) -> Option<&Arrays> {
        self.calibration.as_ref().map(|calibration| &calibration.arrays)
    }

    /// Calibrated arrays by name.
    pub(crate) fn named_arrays(&self) -> impl Iterator<Item = (&String, &Array)> {
        self.arrays().into_iter().flatten()
    }
}

/// Checks that codecs were built from every array.
pub(crate) fn check_taken(spec: &PlanSpec, taken: &BTreeSet<String>) -> Result<()> {
    match spec.named_arrays().find(|(name, _)| !taken.contains(*name)) {
        Some((name, _)) => Err(Error::plan(
            "calibration",
            format!("an array {name}"),
            "arrays that a codec of the plan reads",
        )),
        None => Ok(()),
    }
}
