//! Sequence files, as Python sees them.

use crate::enter::enter;
use crate::errors::{raise, wrong_type};
use crate::plan::json;
use kvrs::{Compress, Error};
use pyo3::prelude::*;
use std::path::PathBuf;

/// The compression that Python names.
pub(crate) fn compression(value: Option<&Bound<'_, PyAny>>) -> PyResult<Compress> {
    let Some(value) = value else { return Ok(Compress::None) };
    let Ok(name) = value.extract::<String>() else {
        return Err(wrong_type("compress", value, "None or \"deflate\""));
    };
    if name == Compress::Deflate.name() {
        return Ok(Compress::Deflate);
    }
    Err(raise(value.py(), &Error::argument("compress", format!("{name:?}"), "None or \"deflate\"")))
}

/// Returns what a sequence file says of itself, as JSON.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "extracted from Python by value")]
pub(crate) fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    enter(py, || kvrs::inspect(&path)).map(|file| json(&file))
}
