//! The catalogues: what a plan may name.

use crate::errors::raise;
use crate::plan::parse;
use kvrs::{CodecSpec, ModelShape, quant};
use pyo3::prelude::*;

/// Checks the parameters of a codec, given as JSON.
#[pyfunction]
pub(crate) fn check_codec(py: Python<'_>, spec: &str) -> PyResult<()> {
    let spec: CodecSpec = parse(py, "codec", spec)?;
    quant::check(&spec).map_err(|error| raise(py, &error))
}

/// Checks the shape of a model, given as JSON.
#[pyfunction]
pub(crate) fn check_shape(py: Python<'_>, shape: &str) -> PyResult<()> {
    let shape: ModelShape = parse(py, "shape", shape)?;
    shape.validate().map_err(|error| raise(py, &error))
}

/// The codecs of this version.
#[pyfunction]
pub(crate) fn codecs() -> Vec<&'static str> {
    quant::entries().iter().map(|entry| entry.name).collect()
}

/// The policies of this version.
#[pyfunction]
pub(crate) fn policies() -> Vec<&'static str> {
    Vec::new()
}
