//! Scalars, ids, masks and positions: checked by name, since a wrong one must say which it is.

use crate::dlpack::Tensor;
use crate::errors::{raise, wrong_type};
use dlpark::ffi::DLDataType;
use half::{bf16, f16};
use kvrs::budget::{Budget, bytes_of};
use kvrs::{Array, Arrays, Dtype, Error, SeqId};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString};

/// An integer; bools, floats and strings are refused.
pub(crate) fn integer(what: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if let Some(number) = exact(value) {
        return Ok(number);
    }
    let plain = !value.is_instance_of::<PyBool>() && !value.is_instance_of::<PyFloat>();
    match value.extract() {
        Ok(number) if plain => Ok(number),
        _ => Err(wrong_type(what, value, "an int")),
    }
}

/// The value of a Python int, neither a bool nor any other kind, that fits 64 bits.
fn exact(value: &Bound<'_, PyAny>) -> Option<i64> {
    value.cast_exact::<PyInt>().ok()?.extract().ok()
}

/// An integer from 0 on.
pub(crate) fn count(what: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let number = integer(what, value)?;
    let wrong = |_| raise(value.py(), &Error::argument(what, number, "an int from 0 on"));
    usize::try_from(number).map_err(wrong)
}

/// A number, or nothing.
pub(crate) fn number(what: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<f32>> {
    let Some(value) = value else { return Ok(None) };
    match value.extract::<f64>() {
        Ok(number) if !value.is_instance_of::<PyBool>() => Ok(Some(number as f32)),
        _ => Err(wrong_type(what, value, "None or a number")),
    }
}

/// The index of a layer or head below `end`.
pub(crate) fn index(what: &str, value: &Bound<'_, PyAny>, end: usize) -> PyResult<usize> {
    let number = integer(what, value)?;
    match usize::try_from(number) {
        Ok(index) if index < end => Ok(index),
        _ => Err(raise(value.py(), &Error::argument(what, number, format!("0..={}", end.saturating_sub(1))))),
    }
}

/// A sequence id.
pub(crate) fn sequence(what: &str, value: &Bound<'_, PyAny>) -> PyResult<SeqId> {
    let number = integer(what, value)?;
    let wrong = |_| raise(value.py(), &Error::sequence(what, number, "an id that new returned"));
    u64::try_from(number).map(SeqId).map_err(wrong)
}

/// One id or several.
pub(crate) fn sequences(value: &Bound<'_, PyAny>) -> PyResult<Vec<SeqId>> {
    if let Ok(list) = value.cast_exact::<PyList>() {
        let id = |item: Bound<'_, PyAny>| exact(&item).and_then(|id| u64::try_from(id).ok()).map(SeqId);
        if let Some(ids) = list.iter().map(id).collect() {
            return Ok(ids);
        }
    }
    if value.is_instance_of::<PyString>() {
        return Err(wrong_type("seqs", value, "an int or a list of ints"));
    }
    let Ok(items) = value.try_iter() else { return Ok(vec![sequence("seqs", value)?]) };
    items.enumerate().map(|(i, item)| sequence(&format!("seqs[{i}]"), &item?)).collect()
}

/// Integers in one dimension: any DLPack object of type int64 or int32, or a list.
pub(crate) fn numbers(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if is_tensor(value) {
        return integers(value.py(), what, &Tensor::new(what, value, 1, "[n]")?);
    }
    let wrong = || wrong_type(what, value, "a one-dimensional array or list of ints");
    if value.is_instance_of::<PyString>() {
        return Err(wrong());
    }
    let one = |(i, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let item = item?;
        exact(&item).map_or_else(|| integer(&format!("{what}[{i}]"), &item), Ok)
    };
    value.try_iter().map_err(|_| wrong())?.enumerate().map(one).collect()
}

/// Numbers of rows, from 0 on.
pub(crate) fn rows(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let one = |(i, number): (usize, i64)| {
        let wrong =
            |_| raise(value.py(), &Error::argument(format!("{what}[{i}]"), number, "a row from 0 on"));
        usize::try_from(number).map_err(wrong)
    };
    numbers(what, value)?.into_iter().enumerate().map(one).collect()
}

/// `[rows, columns]` bools: any DLPack object of type bool, or nested lists.
pub(crate) fn mask(
    value: Option<&Bound<'_, PyAny>>,
    rows: usize,
    columns: usize,
) -> PyResult<Option<Vec<bool>>> {
    let Some(value) = value else { return Ok(None) };
    let py = value.py();
    let (shape, flat) = if is_tensor(value) {
        let tensor = Tensor::new("mask", value, 2, "[B, T]")?;
        if !tensor.dtype().matches(DLDataType::BOOL) {
            return Err(raise(py, &Error::dtype("mask", tensor.dtype_name(), "bool")));
        }
        (tensor.shape().to_vec(), tensor.elements(|[byte]| byte != 0))
    } else {
        let nested: Vec<Vec<bool>> = value
            .extract()
            .map_err(|_| wrong_type("mask", value, "a bool tensor [B, T] or nested lists of bools"))?;
        (shape_of("mask", py, &nested)?, nested.concat())
    };
    check_shape(py, "mask", &shape, rows, columns)?;
    Ok(Some(flat))
}

/// `[rows, columns]` positions: any DLPack object of type int64 or int32, or nested lists.
pub(crate) fn positions(
    value: Option<&Bound<'_, PyAny>>,
    rows: usize,
    columns: usize,
) -> PyResult<Option<Vec<i64>>> {
    let Some(value) = value else { return Ok(None) };
    let py = value.py();
    let (shape, flat) = if is_tensor(value) {
        let tensor = Tensor::new("positions", value, 2, "[B, T]")?;
        (tensor.shape().to_vec(), integers(py, "positions", &tensor)?)
    } else {
        let allowed = "an int64 tensor [B, T] or nested lists of ints";
        let nested: Vec<Vec<i64>> = value.extract().map_err(|_| wrong_type("positions", value, allowed))?;
        (shape_of("positions", py, &nested)?, nested.concat())
    };
    check_shape(py, "positions", &shape, rows, columns)?;
    Ok(Some(flat))
}

/// One list of positions per head.
pub(crate) fn positions_per_head(value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<i64>>> {
    let Ok(items) = value.try_iter() else {
        return Err(wrong_type("positions", value, "a list with one array of ints per head"));
    };
    let one = |(i, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let (item, what) = (item?, format!("positions[{i}]"));
        if is_tensor(&item) {
            return integers(item.py(), &what, &Tensor::new(&what, &item, 1, "[tokens]")?);
        }
        item.extract().map_err(|_| wrong_type(&what, &item, "a one-dimensional array or list of ints"))
    };
    items.enumerate().map(one).collect()
}

/// `[heads]` floats: any DLPack object of a float type, or a list.
pub(crate) fn sink_logits(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<f32>>> {
    value.map(|value| vector("sink_logits", "[Hq]", value)).transpose()
}

/// Floats in one dimension: any DLPack object of a float type, or a list.
pub(crate) fn vector(what: &str, shape: &'static str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    if is_tensor(value) {
        return floats(value.py(), what, &Tensor::new(what, value, 1, shape)?);
    }
    let allowed = format!("a float tensor {shape} or a list of floats");
    value.extract().map_err(|_| wrong_type(what, value, &allowed))
}

/// One constant per layer: `None`, or a list of `None` and float tensors `[heads, dim]`.
pub(crate) fn constants(
    what: &str,
    value: Option<&Bound<'_, PyAny>>,
) -> PyResult<Option<Vec<Option<Vec<f32>>>>> {
    let Some(value) = value else { return Ok(None) };
    let Ok(items) = value.try_iter() else {
        return Err(wrong_type(what, value, "a list with one float array [heads, dim] or None a layer"));
    };
    let one = |(i, item): (usize, PyResult<Bound<'_, PyAny>>)| {
        let (item, what) = (item?, format!("{what}[{i}]"));
        if item.is_none() {
            return Ok(None);
        }
        floats(item.py(), &what, &Tensor::new(&what, &item, 2, "[heads, dim]")?).map(Some)
    };
    items.enumerate().map(one).collect::<PyResult<_>>().map(Some)
}

/// Named float arrays of any dimensions.
pub(crate) fn arrays(what: &str, value: &Bound<'_, PyDict>) -> PyResult<Arrays> {
    let one = |(name, item): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let name: String = name.extract()?;
        let label = format!("{what}[{name:?}]");
        let rank = item.getattr("ndim").and_then(|rank| rank.extract::<usize>());
        let rank = rank.map_err(|_| wrong_type(&label, &item, "a float array"))?;
        let tensor = Tensor::new(&label, &item, rank, "of any size")?;
        let numbers = floats(item.py(), &label, &tensor)?;
        let array = Array::new(&label, tensor.shape().to_vec(), numbers.into());
        Ok((name, array.map_err(|e| raise(item.py(), &e))?))
    };
    value.iter().map(one).collect()
}

/// A number of bytes: `None`, an int, or text like "2GiB", "512 MiB", "1.5GB".
pub(crate) fn capacity(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
    let allowed = "None, a number of bytes above 0, or text like 2GiB, 512MiB, 1.5GB";
    value.map(|value| size("capacity", value, allowed, bytes_of)).transpose()
}

/// A number of bytes as budgets have it: an int, or text with a unit.
pub(crate) fn size_of(what: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    let read = |text: &str| match text.parse() {
        Ok(Budget::Bytes(bytes)) => Some(bytes),
        _ => None,
    };
    size(what, value, "a number of bytes above 0, or text like 64MiB", read)
}

fn size(
    what: &str,
    value: &Bound<'_, PyAny>,
    allowed: &str,
    read: impl Fn(&str) -> Option<u64>,
) -> PyResult<u64> {
    let wrong = |got: String| raise(value.py(), &Error::argument(what, got, allowed));
    if let Ok(text) = value.cast::<PyString>() {
        let text = text.to_string();
        return read(&text).ok_or_else(|| wrong(format!("{text:?}")));
    }
    match value.extract::<i128>() {
        Ok(_) if value.is_instance_of::<PyBool>() => Err(wrong_type(what, value, allowed)),
        Ok(number) => match u64::try_from(number) {
            Ok(bytes) if bytes > 0 => Ok(bytes),
            _ => Err(wrong(number.to_string())),
        },
        Err(_) => Err(wrong_type(what, value, allowed)),
    }
}

fn is_tensor(value: &Bound<'_, PyAny>) -> bool {
    value.hasattr(intern!(value.py(), "__dlpack__")).unwrap_or(false)
        || value.is_instance_of::<pyo3::types::PyCapsule>()
}

fn shape_of<T>(what: &str, py: Python<'_>, nested: &[Vec<T>]) -> PyResult<Vec<usize>> {
    let columns = nested.first().map_or(0, Vec::len);
    if nested.iter().any(|row| row.len() != columns) {
        return Err(raise(py, &Error::shape(what, "of rows of different lengths", "[B, T]")));
    }
    Ok(vec![nested.len(), columns])
}

fn check_shape(py: Python<'_>, what: &str, shape: &[usize], rows: usize, columns: usize) -> PyResult<()> {
    if shape == [rows, columns] {
        return Ok(());
    }
    Err(raise(py, &Error::shape(what, format!("{shape:?}"), format!("[B, T] = [{rows}, {columns}]"))))
}

fn integers(py: Python<'_>, what: &str, tensor: &Tensor) -> PyResult<Vec<i64>> {
    match tensor.dtype() {
        d if d.matches(DLDataType::I64) => Ok(tensor.elements(i64::from_ne_bytes)),
        d if d.matches(DLDataType::I32) => Ok(tensor.elements(|b| i64::from(i32::from_ne_bytes(b)))),
        _ => Err(raise(py, &Error::dtype(what, tensor.dtype_name(), "int64, int32"))),
    }
}

fn floats(py: Python<'_>, what: &str, tensor: &Tensor) -> PyResult<Vec<f32>> {
    Ok(match tensor.float(py, what)? {
        Dtype::F32 => tensor.elements(f32::from_ne_bytes),
        Dtype::F16 => tensor.elements(|b| f16::from_ne_bytes(b).to_f32()),
        Dtype::Bf16 => tensor.elements(|b| bf16::from_ne_bytes(b).to_f32()),
    })
}
