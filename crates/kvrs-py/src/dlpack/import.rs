//! Importing through Python, and saying in our words what is wrong with an object.

use super::Asked;
use crate::errors::{exception, raise, shorten};
use crate::torch::current_stream;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::python::consumer::stream::{self, DlpackStream, StreamArg};
use dlpark::python::{ImportRequest, ImportedDlpack, from_dlpack};
use kvrs::Error;
use kvrs_codec::Place;
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use std::ffi::c_void;

pub(super) fn import(asked: Asked<'_>, object: &Bound<'_, PyAny>) -> PyResult<ImportedDlpack> {
    let py = object.py();
    let request = ImportRequest::new(object.as_borrowed()).map_err(|e| reword(asked, object, e))?;
    // A capsule tells its device only once it is imported.
    let Ok(device) = request.device() else {
        return request.import(None, None).or_else(|error| import_old(asked, object, error));
    };
    let imported = match asked.check_device(py, device)? {
        Place::Host => request.import(None, None),
        Place::Cuda(device) => request.import(Some(&OnStream(current_stream(py, device)?)), None),
    };
    imported.or_else(|error| import_old(asked, object, error))
}

/// The stream on which a tensor must be ready.
struct OnStream(u64);

impl OnStream {
    fn handle(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }
}

// SAFETY: the stream is torch's current one, or the default one, and lives.
unsafe impl DlpackStream for OnStream {
    fn as_python_arg(&self, _py: Python<'_>, _device: DLDevice) -> PyResult<StreamArg> {
        Ok(stream::cuda(self.handle()))
    }

    unsafe fn wait_for_producer(&self, _device: DLDevice, producer: *mut c_void) -> PyResult<bool> {
        Ok(producer == self.handle())
    }
}

/// Producers from before DLPack 1.0 do not know `max_version`.
fn import_old(asked: Asked<'_>, object: &Bound<'_, PyAny>, error: PyErr) -> PyResult<ImportedDlpack> {
    if error.is_instance_of::<PyTypeError>(object.py())
        && let Ok(capsule) = object.call_method0(intern!(object.py(), "__dlpack__"))
    {
        return from_dlpack(capsule.as_borrowed(), None, None).map_err(|e| reword(asked, object, e));
    }
    Err(reword(asked, object, error))
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

impl Asked<'_> {
    /// The place of a device, if it is the one that is asked for.
    pub(super) fn check_device(&self, py: Python<'_>, device: DLDevice) -> PyResult<Place> {
        let (index, kind) = (device.device_id, device.device_type);
        let place = match kind {
            DLDeviceType::CPU | DLDeviceType::CUDAHOST => Some(Place::Host),
            DLDeviceType::CUDA => u32::try_from(index).ok().map(Place::Cuda),
            _ => None,
        };
        match place {
            Some(place) if place == self.store.unwrap_or(Place::Host) => Ok(place),
            Some(place) => Err(self.elsewhere(py, place.to_string())),
            None if kind == DLDeviceType::ROCM => Err(self.elsewhere(py, format!("rocm:{index}"))),
            None if kind == DLDeviceType::METAL => Err(self.elsewhere(py, format!("metal:{index}"))),
            None => Err(self.elsewhere(py, format!("DLPack device type {}:{index}", kind.0))),
        }
    }

    fn elsewhere(&self, py: Python<'_>, got: String) -> PyErr {
        let allowed = self.store.map_or("cpu".to_owned(), |store| format!("{store}, as the store"));
        raise(py, &Error::device(self.what, got, allowed))
    }
}

/// Says in our words why a producer refused.
fn reword(asked: Asked<'_>, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let (py, what) = (object.py(), asked.what);
    let ordinary = error.is_instance_of::<PyBufferError>(py)
        || error.is_instance_of::<PyTypeError>(py)
        || error.is_instance_of::<PyValueError>(py)
        || error.is_instance_of::<PyRuntimeError>(py)
        || error.is_instance_of::<PyAttributeError>(py);
    if !ordinary {
        return error;
    }
    if object.getattr("is_meta").is_ok_and(|x| x.is_truthy().unwrap_or(false)) {
        return asked.elsewhere(py, "meta".to_owned());
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
    raise(object.py(), &Error::argument(what, got, "a strided tensor of native floats"))
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
