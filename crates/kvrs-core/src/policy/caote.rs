//! CAOTE (Goel et al., 2025, arXiv:2504.14051): how much the attention output changes if a token goes.

use super::{Centre, Entry, Facts, Method, Needs, Parameter, PolicySpec, When, check_scores, default_scores};
use crate::Result;
use serde::{Deserialize, Serialize};

/// Least share of the attention that the other tokens must have in the formula.
const LEAST_REST: f64 = 1e-6;

pub(super) const ENTRY: Entry = Entry {
    name: "caote",
    paper: "Goel et al., 2025, arXiv:2504.14051",
    parameters: &[
        Parameter { name: "scores", allowed: "snapkv, h2o, tova", default: None },
        Parameter { name: "fast", allowed: "true, false", default: Some("false") },
    ],
};

/// Scores a token by `a / (1 - a) * ||o - v||`, with `a` its share of another policy's attention, `v` its value and
/// `o` the mean of the values by these shares: the length by which the output moves if the token alone goes.
///
/// It acts when the policy it wraps does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Caote {
    /// Whose attention is taken.
    pub scores: Box<PolicySpec>,
    /// `FastCAOTE`: the plain mean of the values stands for `o`.
    pub fast: bool,
}

impl Default for Caote {
    fn default() -> Self {
        Self { scores: Box::new(default_scores()), fast: false }
    }
}

impl Caote {
    fn centre(&self) -> Centre {
        if self.fast { Centre::Mean } else { Centre::Output }
    }
}

impl Method for Caote {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn wrapped(&self) -> Option<&PolicySpec> {
        Some(&self.scores)
    }

    fn needs(&self) -> Needs {
        Needs { distances: Some(self.centre()), ..self.scores.needs() }
    }

    fn when(&self) -> When {
        self.scores.when()
    }

    fn check(&self, field: &str) -> Result<()> {
        check_scores(field, &self.scores, &["snapkv", "h2o", "tova"])
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        let shares = shares(&self.scores.scores(facts));
        let change =
            |(a, &distance): (f64, &f32)| (a / (1.0 - a).max(LEAST_REST) * f64::from(distance)) as f32;
        shares.into_iter().zip(facts.distances).map(change).collect()
    }

    fn weights(&self, facts: &Facts<'_>) -> Vec<f32> {
        let attention = self.scores.scores(facts);
        centre_weights(Some(self.centre()), facts.tokens.len(), &attention)
    }
}

/// Weights of the values of `n` tokens whose mean is the centre.
pub(super) fn centre_weights(centre: Option<Centre>, n: usize, attention: &[f32]) -> Vec<f32> {
    match centre {
        None => Vec::new(),
        Some(Centre::Output) => shares(attention).into_iter().map(|a| a as f32).collect(),
        Some(Centre::Mean) => vec![1.0 / n as f32; n],
    }
}

/// `attention` as a distribution; if all of it is zero, every token has the same share.
fn shares(attention: &[f32]) -> Vec<f64> {
    let sum: f64 = attention.iter().map(|&a| f64::from(a)).sum();
    if sum > 0.0 {
        return attention.iter().map(|&a| f64::from(a) / sum).collect();
    }
    vec![1.0 / attention.len() as f64; attention.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Tova;

    fn caote(fast: bool) -> PolicySpec {
        PolicySpec::Caote(Caote { scores: Box::new(PolicySpec::Tova(Tova::default())), fast })
    }

    /// Distances `||o - v_j||` of `values [n][d]` from the centre with `weights`.
    fn distances(weights: &[f32], values: &[[f32; 2]]) -> Vec<f32> {
        let centre = [0, 1].map(|c| weights.iter().zip(values).map(|(w, v)| w * v[c]).sum::<f32>());
        values.iter().map(|v| (v[0] - centre[0]).hypot(v[1] - centre[1])).collect()
    }

    #[test]
    fn the_score_is_the_length_by_which_the_output_moves() {
        let attention = [0.5f32, 0.25, 0.125, 0.125];
        let values = [[1.0f32, 0.0], [0.0, 2.0], [-1.0, 1.0], [3.0, -2.0]];
        let policy = caote(false);
        let facts = Facts { tokens: &[0, 1, 2, 3], prefix: 4, attention: &attention, ..Facts::default() };
        let weights = policy.weights(&facts);
        assert_eq!(weights, attention);
        let distances = distances(&weights, &values);
        let scores = policy.scores(&Facts { distances: &distances, ..facts });
        for (j, score) in scores.iter().enumerate() {
            let without = |c: usize| {
                let rest = attention.iter().zip(&values).enumerate().filter(|&(i, _)| i != j);
                rest.map(|(_, (a, v))| a * v[c]).sum::<f32>() / (1.0 - attention[j])
            };
            let with = |c: usize| attention.iter().zip(&values).map(|(a, v)| a * v[c]).sum::<f32>();
            let change = (with(0) - without(0)).hypot(with(1) - without(1));
            assert!((score - change).abs() < 1e-6, "token {j}: {score} and {change}");
        }
    }

    #[test]
    fn the_fast_form_measures_from_the_plain_mean() {
        let facts = Facts { tokens: &[0, 1, 2], prefix: 3, attention: &[2.0, 1.0, 1.0], ..Facts::default() };
        let policy = caote(true);
        assert_eq!(policy.weights(&facts), [1.0 / 3.0; 3]);
        let scores = policy.scores(&Facts { distances: &[1.0, 3.0, 6.0], ..facts });
        assert_eq!(scores, [1.0, 1.0, 2.0], "shares 1/2, 1/4, 1/4");
    }

    #[test]
    fn a_token_with_all_the_attention_has_a_finite_score() {
        let facts = Facts { tokens: &[0, 1], prefix: 2, attention: &[1.0, 0.0], ..Facts::default() };
        let scores = caote(false).scores(&Facts { distances: &[2.0, 5.0], ..facts });
        assert_eq!(scores, [2e6, 0.0]);
        let nothing = Facts { attention: &[0.0, 0.0], distances: &[1.0, 2.0], ..facts };
        assert_eq!(caote(false).scores(&nothing), [1.0, 2.0], "equal shares where nothing was looked at");
    }
}
