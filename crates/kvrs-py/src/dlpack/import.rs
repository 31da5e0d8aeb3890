//! Importing through Python, and saying in our words what is wrong with an object.

use crate::errors::{exception, raise, shorten};
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::python::{ImportRequest, ImportedDlpack, from_dlpack};
use kvrs::Error;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

pub(super) fn import(what: &str, object: &Bound<'_, PyAny>) -> PyResult<ImportedDlpack> {
    let request = ImportRequest::new(object.as_borrowed()).map_err(|e| reword(what, object, e))?;
    // A capsule tells its device only once it is imported.
    if let Ok(device) = request.device() {
        check_device(object.py(), what, device)?;
    }
    request.import(None, None).or_else(|error| import_old(what, object, error))
}

/// Producers from before DLPack 1.0 do not know `max_version`.
fn import_old(what: &str, object: &Bound<'_, PyAny>, error: PyErr) -> PyResult<ImportedDlpack> {
    if error.is_instance_of::<PyTypeError>(object.py())
        && let Ok(capsule) = object.call_method0(intern!(object.py(), "__dlpack__"))
    {
        return from_dlpack(capsule.as_borrowed(), None, None).map_err(|e| reword(what, object, e));
    }
    Err(reword(what, object, error))
}

/// The C exchange path of torch exports tensors that require grad, and views whose sign is still to be turned.
pub(super) fn refuse_lazy(what: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    let Some(flag) = object.getattr_opt(intern!(py, "requires_grad"))? else { return Ok(()) };
    if flag.is_truthy()? {
        let allowed = format!("a tensor without gradient: pass {what}.detach()");
        return Err(raise(py, &Error::argument(what, "a tensor that requires grad", allowed)));
    }
    if let Some(is_neg) = object.getattr_opt(intern!(py, "is_neg"))?
        && is_neg.call0()?.is_truthy()?
    {
        let allowed = format!("a tensor with its own values: pass {what}.resolve_neg()");
        return Err(raise(py, &Error::argument(what, "a negative view", allowed)));
    }
    Ok(())
}

pub(super) fn check_device(py: Python<'_>, what: &str, device: DLDevice) -> PyResult<()> {
    let name = match device.device_type {
        DLDeviceType::CPU | DLDeviceType::CUDAHOST => return Ok(()),
        DLDeviceType::CUDA => "cuda".to_owned(),
        DLDeviceType::ROCM => "rocm".to_owned(),
        DLDeviceType::METAL => "metal".to_owned(),
        other => format!("DLPack device type {}", other.0),
    };
    Err(raise(py, &Error::device(what, format!("{name}:{}", device.device_id), "cpu, as the store")))
}

/// Says in our words why a producer refused.
fn reword(what: &str, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let py = object.py();
    let ordinary = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyRuntimeError>(py)
        || error.is_instance_of::<PyAttributeError>(py);
    if !ordinary {
        return error;
    }
    if object.getattr("is_meta").is_ok_and(|x| x.is_truthy().unwrap_or(false)) {
        return raise(py, &Error::device(what, "meta", "cpu, as the store"));
    }
    if let Ok(layout) = object.getattr("layout")
        && layout.to_string() != "torch.strided"
    {
        return raise(py, &Error::argument(what, format!("of layout {layout}"), "a strided tensor"));
    }
    let capsule = object.is_instance_of::<pyo3::types::PyCapsule>();
    if !capsule && !object.hasattr("__dlpack__").unwrap_or(false) {
        let kind = object.get_type().name().map_or_else(|_| "object".to_owned(), |n| n.to_string());
        let allowed = "a DLPack tensor (torch.Tensor, numpy.ndarray, ...)";
        return exception(py, "DTypeError", &format!("{what} is of type {kind}; allowed: {allowed}"));
    }
    let reworded = unreadable(what, object, error.value(py).to_string());
    reworded.set_cause(py, Some(error));
    reworded
}

pub(super) fn unreadable(what: &str, object: &Bound<'_, PyAny>, why: impl AsRef<str>) -> PyErr {
    let got = format!("not readable through DLPack ({})", shorten(why.as_ref()));
    raise(object.py(), &Error::argument(what, got, "a strided tensor of native floats in host memory"))
}

/// The name of an element type, as array libraries spell it.
pub(super) fn dtype_name(dtype: DLDataType) -> String {
    let DLDataType { code, bits, lanes } = dtype;
    let kind = match code {
        DLDataTypeCode::INT => "int",
        DLDataTypeCode::UINT => "uint",
        DLDataTypeCode::FLOAT => "float",
        DLDataTypeCode::BFLOAT => "bfloat",
        DLDataTypeCode::COMPLEX => "complex",
        DLDataTypeCode::BOOL => return "bool".to_owned(),
        other => return format!("DLPack type code {} of {bits} bits", other.0),
    };
    let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
    format!("{kind}{bits}{lanes}")
}
