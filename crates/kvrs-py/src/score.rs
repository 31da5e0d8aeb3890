//! The caller's own scores: from the store back into Python, at the end of a prompt.
//!
//! The store calls the function in the thread of the call that ends the prompt, while it holds the lock of a
//! sequence. No thread waits for such a lock with the GIL held, so taking the GIL here cannot lock up; the function
//! using a store itself could, and is refused.

use crate::args;
use crate::array::Buffer;
use crate::errors::exception;
use kvrs::policy::{Facts, PolicySpec};
use kvrs::{Error, ScoreFn};
use pyo3::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

thread_local! {
    /// What a function raised, on its way past the store.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether this thread runs a function.
    static RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// The functions of a plan's `Custom` policies as one; `None` if it has none.
pub(crate) fn of_plan(native: &kvrs::Plan, plan: &Bound<'_, PyAny>) -> PyResult<Option<Arc<ScoreFn>>> {
    let Ok(evict) = plan.getattr("evict") else { return Ok(None) };
    let mut functions = HashMap::new();
    for (layer, policy) in native.spec().evict.iter().enumerate() {
        if matches!(policy, Some(PolicySpec::Custom(_))) {
            functions.insert(layer, evict.get_item(layer)?.getattr("call")?.unbind());
        }
    }
    if functions.is_empty() {
        return Ok(None);
    }
    Ok(Some(Arc::new(move |facts: &Facts<'_>| {
        let function = functions.get(&facts.layer).expect("the layer's policy is the caller's own");
        Python::attach(|py| {
            RUNNING.set(true);
            let scores = call(function.bind(py), facts);
            RUNNING.set(false);
            scores.map_err(|error| {
                let text = error.to_string();
                RAISED.set(Some(error));
                Error::argument("score", text, "a function that returns")
            })
        })
    })))
}

fn call(function: &Bound<'_, PyAny>, facts: &Facts<'_>) -> PyResult<Vec<f32>> {
    let py = function.py();
    let tokens: Vec<i64> = facts.tokens.iter().map(|&index| index as i64).collect();
    let floats =
        |x: &[f32]| (!x.is_empty()).then(|| Buffer::floats(x, &[x.len()]).into_numpy(py)).transpose();
    let scores = function.call1((
        facts.layer,
        facts.head,
        Buffer::integers(&tokens).into_numpy(py)?,
        facts.prefix,
        floats(facts.attention)?,
        floats(facts.key_norms)?,
        floats(facts.distances)?,
    ))?;
    args::vector("score", "[tokens]", &scores)
}

/// The exception that a function raised in this thread, if the store has just failed for it.
pub(crate) fn raised() -> Option<PyErr> {
    RAISED.take()
}

/// Refuses the use of a store inside of a function that scores.
pub(crate) fn check_outside(py: Python<'_>) -> PyResult<()> {
    if RUNNING.get() {
        let text = "a store is used inside of a score function; allowed: arrays of the kvrs.Facts only";
        return Err(exception(py, "KVError", text));
    }
    Ok(())
}
