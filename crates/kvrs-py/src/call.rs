//! The tensors and options of one call.

use crate::args;
use crate::array::{Buffer, Element, check_out_dtype};
use crate::dlpack::Tensor;
use crate::torch;
use kvrs::{Dtype, Queries, Tokens, ViewMut};
use kvrs_codec::Place;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

const KV: &str = "[B, Hkv, T, D]";

/// How a call scores its queries, apart from the tensors.
pub(crate) struct Scoring {
    causal: bool,
    scale: Option<f32>,
    softcap: Option<f32>,
    sink_logits: Option<Vec<f32>>,
}

/// The new tokens of a call.
pub(crate) struct NewTokens {
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    mask: Option<Vec<bool>>,
    positions: Option<Vec<i64>>,
}

impl NewTokens {
    pub(crate) fn import(
        place: Place,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        mask: Option<&Bound<'_, PyAny>>,
        positions: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (k, v) = (Tensor::at(place, "k", k, KV)?, Tensor::at(place, "v", v, "[B, Hkv, T, Dv]")?);
        let (rows, columns) = (k.shape()[0], k.shape()[2]);
        let mask = args::mask(mask, rows, columns)?;
        Ok(Self { mask, positions: args::positions(positions, rows, columns)?, k, v })
    }

    pub(crate) fn tokens(&self, py: Python<'_>) -> PyResult<Tokens<'_>> {
        let (k, v) = (self.k.view(py, "k")?, self.v.view(py, "v")?);
        Ok(Tokens { k, v, mask: self.mask.as_deref(), positions: self.positions.as_deref() })
    }
}

/// Where a call's output goes: the caller's tensor, or new memory.
pub(crate) enum Target<'py> {
    Caller(Tensor, Bound<'py, PyAny>),
    New(Buffer),
}

/// The output and the log-sum-exp of an attention call.
pub(crate) struct Outputs<'py> {
    target: Target<'py>,
    /// In host memory, wherever the store is.
    lse: Option<Buffer>,
    place: Place,
}

impl<'py> Outputs<'py> {
    pub(crate) fn new(
        place: Place,
        q: (&Tensor, Dtype),
        value_dim: usize,
        (out, py): (Option<&Bound<'py, PyAny>>, Python<'py>),
        return_lse: bool,
    ) -> PyResult<Self> {
        let [b, h, t] = [0, 1, 2].map(|i| q.0.shape()[i]);
        let caller = |object: Bound<'py, PyAny>| {
            Ok(Target::Caller(Tensor::writable(place, "out", &object, "[B, Hq, Tq, Dv]")?, object))
        };
        let target = match (out, place) {
            (Some(object), _) => caller(object.clone()),
            (None, Place::Host) => Ok(Target::New(Buffer::zeros(Element::Float(q.1), &[b, h, t, value_dim]))),
            (None, Place::Cuda(_)) => caller(torch::empty(py, [b, h, t, value_dim], q.1, place)?),
        };
        let lse = return_lse.then(|| Buffer::zeros(Element::Float(Dtype::F32), &[b, h, t]));
        target.map(|target: Target<'py>| Self { target, lse, place })
    }

    /// The tensor to fill and the slice for the log-sum-exp.
    pub(crate) fn borrow(
        &mut self,
        py: Python<'_>,
        dtype: Dtype,
        inputs: &[(&str, &Tensor)],
    ) -> PyResult<(ViewMut<'_>, Option<&mut [f32]>)> {
        let view = match &mut self.target {
            Target::Caller(tensor, _) => {
                check_out_dtype(py, tensor.float(py, "out")?, dtype)?;
                tensor.view_mut(py, "out", inputs)?
            }
            Target::New(buffer) => buffer.view_mut(py, "out", dtype)?,
        };
        Ok((view, self.lse.as_mut().map(Buffer::as_f32)))
    }

    pub(crate) fn into_python(self, q: &Bound<'py, PyAny>, query: &Tensor) -> PyResult<Bound<'py, PyAny>> {
        let out = match self.target {
            Target::Caller(_, object) => object,
            Target::New(buffer) => buffer.into_kind_of(q, query.exchange())?,
        };
        let lse = match (self.lse, self.place) {
            (None, _) => return Ok(out),
            (Some(lse), Place::Host) => lse.into_kind_of(q, query.exchange())?,
            (Some(lse), place) => torch::copy_to(&lse.into_array(q.py())?, place)?,
        };
        Ok(PyTuple::new(q.py(), [out, lse])?.into_any())
    }
}

impl Scoring {
    pub(crate) fn new(
        causal: bool,
        scale: Option<&Bound<'_, PyAny>>,
        softcap: Option<&Bound<'_, PyAny>>,
        sink_logits: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self {
            causal,
            scale: args::number("scale", scale)?,
            softcap: args::number("softcap", softcap)?,
            sink_logits: args::sink_logits(sink_logits)?,
        })
    }

    pub(crate) fn queries<'a>(
        &'a self,
        py: Python<'_>,
        q: &'a Tensor,
        mask: Option<&'a [bool]>,
    ) -> PyResult<Queries<'a>> {
        Ok(Queries {
            q: q.view(py, "q")?,
            causal: self.causal,
            scale: self.scale,
            softcap: self.softcap,
            sink_logits: self.sink_logits.as_deref(),
            mask,
        })
    }
}
