//! AATC, attention-aware transform coding (Laus et al., 2026, arXiv:2608.14191).
//!
//! Where we differ from the paper: codes are packed, in runs of 16 channels of one width; channels of a run are divided
//! by their deviation and rotated among themselves, so that Lloyd-Max books fit them; the default codes keys
//! behind the rotary embedding, one head at a time, where the inverse folds into the query. Matrices and
//! widths come out of calibration.

use super::transform_coding::{self, Place};
use super::{Entry, Parameter, Settings};
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "aatc",
    paper: "Laus et al., 2026, arXiv:2608.14191",
    parameters: &[
        Parameter {
            name: "bits",
            allowed: "a number above 0, up to 8, or None with bytes",
            default: Some("null"),
        },
        Parameter { name: "bytes", allowed: "a size like 64MiB, or None with bits", default: Some("null") },
        Parameter { name: "variant", allowed: "post_rope, pre_rope", default: Some("\"post_rope\"") },
        Parameter { name: "weights", allowed: "attention, variance", default: Some("\"attention\"") },
        Parameter { name: "run_rotation", allowed: "true, false", default: Some("true") },
    ],
    check: |settings| check(settings).map(drop),
    build: |settings, context, cache| transform_coding::build(settings, context, cache, check(settings)?),
};

fn check(settings: &Settings<'_>) -> Result<Place> {
    match (settings.get("bits"), settings.get("bytes")) {
        (Some(_), None) => {
            settings.number_in("bits", |bits| bits > 0.0 && bits <= 8.0)?;
        }
        (None, Some(_)) => drop(settings.size("bytes")?),
        (bits, _) => {
            let got = if bits.is_some() { "given beside bytes" } else { "missing" };
            return Err(settings.error("bits", got, "bits or bytes, one of the two"));
        }
    }
    settings.choice("weights", &[("attention", ()), ("variance", ())])?;
    settings.flag("run_rotation", true)?;
    settings.choice("variant", &[("post_rope", Place::PostRope), ("pre_rope", Place::PreRope)])
}
