//! Tensors in: any DLPack object, borrowed without a copy.

use crate::errors::{exception, raise, shorten};
use dlpark::DlpackFlags;
use dlpark::ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType};
use dlpark::python::{ImportRequest, ImportedDlpack, from_dlpack};
use half::{bf16, f16};
use kvrs::{Dtype, Error, Geometry, View, ViewMut};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

/// Most dimensions that any argument has.
const MAX_RANK: usize = 4;

/// A producer's tensor, kept alive, and where its bytes lie.
pub(crate) struct Tensor {
    dtype: DLDataType,
    rank: usize,
    /// Extents; unused trailing dimensions are 1.
    shape: [usize; MAX_RANK],
    /// Strides in elements.
    strides: [isize; MAX_RANK],
    /// Lowest byte of any element; dangling if there is none.
    low: *mut u8,
    /// Bytes from `low` to the end of the highest element.
    span: usize,
    /// Byte offset of the first element above `low`.
    start: usize,
    read_only: bool,
    _owner: ImportedDlpack,
}

impl Tensor {
    /// Imports `object` if it lies in host memory and has `rank` dimensions; `axes` names them in the error.
    pub(crate) fn new(what: &str, object: &Bound<'_, PyAny>, rank: usize, axes: &str) -> PyResult<Self> {
        let py = object.py();
        let owner = import(what, object)?;
        let broken = |e: dlpark::tensor::Error| unreadable(what, object, e.to_string());
        let tensor = owner.validate().map_err(broken)?;
        check_device(py, what, tensor.device())?;
        let (extents, steps) = (tensor.shape(), tensor.strides_or_compact().map_err(broken)?);
        if extents.len() != rank {
            return Err(raise(
                py,
                &Error::shape(what, format!("{extents:?}"), format!("{rank} dimensions {axes}")),
            ));
        }
        let mut shape = [1; MAX_RANK];
        shape.iter_mut().zip(extents).for_each(|(to, &extent)| *to = extent as usize);
        // Strides of extents below 2 mean nothing, and producers put anything there.
        let mut strides = row_major(shape);
        if !shape.contains(&0) {
            let used = strides.iter_mut().zip(steps.iter()).zip(extents).filter(|(_, extent)| **extent > 1);
            used.for_each(|((to, &step), _)| *to = step as isize);
        }
        let dtype = tensor.dtype();
        let (below, span) = reach(&shape, &strides, dtype.element_size())
            .ok_or_else(|| unreadable(what, object, format!("strides {strides:?} are too large")))?;
        let mut low = std::ptr::NonNull::<u8>::dangling().as_ptr();
        if span > 0 {
            // SAFETY: the producer promises that `data + byte_offset` is the first element of its allocation.
            let first = unsafe { tensor.offset_bytes_ptr() }.map_err(broken)?;
            // SAFETY: `below` bytes lie between the lowest and the first element of the same allocation.
            low = unsafe { first.cast_mut().sub(below) };
        }
        let read_only = owner.flags().contains(DlpackFlags::READ_ONLY);
        Ok(Self { dtype, rank, shape, strides, low, span, start: below, read_only, _owner: owner })
    }

    /// Extents.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The element type, if it is a float of 16 or 32 bits.
    pub(crate) fn float(&self, py: Python<'_>, what: &str) -> PyResult<Dtype> {
        match self.dtype {
            d if d.is::<f32>() => Ok(Dtype::F32),
            d if d.is::<f16>() => Ok(Dtype::F16),
            d if d.is::<bf16>() => Ok(Dtype::Bf16),
            d => Err(raise(py, &Error::dtype(what, dtype_name(d), "float32, float16, bfloat16"))),
        }
    }

    /// The name of the element type.
    pub(crate) fn dtype_name(&self) -> String {
        dtype_name(self.dtype)
    }

    /// The element type.
    pub(crate) fn dtype(&self) -> DLDataType {
        self.dtype
    }

    /// The addresses of the first byte and past the last byte.
    fn addresses(&self) -> (usize, usize) {
        (self.low.addr(), self.low.addr() + self.span)
    }

