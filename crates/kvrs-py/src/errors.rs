//! From `kvrs::Error` to the exception classes of `kvrs.errors`: why did my call raise that?

use kvrs::Error;
use pyo3::prelude::*;

/// The one match: a new variant of the error must get its Python class here.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::Argument { .. } => "ArgumentError",
        Error::Shape { .. } => "ShapeError",
        Error::DType { .. } => "DTypeError",
        Error::Device { .. } => "DeviceError",
        Error::Plan { .. } => "PlanError",
        Error::Sequence { .. } => "SequenceError",
        Error::Capacity { .. } => "CapacityError",
        Error::Format { .. } | Error::Io { .. } => "FormatError",
        Error::Internal(_) => "KVError",
    }
}

/// The Python exception of an error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    exception(py, class_of(error), &error.to_string())
}

/// An exception of the named class of `kvrs.errors`.
pub(crate) fn exception(py: Python<'_>, class: &str, message: &str) -> PyErr {
    let made = py.import("kvrs.errors").and_then(|m| m.getattr(class)).and_then(|c| c.call1((message,)));
    match made {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

/// An argument of a wrong Python type: a plain `TypeError` naming it, its value and what is allowed.
pub(crate) fn wrong_type(what: &str, value: &Bound<'_, PyAny>, allowed: &str) -> PyErr {
    let kind = value.get_type().name().map_or_else(|_| "object".to_owned(), |n| n.to_string());
    let shown = value.repr().map_or_else(|_| "?".to_owned(), |r| shorten(&r.to_string()));
    pyo3::exceptions::PyTypeError::new_err(format!("{what} is {shown} ({kind}); allowed: {allowed}"))
}

/// The first line of a text, at most 120 characters.
pub(crate) fn shorten(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    match line.char_indices().nth(120) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line.to_owned(),
    }
}
