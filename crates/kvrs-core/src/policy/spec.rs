//! Names and settings of policies, as they stand in plans.

use super::{
    Caote, Custom, Facts, H2o, KNorm, Method, Needs, Random, Scissorhands, SnapKv, StreamingLlm, Tova, When,
};
use crate::budget::{AdaKv, Budget, Entropy, PyramidKv, Sharing};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// A policy with its settings, written `{"name": "snapkv", "params": {"budget": 1024}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", content = "params", rename_all = "lowercase", deny_unknown_fields)]
pub enum PolicySpec {
    /// Sinks and the newest tokens.
    StreamingLlm(StreamingLlm),
    /// Heavy hitters of accumulated attention and the newest tokens.
    H2o(H2o),
    /// Tokens that were often above average, dropped in batches.
    Scissorhands(Scissorhands),
    /// A vote of the prompt's last queries.
    SnapKv(SnapKv),
    /// Attention of the last query.
    Tova(Tova),
    /// Small keys stay.
    KNorm(KNorm),
    /// Change of the output if a token went, on top of another policy's attention.
    Caote(Caote),
    /// The baseline.
    Random(Random),
    /// Scores from the caller.
    Custom(Custom),
    /// Lower layers get more.
    PyramidKv(PyramidKv),
    /// Heads of a layer share by score.
    AdaKv(AdaKv),
    /// Heads of a layer share by the entropy of their attention.
    Entropy(Entropy),
}

impl PolicySpec {
    pub(crate) fn method(&self) -> &dyn Method {
        match self {
            Self::StreamingLlm(method) => method,
            Self::H2o(method) => method,
            Self::Scissorhands(method) => method,
            Self::SnapKv(method) => method,
            Self::Tova(method) => method,
            Self::KNorm(method) => method,
            Self::Caote(method) => method,
            Self::Random(method) => method,
            Self::Custom(method) => method,
            Self::PyramidKv(method) => method,
            Self::AdaKv(method) => method,
            Self::Entropy(method) => method,
        }
    }

    /// Its name in plans.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.method().entry().name
    }

    /// What the policy asks to know.
    #[must_use]
    pub fn needs(&self) -> Needs {
        self.method().needs()
    }

    /// When the policy acts.
    #[must_use]
    pub fn when(&self) -> When {
        self.method().when()
    }

    /// How a layer's budget is divided.
    #[must_use]
    pub fn sharing(&self) -> Sharing {
        self.method().sharing()
    }

    /// The budget, its own or that of the policy it wraps.
    #[must_use]
    pub fn budget(&self) -> Option<Budget> {
        let method = self.method();
        method.own_budget().or_else(|| method.wrapped().and_then(Self::budget))
    }

    /// Newest tokens that are never dropped, of a budget of `budget` tokens and with `recent` of the plan.
    #[must_use]
    pub fn recent(&self, budget: usize, recent: usize) -> usize {
        self.method().own_recent(budget).max(recent)
    }

    /// Tokens of a budget of `budget` tokens that are not chosen by score: the sinks and the newest.
    #[must_use]
    pub fn protected(&self, budget: usize, sinks: usize, recent: usize) -> usize {
        sinks + self.recent(budget, recent)
    }

    /// Tokens that are left of `kept` when the policy acts after the prompt, which it does when more than the budget of
    /// `budget` tokens are kept; at the end of the prompt the whole budget is left.
    #[must_use]
    pub fn left(&self, budget: usize, kept: usize) -> usize {
        match self.when() {
            When::Batches => budget.min(kept.saturating_sub(Scissorhands::batch(budget))),
            When::PromptEnd | When::EveryGroup => budget.min(kept),
        }
    }

    /// Fewest tokens that a budget must have: what is protected, and one more.
    #[must_use]
    pub fn least_budget(&self, sinks: usize, recent: usize) -> usize {
        let mut least = sinks + recent + 1;
        // A share of the budget may be protected, so that the bound moves with it; it grows by less than the budget.
        while least <= self.protected(least, sinks, recent) {
            least = self.protected(least, sinks, recent) + 1;
        }
        least
    }

    /// Scores `[kept]` of the kept tokens of a head; the higher, the better kept.
    ///
    /// # Panics
    /// If an array that [`PolicySpec::needs`] asks for has another length than the indices, or if the policy is
    /// [`Custom`], whose scores come from the caller's function.
    #[must_use]
    pub fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.check(self.needs());
        self.method().scores(facts)
    }

    /// Weights `[kept]`, of sum 1, of the values whose mean is the centre of [`Facts::distances`], which need not be
    /// known for it; empty unless [`Needs::distances`] asks for one.
    ///
    /// # Panics
    /// If the attention has another length than the indices.
    #[must_use]
    pub fn weights(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.check(Needs { distances: None, ..self.needs() });
        self.method().weights(facts)
    }

    /// Checks the settings for a plan that keeps `sinks` first and `recent` last tokens.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field (`evict.kernel`, `evict.scores.window`), the value and what is allowed.
    pub fn validate(&self, sinks: usize, recent: usize) -> Result<()> {
        self.validate_as("evict", sinks, recent)
    }

    /// As [`PolicySpec::validate`], for a policy that stands in the plan at `field`.
    ///
    /// # Errors
    /// As [`PolicySpec::validate`].
    pub fn validate_as(&self, field: &str, sinks: usize, recent: usize) -> Result<()> {
        self.method().check(field)?;
        let at = self.budget_field(field);
        let budget = self.budget().ok_or_else(|| Error::plan(&at, "missing", super::BUDGET.allowed))?;
        budget.validate(&at, self.least_budget(sinks, recent))
    }

    /// Where the budget stands.
    fn budget_field(&self, field: &str) -> String {
        match (self.method().own_budget(), self.method().wrapped()) {
            (None, Some(wrapped)) => wrapped.budget_field(&format!("{field}.scores")),
            _ => format!("{field}.budget"),
        }
    }
}

impl std::fmt::Display for PolicySpec {
    /// The name and the budget, like `snapkv(1024)` or `adakv(snapkv(0.25))`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let method = self.method();
        write!(f, "{}(", self.name())?;
        match (method.own_budget(), method.wrapped()) {
            (Some(budget), Some(wrapped)) => write!(f, "{budget}, {}", wrapped.name())?,
            (Some(budget), None) => write!(f, "{budget}")?,
            (None, Some(wrapped)) => write!(f, "{wrapped}")?,
            (None, None) => {}
        }
        f.write_str(")")
    }
}

impl Facts<'_> {
    fn check(&self, needs: Needs) {
        let n = self.tokens.len();
        assert!(self.prefix <= n, "a prefix of {} of {n} tokens", self.prefix);
        let arrays = [
            ("attention", needs.attention.is_some(), self.attention),
            ("key_norms", needs.key_norms, self.key_norms),
            ("distances", needs.distances.is_some(), self.distances),
        ];
        for (name, asked, array) in arrays {
            assert!(!asked || array.len() == n, "{} numbers of {name} for {n} tokens", array.len());
        }
    }
}
