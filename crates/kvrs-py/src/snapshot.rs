//! A snapshot, as Python sees it.

use crate::any_store::Frozen;
use pyo3::prelude::*;

/// A prefix that never changes.
#[pyclass(frozen, module = "kvrs._kvrs")]
pub(crate) struct Snapshot(pub(crate) Frozen);

#[pymethods]
impl Snapshot {
    #[getter]
    fn length(&self) -> usize {
        self.0.length
    }

    fn __repr__(&self) -> String {
        format!("Snapshot(length={})", self.0.length)
    }
}
