//! The threads that backends without their own share.

use kvrs_core::{Error, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Arc, PoisonError, RwLock};

const MOST: usize = 1024;

static GLOBAL: RwLock<Option<Arc<ThreadPool>>> = RwLock::new(None);

pub(crate) fn build(threads: usize) -> Result<Arc<ThreadPool>> {
    if threads == 0 || threads > MOST {
        return Err(Error::argument("threads", threads, format!("1..={MOST}")));
    }
    let builder = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("kvrs-{i}"));
    builder.build().map(Arc::new).map_err(|e| Error::Internal(format!("{threads} threads: {e}")))
}

fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MOST)
}

/// The shared threads, started at first use; `None` if the system refuses to start any.
pub(crate) fn global() -> Option<Arc<ThreadPool>> {
    if let Some(pool) = GLOBAL.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
        return Some(Arc::clone(pool));
    }
    let mut global = GLOBAL.write().unwrap_or_else(PoisonError::into_inner);
    if global.is_none() {
        *global = build(available()).or_else(|_| build(1)).ok();
    }
    global.clone()
}

/// Sets the number of threads that backends without their own use.
///
/// # Errors
/// [`Error::Argument`] for 0 or more than 1024 threads, [`Error::Internal`] if they cannot be started.
pub fn set_num_threads(threads: usize) -> Result<()> {
    let pool = build(threads)?;
    *GLOBAL.write().unwrap_or_else(PoisonError::into_inner) = Some(pool);
    Ok(())
}

/// The number of threads that backends without their own use; by default the cores this process may use.
#[must_use]
pub fn get_num_threads() -> usize {
    let global = GLOBAL.read().unwrap_or_else(PoisonError::into_inner);
    global.as_ref().map_or_else(available, |pool| pool.current_num_threads())
}
