//! The one way into the store: release the GIL, run, map the error, pass warnings on.

use crate::errors;
use pyo3::prelude::*;
use std::ffi::CString;

/// Runs `work` without the GIL.
///
/// Locks of the store are taken inside `work` only: a thread that holds one never waits for the GIL.
pub(crate) fn enter<T: Send>(py: Python<'_>, work: impl FnOnce() -> kvrs::Result<T> + Send) -> PyResult<T> {
    py.detach(work).map_err(|error| errors::raise(py, &error))
}

/// Emits the store's messages as `kvrs.KVWarning`.
pub(crate) fn warn(py: Python<'_>, messages: Vec<String>) -> PyResult<()> {
    if messages.is_empty() {
        return Ok(());
    }
    let category = py.import("kvrs.errors")?.getattr("KVWarning")?;
    for message in messages {
        PyErr::warn(py, &category, &CString::new(message.replace('\0', " "))?, 1)?;
    }
    Ok(())
}