    /// Whether the byte ranges of two tensors meet.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let ((a, b), (c, d)) = (self.addresses(), other.addresses());
        self.span > 0 && other.span > 0 && a < d && c < b
    }

    /// All bytes from the lowest to the highest element.
    fn bytes(&self) -> &[u8] {
        // SAFETY: `low..low + span` lies in the producer's allocation, which `_owner` keeps alive; callers must
        // not write to an argument while a call reads it, as with every array library.
        unsafe { std::slice::from_raw_parts(self.low, self.span) }
    }

    fn geometry(&self, py: Python<'_>, what: &str) -> PyResult<Geometry> {
        let dtype = self.float(py, what)?;
        Ok(Geometry { dtype, shape: self.shape, strides: self.strides, start: self.start })
    }

    /// The tensor to read; it has four dimensions.
    pub(crate) fn view(&self, py: Python<'_>, what: &str) -> PyResult<View<'_>> {
        View::new(what, self.bytes(), self.geometry(py, what)?).map_err(|e| raise(py, &e))
    }

    /// The tensor to fill; it has four dimensions and overlaps none of `others`, which the same call reads.
    pub(crate) fn view_mut(
        &mut self,
        py: Python<'_>,
        what: &str,
        others: &[(&str, &Self)],
    ) -> PyResult<ViewMut<'_>> {
        if self.read_only {
            return Err(raise(py, &Error::argument(what, "read-only", "a writable tensor")));
        }
        if let Some((name, _)) = others.iter().find(|(_, other)| self.overlaps(other)) {
            let allowed = "memory of its own";
            return Err(raise(py, &Error::argument(what, format!("in the memory range of {name}"), allowed)));
        }
        let geometry = self.geometry(py, what)?;
        // SAFETY: as in `bytes`; the producer allows writing, and no other borrow of this call meets the range.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.low, self.span) };
        ViewMut::new(what, bytes, geometry).map_err(|e| raise(py, &e))
    }

    /// All elements in row-major order.
    pub(crate) fn elements<T, const N: usize>(&self, value: impl Fn([u8; N]) -> T) -> Vec<T> {
        let bytes = self.bytes();
        let [b, h, t, d] = self.shape;
        let mut out = Vec::with_capacity(b * h * t * d);
        for i in 0..b * h * t * d {
            let index = [i / (h * t * d), i / (t * d) % h, i / d % t, i % d];
            let steps: isize = index.iter().zip(self.strides).map(|(&i, s)| i as isize * s).sum();
            let at = self.start.wrapping_add_signed(steps * N as isize);
            let element = bytes[at..].first_chunk().expect("elements lie inside the span");
            out.push(value(*element));
        }
        out
    }
}

/// Strides of a contiguous tensor; extents of 0 count as 1, so that no two axes share a stride.
pub(crate) fn row_major([_, h, t, d]: [usize; MAX_RANK]) -> [isize; MAX_RANK] {
    let [h, t, d] = [h, t, d].map(|n| n.max(1) as isize);
    [h * t * d, t * d, d, 1]
}

/// Bytes below the first element, and bytes of the whole; `(0, 0)` for a tensor without elements.
fn reach(shape: &[usize], strides: &[isize], size: usize) -> Option<(usize, usize)> {
    if shape.contains(&0) {
        return Some((0, 0));
    }
    let (mut below, mut above) = (0_usize, size);
    for (&extent, &stride) in shape.iter().zip(strides) {
        let far = (extent - 1).checked_mul(stride.unsigned_abs())?.checked_mul(size)?;
        let end = if stride < 0 { &mut below } else { &mut above };
        *end = end.checked_add(far)?;
    }
    let span = below.checked_add(above)?;
    (isize::try_from(span).is_ok()).then_some((below, span))
}

fn import(what: &str, object: &Bound<'_, PyAny>) -> PyResult<ImportedDlpack> {
    refuse_lazy(what, object)?;
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
fn refuse_lazy(what: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
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

fn check_device(py: Python<'_>, what: &str, device: DLDevice) -> PyResult<()> {
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

fn unreadable(what: &str, object: &Bound<'_, PyAny>, why: impl AsRef<str>) -> PyErr {
    let got = format!("not readable through DLPack ({})", shorten(why.as_ref()));
    raise(object.py(), &Error::argument(what, got, "a strided tensor of native floats in host memory"))
}

/// The name of an element type, as array libraries spell it.
fn dtype_name(dtype: DLDataType) -> String {
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
