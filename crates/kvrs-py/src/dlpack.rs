//! Tensors in: any DLPack object, borrowed without a copy.

mod import;

use crate::errors::raise;
use dlpark::ffi::{DLDataType, DLTensor};
use dlpark::python::ImportedDlpack;
use dlpark::python::consumer::exchange::ExchangeApi;
use dlpark::{DlpackFlags, TensorRef};
use half::{bf16, f16};
use import::{dtype_name, import, refuse_lazy, unreadable};
use kvrs::{Dtype, Error, Geometry, View, ViewMut};
use kvrs_codec::view::{DeviceBytes, Place};
use pyo3::prelude::*;

/// Most dimensions that any argument has.
const MAX_RANK: usize = 4;

/// What keeps a tensor's memory: both are held, neither is looked at again.
enum Owner {
    Managed(#[allow(dead_code, reason = "held")] ImportedDlpack),
    Object(#[allow(dead_code, reason = "held")] Py<PyAny>),
}

/// A producer's tensor, kept alive, and where its bytes lie.
pub(crate) struct Tensor {
    dtype: DLDataType,
    rank: usize,
    /// Extents; unused trailing dimensions are 1.
    shape: [usize; MAX_RANK],
    /// Strides in elements.
    strides: [isize; MAX_RANK],
    /// Where its memory is: only the host's is ever looked at.
    place: Place,
    /// Lowest byte of any element; dangling if there is none.
    low: *mut u8,
    /// Bytes from `low` to the end of the highest element.
    span: usize,
    /// Byte offset of the first element above `low`.
    start: usize,
    read_only: bool,
    /// The C exchange interface that it came through.
    exchange: Option<ExchangeApi>,
    _owner: Owner,
}

/// How an argument is named and what is asked of it.
#[derive(Clone, Copy)]
struct Asked<'a> {
    what: &'a str,
    rank: usize,
    axes: &'a str,
    /// The store's place; `None`: the host, whatever the store's is.
    store: Option<Place>,
}

impl Tensor {
    /// Imports `object` for reading if it lies in host memory and has `rank` dimensions; `axes` names them in the
    /// error.
    pub(crate) fn new(what: &str, object: &Bound<'_, PyAny>, rank: usize, axes: &str) -> PyResult<Self> {
        Self::reading(Asked { what, rank, axes, store: None }, object)
    }

    /// Imports the four-dimensional `object` for reading if it lies where the store does.
    pub(crate) fn at(place: Place, what: &str, object: &Bound<'_, PyAny>, axes: &str) -> PyResult<Self> {
        Self::reading(Asked { what, rank: MAX_RANK, axes, store: Some(place) }, object)
    }

    /// Imports the four-dimensional `object` for writing; otherwise as [`Tensor::at`].
    pub(crate) fn writable(
        place: Place,
        what: &str,
        object: &Bound<'_, PyAny>,
        axes: &str,
    ) -> PyResult<Self> {
        refuse_lazy(what, object)?;
        Self::managed(Asked { what, rank: MAX_RANK, axes, store: Some(place) }, object)
    }

    fn reading(asked: Asked<'_>, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        refuse_lazy(asked.what, object)?;
        match Self::borrowed(asked, object) {
            Some(tensor) => tensor,
            None => Self::managed(asked, object),
        }
    }

    /// Where a C exchange interface says that the tensor lies: no call into Python, no allocation. `None` if the
    /// producer has none or refuses this tensor. It knows no read-only flag, so these are read only.
    fn borrowed(asked: Asked<'_>, object: &Bound<'_, PyAny>) -> Option<PyResult<Self>> {
        let exchange = ExchangeApi::from_object(object.as_borrowed()).ok()??;
        let read = |tensor: &DLTensor, _| {
            // SAFETY: the producer keeps the descriptor readable during this callback.
            let tensor = unsafe { TensorRef::from_raw(tensor) };
            let tensor = tensor.map_err(|e| unreadable(asked.what, object, e.to_string()))?;
            Self::read(asked, object, &tensor, true)
        };
        let read = exchange.with_tensor_view_no_sync(object.as_borrowed(), read).ok()?;
        Some(read.map(|read| Self { exchange: Some(exchange), ..read }))
    }

    fn managed(asked: Asked<'_>, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let owner = import(asked, object)?;
        let read_only = owner.flags().contains(DlpackFlags::READ_ONLY);
        let tensor = owner.validate().map_err(|e| unreadable(asked.what, object, e.to_string()))?;
        let read = Self::read(asked, object, &tensor, read_only)?;
        Ok(Self { _owner: Owner::Managed(owner), ..read })
    }

    /// Takes over what the descriptor says; the object itself is the owner.
    fn read(
        asked: Asked<'_>,
        object: &Bound<'_, PyAny>,
        tensor: &TensorRef<'_>,
        read_only: bool,
    ) -> PyResult<Self> {
        let (py, what) = (object.py(), asked.what);
        let broken = |e: dlpark::tensor::Error| unreadable(what, object, e.to_string());
        let place = asked.check_device(py, tensor.device())?;
        let (extents, steps) = (tensor.shape(), tensor.strides_or_compact().map_err(broken)?);
        if extents.len() != asked.rank {
            let allowed = format!("{} dimensions {}", asked.rank, asked.axes);
            return Err(raise(py, &Error::shape(what, format!("{extents:?}"), allowed)));
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
            low = first.cast_mut().wrapping_sub(below);
        }
        Ok(Self {
            dtype,
            rank: asked.rank,
            shape,
            strides,
            place,
            low,
            span,
            start: below,
            read_only,
            exchange: None,
            _owner: Owner::Object(object.clone().unbind()),
        })
    }

    /// The C exchange interface that it came through, if it did.
    pub(crate) fn exchange(&self) -> Option<&ExchangeApi> {
        self.exchange.as_ref()
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
        self.place == other.place && self.span > 0 && other.span > 0 && a < d && c < b
    }

    /// All bytes from the lowest to the highest element.
    fn bytes(&self) -> &[u8] {
        assert!(self.place == Place::Host, "what the host reads lies in its memory");
        // SAFETY: `low..low + span` lies in the producer's allocation, which `_owner` keeps alive; callers must not
        // write to an argument, resize it or give it other memory while a call reads it, as with every array library.
        unsafe { std::slice::from_raw_parts(self.low, self.span) }
    }

    fn geometry(&self, py: Python<'_>, what: &str) -> PyResult<Geometry> {
        let dtype = self.float(py, what)?;
        Ok(Geometry { dtype, shape: self.shape, strides: self.strides, start: self.start })
    }

    /// The tensor to read; it has four dimensions.
    pub(crate) fn view(&self, py: Python<'_>, what: &str) -> PyResult<View<'_>> {
        let geometry = self.geometry(py, what)?;
        let view = match self.place {
            Place::Host => View::new(what, self.bytes(), geometry),
            Place::Cuda(device) => View::on_device(what, self.device_bytes(device), geometry),
        };
        view.map_err(|e| raise(py, &e))
    }

    /// As [`Tensor::bytes`], for kernels.
    fn device_bytes(&self, device: u32) -> DeviceBytes<'_> {
        DeviceBytes::new(device, self.low.expose_provenance() as u64, self.span)
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
        if let Place::Cuda(device) = self.place {
            return ViewMut::on_device(what, self.device_bytes(device), geometry).map_err(|e| raise(py, &e));
        }
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
