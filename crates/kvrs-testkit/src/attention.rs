//! Attention of one query in f64: what every backend's output is compared with.

/// The tokens of one head.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// Keys `[tokens][key_dim]`.
    pub keys: Vec<Vec<f32>>,
    /// Values `[tokens][value_dim]`.
    pub values: Vec<Vec<f32>>,
    /// Index of each token.
    pub indices: Vec<usize>,
}

/// How scores are made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scoring {
    /// Factor on scores; `None`: `key_dim ** -0.5`.
    pub scale: Option<f32>,
    /// `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// One more logit, without a value.
    pub sink_logit: Option<f32>,
    /// A key is seen if it is less than this far behind the query.
    pub sliding: Option<usize>,
}

/// The answer of one head to one query.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The weighted sum `[value_dim]`; zeros if the query sees nothing.
    pub out: Vec<f64>,
    /// Natural logarithm of the sum of the exponentials; -inf if the query sees nothing.
    pub lse: f64,
    /// Largest magnitude of a score.
    pub largest: f64,
}

impl Head {
    /// Adds a token.
    pub fn push(&mut self, index: usize, key: Vec<f32>, value: Vec<f32>) {
        self.indices.push(index);
        self.keys.push(key);
        self.values.push(value);
    }

    /// The answer to a query that stands at index `at`, causally; `None`: it sees everything.
    #[must_use]
    pub fn attend(&self, query: &[f32], at: Option<usize>, value_dim: usize, scoring: Scoring) -> Answer {
        let seen: Vec<usize> = (0..self.indices.len())
            .filter(|&i| at.is_none_or(|at| self.indices[i] <= at))
            .filter(|&i| scoring.sliding.is_none_or(|s| at.is_none_or(|at| at - self.indices[i] < s)))
            .collect();
        let scale = scoring.scale.map_or((query.len() as f64).sqrt().recip(), f64::from);
        let score = |i: &usize| {
            let dot: f64 = query.iter().zip(&self.keys[*i]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            scoring.softcap.map_or(dot * scale, |cap| f64::from(cap) * (dot * scale / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let largest = scores.iter().fold(0.0f64, |m, s| m.max(s.abs()));
        if seen.is_empty() {
            return Answer { out: vec![0.0; value_dim], lse: f64::NEG_INFINITY, largest };
        }
        let sink = scoring.sink_logit.map_or(f64::NEG_INFINITY, f64::from);
        let top = scores.iter().copied().fold(sink, f64::max);
        let total: f64 = (sink - top).exp() + scores.iter().map(|s| (s - top).exp()).sum::<f64>();
        let mut out = vec![0.0; value_dim];
        for (i, score) in seen.iter().zip(&scores) {
            let weight = (score - top).exp() / total;
            out.iter_mut().zip(&self.values[*i]).for_each(|(o, v)| *o += weight * f64::from(*v));
        }
        Answer { out, lse: total.ln() + top, largest }
    }
}

/// The error that f32 arithmetic may make, relative to the largest output: `1e-5 + 4 * 2^-23 * max |logit|`.
#[must_use]
pub fn tolerance(largest_logit: f64) -> f64 {
    1e-5 + 4.0 * f64::from(f32::EPSILON) * largest_logit
}

/// Largest difference of two outputs over the largest magnitude of the expected one.
#[must_use]
pub fn relative_error(got: &[f32], expected: &[f64]) -> f64 {
    let size = expected.iter().fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
    let pairs = got.iter().zip(expected);
    let worst = pairs
        .map(|(g, e)| (f64::from(*g) - e).abs())
        .fold(0.0, |m: f64, x| if x > m || x.is_nan() { x } else { m });
    worst / size
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let mut head = Head::default();
        for i in 0..4 {
            head.push(i, vec![i as f32, 0.0], vec![i as f32]);
        }
        head
    }

    #[test]
    fn a_zero_query_gives_the_mean_of_what_it_sees() {
        let all = head().attend(&[0.0, 0.0], Some(2), 1, Scoring::default());
        assert!((all.out[0] - 1.0).abs() < 1e-12 && (all.lse - 3f64.ln()).abs() < 1e-12);
        let near = head().attend(&[0.0, 0.0], Some(3), 1, Scoring { sliding: Some(2), ..Scoring::default() });
        assert!((near.out[0] - 2.5).abs() < 1e-12);
        let sink =
            head().attend(&[0.0, 0.0], Some(2), 1, Scoring { sink_logit: Some(0.0), ..Scoring::default() });
        assert!((sink.out[0] - 0.75).abs() < 1e-12 && (sink.lse - 4f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn a_query_that_sees_nothing_gives_zeros() {
        let answer = Head::default().attend(&[1.0, 0.0], Some(0), 1, Scoring::default());
        assert_eq!((answer.out, answer.lse), (vec![0.0], f64::NEG_INFINITY));
    }

    #[test]
    fn nan_is_an_error_and_not_a_match() {
        assert!(relative_error(&[f32::NAN], &[1.0]).is_nan());
    }
}
