//! torch, for what only it can do: memory on devices, and their current streams.

use kvrs::Dtype;
use kvrs_codec::Place;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// torch, if the program has imported it.
pub(crate) fn loaded(py: Python<'_>) -> PyResult<Option<Bound<'_, PyAny>>> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    let found = modules.cast::<PyDict>()?.get_item(intern!(py, "torch"))?;
    Ok(found.filter(|torch| torch.hasattr(intern!(py, "Tensor")).unwrap_or(false)))
}

/// The stream, as a number, that torch uses on a device in this thread now: the default one as long as torch has not
/// touched any device.
pub(crate) fn current_stream(py: Python<'_>, device: u32) -> PyResult<u64> {
    let Some(torch) = loaded(py)? else { return Ok(0) };
    let cuda = torch.getattr(intern!(py, "cuda"))?;
    if !cuda.call_method0(intern!(py, "is_initialized"))?.is_truthy()? {
        return Ok(0);
    }
    let stream = cuda.call_method1(intern!(py, "current_stream"), (device,))?;
    stream.getattr(intern!(py, "cuda_stream"))?.extract()
}

/// A tensor of anything in a place.
pub(crate) fn empty(
    py: Python<'_>,
    shape: [usize; 4],
    dtype: Dtype,
    place: Place,
) -> PyResult<Bound<'_, PyAny>> {
    let torch = py.import(intern!(py, "torch"))?;
    let keywords = PyDict::new(py);
    keywords.set_item("dtype", torch.getattr(dtype.name())?)?;
    keywords.set_item("device", place.to_string())?;
    torch.call_method(intern!(py, "empty"), (shape,), Some(&keywords))
}

/// A copy of a tensor in another place.
pub(crate) fn copy_to<'py>(tensor: &Bound<'py, PyAny>, place: Place) -> PyResult<Bound<'py, PyAny>> {
    shared(tensor)?.call_method1(intern!(tensor.py(), "to"), (place.to_string(),))
}

/// Copies all elements of a tensor to another of the same shape.
pub(crate) fn fill(to: &Bound<'_, PyAny>, from: &Bound<'_, PyAny>) -> PyResult<()> {
    shared(to)?.call_method1(intern!(to.py(), "copy_"), (shared(from)?,)).map(|_| ())
}

/// A tensor of torch on the same memory.
fn shared<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    py.import(intern!(py, "torch"))?.call_method1(intern!(py, "from_dlpack"), (tensor,))
}
