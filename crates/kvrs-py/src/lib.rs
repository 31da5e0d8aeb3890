//! Python bindings: the store and plans of `kvrs`, with any DLPack object in and out.

mod alloc;
mod any_store;
mod args;
mod array;
mod call;
mod device;
mod dlpack;
mod enter;
mod errors;
mod file;
mod plan;
mod registry;
mod score;
mod snapshot;
mod store;
mod torch;

use pyo3::prelude::*;

/// Sets how many threads stores use.
#[pyfunction]
fn set_num_threads(n: &Bound<'_, PyAny>) -> PyResult<()> {
    let count = args::count("n", n)?;
    enter::enter(n.py(), || kvrs::set_num_threads(count))
}

/// Returns how many threads stores use.
#[pyfunction]
fn get_num_threads() -> usize {
    kvrs::get_num_threads()
}

/// A number of bytes above 0, given as an int or as text with a unit; `what` names it in errors.
#[pyfunction]
fn size_of(what: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    args::size_of(what, value)
}

/// Returns the name of the instruction set that stores use.
#[pyfunction]
fn isa(py: Python<'_>) -> PyResult<&'static str> {
    kvrs::Isa::chosen().map(kvrs::Isa::name).map_err(|error| errors::raise(py, &error))
}

/// The compiled part of kvrs.
#[pymodule(gil_used = false)]
mod _kvrs {
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use super::{get_num_threads, isa, set_num_threads, size_of};
    #[pymodule_export]
    use crate::alloc::{
        allocate_exact, allocate_greedy, allocate_waterfill, codebook, fit_rate, gaussian_distortion,
    };
    #[pymodule_export]
    use crate::array::Array;
    #[pymodule_export]
    use crate::device::cuda_status;
    #[pymodule_export]
    use crate::file::inspect;
    #[pymodule_export]
    use crate::plan::Plan;
    #[pymodule_export]
    use crate::registry::{check_codec, check_policy, check_shape, codecs, policies};
    #[pymodule_export]
    use crate::snapshot::Snapshot;
    #[pymodule_export]
    use crate::store::KVStore;
}
