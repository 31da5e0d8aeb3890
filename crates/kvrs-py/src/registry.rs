//! The catalogues: what a plan may name.

use crate::errors::raise;
use crate::plan::{json, parse};
use kvrs::policy::{PolicySpec, entries};
use kvrs::{CodecSpec, Error, ModelShape, quant};
use pyo3::prelude::*;
use serde_json::{Value, json};

/// Checks the parameters of a codec, given as JSON.
#[pyfunction]
pub(crate) fn check_codec(py: Python<'_>, spec: &str) -> PyResult<()> {
    let spec: CodecSpec = parse(py, "codec", spec)?;
    quant::check(&spec).map_err(|error| raise(py, &error))
}

/// Checks the shape of a model, given as JSON.
#[pyfunction]
pub(crate) fn check_shape(py: Python<'_>, shape: &str) -> PyResult<()> {
    let shape: ModelShape = parse(py, "shape", shape)?;
    shape.validate().map_err(|error| raise(py, &error))
}

/// Checks the parameters of a policy, given as JSON, and returns all of them; a budget may be missing.
#[pyfunction]
pub(crate) fn check_policy(py: Python<'_>, spec: &str) -> PyResult<String> {
    let value: Value = parse(py, "policy", spec)?;
    checked(&value).map(|spec| json(&spec)).map_err(|error| raise(py, &error))
}

/// The codecs of this version.
#[pyfunction]
pub(crate) fn codecs() -> Vec<&'static str> {
    quant::entries().iter().map(|entry| entry.name).collect()
}

/// The policies of this version.
#[pyfunction]
pub(crate) fn policies() -> Vec<&'static str> {
    entries().iter().map(|entry| entry.name).collect()
}

fn checked(value: &Value) -> kvrs::Result<PolicySpec> {
    let name = value["name"].as_str().unwrap_or_default();
    let spec = policy(name, value)?;
    let complete = match spec.budget() {
        Some(_) => spec.clone(),
        None => policy(name, &with_budget(value))?,
    };
    complete.validate_as(name, 0, 0).map(|()| spec)
}

/// A policy of JSON that stands at `field`; the error names the parameter that is wrong.
fn policy(field: &str, value: &Value) -> kvrs::Result<PolicySpec> {
    let error = match serde_json::from_value(value.clone()) {
        Ok(spec) => return Ok(spec),
        Err(error) => error,
    };
    let name = value["name"].as_str().unwrap_or_default();
    let Some(entry) = entries().iter().find(|entry| entry.name == name) else {
        let names: Vec<_> = entries().iter().map(|entry| entry.name).collect();
        return Err(Error::plan("policy", format!("{name:?}"), names.join(", ")));
    };
    for (key, param) in value["params"].as_object().into_iter().flatten() {
        let place = format!("{field}.{key}");
        let Some(parameter) = entry.parameters.iter().find(|parameter| parameter.name == key) else {
            let names: Vec<_> = entry.parameters.iter().map(|parameter| parameter.name).collect();
            return Err(Error::plan(place, "not a parameter", names.join(", ")));
        };
        if key == "scores" {
            policy(&place, param)?;
        } else if serde_json::from_value::<PolicySpec>(json!({"name": name, "params": {key: param}})).is_err()
        {
            return Err(Error::plan(place, param, parameter.allowed));
        }
    }
    Err(Error::plan(field, error, "the parameters of this version"))
}

/// The policy with the largest budget where one can stand, so that everything else can be checked.
fn with_budget(value: &Value) -> Value {
    let mut value = value.clone();
    let wraps = ["caote", "adakv", "entropy"].iter().any(|name| value["name"] == *name);
    let params = &mut value["params"];
    if wraps {
        let scores = params.get("scores").cloned().unwrap_or_else(|| json!({"name": "snapkv", "params": {}}));
        params["scores"] = with_budget(&scores);
    } else {
        params["budget"] = json!(u32::MAX);
    }
    value
}
