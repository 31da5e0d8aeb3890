//! Plans, as Python sees them: JSON for the settings, arrays for the constants.

use crate::args;
use crate::array::Buffer;
use crate::enter::enter;
use crate::errors::{raise, wrong_type};
use kvrs::{Error, LayerShape, PlanSpec};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;

/// A validated plan.
#[pyclass(frozen, module = "kvrs._kvrs")]
pub(crate) struct Plan(kvrs::Plan);

/// One constant a layer as arrays.
type Constants<'py> = Option<Vec<Option<Bound<'py, PyAny>>>>;

impl Plan {
    /// The plan of a `kvrs.Plan` or of this class.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<kvrs::Plan> {
        if let Ok(plan) = object.cast::<Self>() {
            return Ok(plan.get().0.clone());
        }
        let native = object.getattr("native").ok();
        match native.as_ref().and_then(|native| native.cast::<Self>().ok()) {
            Some(plan) => Ok(plan.get().0.clone()),
            None => Err(wrong_type("plan", object, "a kvrs.Plan")),
        }
    }

    fn constants<'py>(
        &self,
        py: Python<'py>,
        constants: Option<&Vec<Option<Vec<f32>>>>,
        dim: impl Fn(&LayerShape) -> usize,
    ) -> PyResult<Constants<'py>> {
        let Some(constants) = constants else { return Ok(None) };
        let one = |(values, layer): (&Option<Vec<f32>>, &LayerShape)| {
            let Some(values) = values else { return Ok(None) };
            Buffer::floats(values, &[layer.kv_heads, dim(layer)]).into_array(py).map(Some)
        };
        constants.iter().zip(&self.0.spec().shape.layers).map(one).collect::<PyResult<_>>().map(Some)
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (spec, key_offset=None, value_offset=None, arrays=None))]
    fn new(
        py: Python<'_>,
        spec: &str,
        key_offset: Option<&Bound<'_, PyAny>>,
        value_offset: Option<&Bound<'_, PyAny>>,
        arrays: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut spec: PlanSpec = parse(py, "spec", spec)?;
        spec.key_offset = args::constants("key_offset", key_offset)?;
        spec.value_offset = args::constants("value_offset", value_offset)?;
        if let (Some(calibration), Some(arrays)) = (&mut spec.calibration, arrays) {
            calibration.arrays = args::arrays("calibration.arrays", arrays)?;
        }
        enter(py, || kvrs::Plan::new(spec)).map(Self)
    }

    #[staticmethod]
    #[allow(clippy::needless_pass_by_value, reason = "extracted from Python by value")]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        enter(py, || kvrs::Plan::load(&path)).map(Self)
    }

    #[allow(clippy::needless_pass_by_value, reason = "extracted from Python by value")]
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        enter(py, || self.0.save(&path))
    }

    #[getter]
    fn hash(&self) -> &str {
        self.0.hash()
    }

    #[getter]
    fn spec(&self) -> String {
        json(self.0.spec())
    }

    #[getter]
    fn key_offset<'py>(&self, py: Python<'py>) -> PyResult<Constants<'py>> {
        self.constants(py, self.0.spec().key_offset.as_ref(), |layer| layer.key_dim)
    }

    #[getter]
    fn value_offset<'py>(&self, py: Python<'py>) -> PyResult<Constants<'py>> {
        self.constants(py, self.0.spec().value_offset.as_ref(), |layer| layer.value_dim)
    }

    /// The arrays of the calibration, by name.
    #[getter]
    fn arrays<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let arrays = PyDict::new(py);
        let found = self.0.spec().calibration.iter().flat_map(|calibration| &calibration.arrays);
        for (name, array) in found {
            arrays.set_item(name, Buffer::floats(&array.values, &array.shape).into_array(py)?)?;
        }
        Ok(arrays)
    }

    fn memory<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        batch: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tokens, batch) = (args::count("tokens", tokens)?, args::count("batch", batch)?);
        let memory = enter(py, || self.0.memory(tokens, batch))?;
        from_json(py, "Memory", &memory)
    }

    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let reports = enter(py, || Ok(self.0.describe()))?;
        reports.iter().map(|report| from_json(py, "LayerReport", report)).collect()
    }
}

/// An object of the named class of `kvrs.stats`.
pub(crate) fn from_json<'py>(
    py: Python<'py>,
    class: &str,
    value: &impl serde::Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    py.import("kvrs.stats")?.getattr(class)?.call_method1("from_json", (json(value),))
}

/// Settings from JSON; an unknown field or a wrong type is an error of the plan.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(py: Python<'_>, what: &str, text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|e| raise(py, &Error::plan(what, e, "the fields of this version")))
}

/// Plain data as JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("plain data has a JSON form")
}
