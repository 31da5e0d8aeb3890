//! How many bits each run of channels gets: pure functions of lists of numbers, for calibration.

use crate::args;
use crate::errors::{raise, wrong_type};
use kvrs::alloc::{Curve, Items, RateModel, exact, greedy, waterfill};
use kvrs::{Book, Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyString;

/// Bits of each item by marginal gain.
#[pyfunction]
#[pyo3(signature = (weights, channels, floors, budget, curve = None))]
pub(crate) fn allocate_greedy(
    weights: &Bound<'_, PyAny>,
    channels: &Bound<'_, PyAny>,
    floors: &Bound<'_, PyAny>,
    budget: &Bound<'_, PyAny>,
    curve: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u32>> {
    let curve = curve_of(weights.py(), curve)?;
    allocate(weights, channels, floors, budget, |items, budget| greedy(items, budget, &curve))
}

/// Bits of each item by reverse water-filling.
#[pyfunction]
pub(crate) fn allocate_waterfill(
    weights: &Bound<'_, PyAny>,
    channels: &Bound<'_, PyAny>,
    floors: &Bound<'_, PyAny>,
    budget: &Bound<'_, PyAny>,
) -> PyResult<Vec<u32>> {
    allocate(weights, channels, floors, budget, waterfill)
}

/// Bits of each item by dynamic programming.
#[pyfunction]
#[pyo3(signature = (weights, channels, floors, budget, curve = None))]
pub(crate) fn allocate_exact(
    weights: &Bound<'_, PyAny>,
    channels: &Bound<'_, PyAny>,
    floors: &Bound<'_, PyAny>,
    budget: &Bound<'_, PyAny>,
    curve: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u32>> {
    let curve = curve_of(weights.py(), curve)?;
    allocate(weights, channels, floors, budget, |items, budget| exact(items, budget, &curve))
}

/// `alpha` and `beta` of a quantiser's distortion `alpha * beta^-bits`, and the curve that they make.
#[pyfunction]
pub(crate) fn fit_rate(
    bits: &Bound<'_, PyAny>,
    distortion: &Bound<'_, PyAny>,
) -> PyResult<(f64, f64, Vec<f64>)> {
    let py = bits.py();
    let (bits, distortion) = (numbers("bits", bits)?, numbers("distortion", distortion)?);
    let model = RateModel::fit(&bits, &distortion).map_err(|error| raise(py, &error))?;
    let curve = model.curve().map_err(|error| raise(py, &error))?;
    Ok((model.alpha, model.beta, values(&curve)))
}

/// Distortion of a gaussian channel of unit variance at 0 to 8 bits.
#[pyfunction]
pub(crate) fn gaussian_distortion() -> Vec<f64> {
    values(&Curve::GAUSSIAN)
}

/// The values of the gaussian codebook, ascending.
#[pyfunction]
pub(crate) fn codebook(bits: &Bound<'_, PyAny>) -> PyResult<Vec<f32>> {
    let width = args::count("bits", bits)?;
    if !(1..=8).contains(&width) {
        return Err(raise(bits.py(), &Error::argument("bits", width, "1 to 8")));
    }
    let book = Book::gaussian(width as u32);
    Ok((0..1u16 << width).map(|code| book.value(code as u8)).collect())
}

fn allocate(
    weights: &Bound<'_, PyAny>,
    channels: &Bound<'_, PyAny>,
    floors: &Bound<'_, PyAny>,
    budget: &Bound<'_, PyAny>,
    by: impl FnOnce(&Items<'_>, u64) -> Result<Vec<u8>>,
) -> PyResult<Vec<u32>> {
    let py = weights.py();
    let weights = numbers("weights", weights)?;
    let (channels, floors) = (counts("channels", channels)?, counts("floors", floors)?);
    // Floors beyond a byte stay too large for the check that follows.
    let floors: Vec<u8> = floors.iter().map(|&bits| bits.min(u32::from(u8::MAX)) as u8).collect();
    let budget = args::count("budget", budget)? as u64;
    let widths = Items::new(&weights, &channels, &floors).and_then(|items| by(&items, budget));
    Ok(widths.map_err(|error| raise(py, &error))?.into_iter().map(u32::from).collect())
}

fn curve_of(py: Python<'_>, curve: Option<&Bound<'_, PyAny>>) -> PyResult<Curve> {
    let Some(curve) = curve else { return Ok(Curve::GAUSSIAN) };
    Curve::new(&numbers("curve", curve)?).map_err(|error| raise(py, &error))
}

fn values(curve: &Curve) -> Vec<f64> {
    (0..=kvrs::alloc::MOST_BITS).map(|bits| curve.at(bits)).collect()
}

fn numbers(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let wrong = || wrong_type(what, value, "a one-dimensional array or list of numbers");
    if value.is_instance_of::<PyString>() {
        return Err(wrong());
    }
    value.extract().map_err(|_| wrong())
}

fn counts(what: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let wrong = || wrong_type(what, value, "a one-dimensional array or list of ints from 0 on");
    value.extract().map_err(|_| wrong())
}
