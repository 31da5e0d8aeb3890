//! The one way into the store: release the GIL, run, map the error, pass warnings on.

use crate::{errors, score};
use pyo3::prelude::*;
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};

/// Runs `work` without the GIL.
///
/// Locks of the store are taken inside `work` only: a thread that holds one never waits for the GIL.
pub(crate) fn enter<T: Send>(py: Python<'_>, work: impl FnOnce() -> kvrs::Result<T> + Send) -> PyResult<T> {
    py.detach(work).map_err(|error| score::raised().unwrap_or_else(|| errors::raise(py, &error)))
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

/// How often this process and those it was forked from have forked since the first call: a number that differs
/// between a process and its fork, without a system call.
pub(crate) fn forks() -> u32 {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    #[cfg(unix)]
    {
        static WATCH: std::sync::Once = std::sync::Once::new();
        extern "C" fn count() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: `count` stays loaded as the module does, and only adds to an atomic number.
        WATCH.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(count));
        });
    }
    FORKS.load(Ordering::Relaxed)
}
