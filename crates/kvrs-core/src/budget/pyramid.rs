//! `PyramidKV` (Cai et al., 2024, arXiv:2406.02069): lower layers look wider, so they get more.

use super::{Budget, Sharing};
use crate::policy::{BUDGET, check_scores, default_scores};
use crate::policy::{Entry, Facts, Method, Parameter, PolicySpec, When};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Steepest pyramid: a product with a layer count and a budget stays far below 2^127.
const MAX_BETA: f64 = 1e6;

pub(crate) const ENTRY: Entry = Entry {
    name: "pyramidkv",
    paper: "Cai et al., 2024, arXiv:2406.02069",
    parameters: &[
        BUDGET,
        Parameter { name: "beta", allowed: "a number in [1, 1e6]", default: Some("20") },
        Parameter {
            name: "scores",
            allowed: "snapkv, h2o, tova, knorm, random, caote; without a budget, or with the same",
            default: Some("{\"name\": \"snapkv\", \"params\": {}}"),
        },
    ],
};

/// Divides the budget among the layers by [`pyramid()`]; which tokens go is said by another policy.
///
/// What is protected (sinks, newest tokens) is the same in all layers; the rest of the mean budget is the pyramid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PyramidKv {
    /// How many tokens a layer keeps on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// The mean over the last layer's share; 1 is uniform.
    pub beta: f64,
    /// Whose scores are taken.
    pub scores: Box<PolicySpec>,
}

impl Default for PyramidKv {
    fn default() -> Self {
        Self { budget: None, beta: 20.0, scores: Box::new(default_scores()) }
    }
}

impl Method for PyramidKv {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn wrapped(&self) -> Option<&PolicySpec> {
        Some(&self.scores)
    }

    fn when(&self) -> When {
        When::PromptEnd
    }

    fn check(&self, field: &str) -> Result<()> {
        check_scores(field, &self.scores, &["snapkv", "h2o", "tova", "knorm", "random", "caote"])?;
        if !(1.0..=MAX_BETA).contains(&self.beta) {
            return Err(Error::plan(format!("{field}.beta"), self.beta, "a number in [1, 1e6]"));
        }
        match (self.budget, self.scores.budget()) {
            (Some(own), Some(other)) if own != other => {
                let allowed = format!("none, or {own} as in {field}.budget");
                Err(Error::plan(format!("{field}.scores.budget"), other, allowed))
            }
            _ => Ok(()),
        }
    }

    fn sharing(&self) -> Sharing {
        Sharing::Pyramid { beta: self.beta }
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        self.scores.method().scores(facts)
    }
}

/// Tokens of each of `layers` layers, `mean` on average, of prompts with `prompt` tokens: falling in a straight line
/// from `2 mean - last` in the first layer to `last = max(1, mean / beta)` in the last.
///
/// If the first would have more than the prompt, it has the prompt and the line is flatter; `mean >= prompt` keeps
/// all. The sum is `layers * min(mean, prompt)` exactly: fractions are rounded by largest remainder, ties to the lower
/// layer.
///
/// # Errors
/// [`Error::Argument`] if `mean` is 0 or `beta` is outside [1, 1e6].
pub fn pyramid(mean: usize, layers: usize, prompt: usize, beta: f64) -> Result<Vec<usize>> {
    if !(1.0..=MAX_BETA).contains(&beta) {
        return Err(Error::argument("beta", beta, "a number in [1, 1e6]"));
    }
    if mean >= prompt {
        return Ok(vec![prompt; layers]);
    }
    if mean == 0 {
        return Err(Error::argument("the mean budget of the pyramid", "0 tokens", "at least 1"));
    }
    let (last, unit) = last_layer(mean as u128, prompt as u128, beta);
    let steps = (layers as u128).saturating_sub(1).max(1);
    // All in units of 1 / (unit * steps), so that remainders are compared exactly.
    let drop = 2 * (mean as u128 * unit - last);
    let (first, unit) = ((last + drop) * steps, unit * steps);
    let exact: Vec<u128> = match layers {
        1 => vec![mean as u128 * unit],
        _ => (0..layers as u128).map(|layer| first - drop * layer).collect(),
    };
    Ok(largest_remainder(&exact, unit, mean * layers))
}

/// The last layer's tokens as a fraction: numerator and denominator.
fn last_layer(mean: u128, prompt: u128, beta: f64) -> (u128, u128) {
    let (p, q) = fraction(beta);
    // mean / beta = mean q / p
    let (last, unit) = if mean * q < p { (1, 1) } else { (mean * q, p) };
    if 2 * mean * unit - last > prompt * unit { (2 * mean - prompt, 1) } else { (last, unit) }
}

/// A number in [1, 1e6] as an exact fraction whose denominator is a power of two.
fn fraction(x: f64) -> (u128, u128) {
    let (mut p, mut q) = (x, 1u128);
    while p.fract() != 0.0 {
        p *= 2.0;
        q *= 2;
    }
    (p as u128, q)
}

/// `exact / unit` rounded to whole numbers of sum `sum`: down, then up where the remainders are largest.
fn largest_remainder(exact: &[u128], unit: u128, sum: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = exact.iter().map(|x| (x / unit) as usize).collect();
    let mut order: Vec<usize> = (0..exact.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(exact[i] % unit));
    let missing = sum - counts.iter().sum::<usize>();
    order[..missing].iter().for_each(|&i| counts[i] += 1);
    counts
}
