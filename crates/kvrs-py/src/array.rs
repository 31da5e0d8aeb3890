//! Tensors out: memory that the store filled, handed over without a copy.

use crate::dlpack::row_major;
use crate::errors::{exception, raise};
use crate::torch;
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::python::consumer::exchange::ExchangeApi;
use dlpark::python::{DlpackExporter, ExportRequest, export_dlpack};
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use kvrs::{Dtype, Error, Geometry, ViewMut};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;

/// Element type of a result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    /// One of the float types.
    Float(Dtype),
    /// 64-bit integers.
    Int64,
}

impl Element {
    fn size(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Int64 => 8,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.name(),
            Self::Int64 => "int64",
        }
    }

    fn dlpack(self) -> DLDataType {
        match self {
            Self::Float(Dtype::F32) => DLDataType::F32,
            Self::Float(Dtype::F16) => DLDataType::F16,
            Self::Float(Dtype::Bf16) => DLDataType::BF16,
            Self::Int64 => DLDataType::I64,
        }
    }
}

/// Contiguous zeroed memory, aligned for every element type.
pub(crate) struct Buffer {
    words: Vec<u64>,
    shape: Vec<i64>,
    element: Element,
}

impl Buffer {
    /// Zeros of that shape.
    pub(crate) fn zeros(element: Element, shape: &[usize]) -> Self {
        let len_bytes = shape.iter().product::<usize>() * element.size();
        Self {
            words: vec![0; len_bytes.div_ceil(8)],
            shape: shape.iter().map(|&n| n as i64).collect(),
            element,
        }
    }

    /// `values` in that shape.
    pub(crate) fn floats(values: &[f32], shape: &[usize]) -> Self {
        let mut buffer = Self::zeros(Element::Float(Dtype::F32), shape);
        buffer.as_f32().copy_from_slice(values);
        buffer
    }

    /// One dimension of integers.
    pub(crate) fn integers(values: &[i64]) -> Self {
        let words = values.iter().map(|&x| x as u64).collect();
        Self { words, shape: vec![values.len() as i64], element: Element::Int64 }
    }

    fn len(&self) -> usize {
        self.shape.iter().map(|&n| n as usize).product()
    }

    /// The elements of a float32 buffer.
    pub(crate) fn as_f32(&mut self) -> &mut [f32] {
        assert!(self.element == Element::Float(Dtype::F32), "a float32 buffer");
        let len = self.len();
        // SAFETY: the words hold at least `len` f32, are aligned for them, and any bits are a valid f32.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len) }
    }

    /// The four-dimensional tensor to fill.
    pub(crate) fn view_mut(&mut self, py: Python<'_>, what: &str, dtype: Dtype) -> PyResult<ViewMut<'_>> {
        let shape = [0, 1, 2, 3].map(|i| self.shape[i] as usize);
        let len_bytes = self.len() * dtype.size();
        // SAFETY: the words hold at least `len_bytes` initialised bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len_bytes) };
        ViewMut::new(what, bytes, Geometry { dtype, shape, strides: row_major(shape), start: 0 })
            .map_err(|e| raise(py, &e))
    }

    fn managed<M: ManagedTensorBase>(self: &Arc<Self>) -> PyResult<Managed<M>> {
        let broken = |e: &dyn std::fmt::Display| PyRuntimeError::new_err(e.to_string());
        let made = Dynamic::compact(&self.shape[..]).initialize_as::<M>(Arc::clone(self));
        let mut made = made.map_err(|e| broken(&e))?;
        let data = self.words.as_ptr().cast_mut().cast();
        made.set_data(data).set_dtype(self.element.dlpack()).set_device(DLDevice::CPU);
        // SAFETY: the context owns the words, which hold as many elements as the shape says; strides are explicit.
        Ok(unsafe { made.finish() })
    }

    /// A tensor of the kind of `like`, which was imported through `api` if it has one: torch for torch, else an
    /// [`Array`].
    pub(crate) fn into_kind_of<'py>(
        self,
        like: &Bound<'py, PyAny>,
        api: Option<&ExchangeApi>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, buffer) = (like.py(), Arc::new(self));
        if let Some(api) = api {
            return api.managed_tensor_to_py_object_no_sync(buffer.managed()?, py);
        }
        let array = Bound::new(py, Array(buffer))?.into_any();
        match torch::loaded(py)? {
            Some(torch) if like.is_instance(&torch.getattr("Tensor")?)? => {
                torch.call_method1("from_dlpack", (array,))
            }
            _ => Ok(array),
        }
    }

    /// A `numpy.ndarray` on the same memory.
    pub(crate) fn into_numpy(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        numpy_of(&Bound::new(py, Array(Arc::new(self)))?.into_any())
    }

    /// An [`Array`] on the same memory.
    pub(crate) fn into_array(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        Ok(Bound::new(py, Array(Arc::new(self)))?.into_any())
    }
}

fn numpy_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    array
        .py()
        .import(intern!(array.py(), "numpy"))?
        .call_method1(intern!(array.py(), "from_dlpack"), (array,))
}

/// A result for queries that did not come from torch.
#[pyclass(frozen, module = "kvrs._kvrs")]
pub(crate) struct Array(Arc<Buffer>);

impl DlpackExporter for Array {
    fn device(&self) -> DLDevice {
        DLDevice::CPU
    }

    fn flags(&self) -> DlpackFlags {
        DlpackFlags::empty()
    }

    fn prepare_export(&self, _: Python<'_>, _: &ExportRequest<'_>) -> PyResult<()> {
        Ok(())
    }

    fn export_legacy(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensor>> {
        self.0.managed()
    }

    fn export_versioned(&self, _: Python<'_>) -> PyResult<Managed<DLManagedTensorVersioned>> {
        self.0.managed()
    }
}

#[pymethods]
impl Array {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.0.shape)
    }

    #[getter]
    fn ndim(&self) -> usize {
        self.0.shape.len()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.element.name()
    }

    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().0.element == Element::Float(Dtype::Bf16) {
            let text = "this array has dtype bfloat16, which numpy lacks; allowed: torch.from_dlpack(array)";
            return Err(exception(slf.py(), "DTypeError", text));
        }
        numpy_of(slf.as_any())
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let array = Self::numpy(slf)?;
        let keywords = PyDict::new(slf.py());
        keywords.set_item("copy", copy.unwrap_or(false))?;
        match dtype {
            Some(dtype) => array.call_method("astype", (dtype,), Some(&keywords)),
            None if copy == Some(true) => array.call_method0("copy"),
            None => Ok(array),
        }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        export_dlpack(self, py, ExportRequest::parse(stream, max_version, dl_device, copy)?)
    }

    #[allow(clippy::unused_self, reason = "a method by protocol")]
    fn __dlpack_device__(&self) -> (u32, i32) {
        (DLDevice::CPU.device_type.0, 0)
    }

    fn __repr__(&self) -> String {
        let shape: Vec<_> = self.0.shape.iter().map(ToString::to_string).collect();
        format!("kvrs.Array(shape=[{}], dtype={})", shape.join(", "), self.0.element.name())
    }
}

/// Checks that a caller's `out` has the type of the queries.
pub(crate) fn check_out_dtype(py: Python<'_>, out: Dtype, q: Dtype) -> PyResult<()> {
    if out == q {
        return Ok(());
    }
    Err(raise(py, &Error::dtype("out", out.name(), format!("that of q: {}", q.name()))))
}
