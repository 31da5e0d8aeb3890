//! H2O (Zhang et al., 2023, arXiv:2306.14048): heavy hitters of accumulated attention, and the newest tokens.

use super::{Attention, BUDGET, Entry, Facts, Fold, Method, Needs, Queries, Reduce, When};
use crate::budget::Budget;
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry =
    Entry { name: "h2o", paper: "Zhang et al., 2023, arXiv:2306.14048", parameters: &[BUDGET] };

/// Keeps the tokens with the largest sum of attention over all queries so far; half of the budget is for the newest.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct H2o {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

impl Method for H2o {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        let attention = Attention { fold: Fold::Sum, reduce: Reduce::Mean, queries: Queries::All };
        Needs { attention: Some(attention), ..Needs::default() }
    }

    fn when(&self) -> When {
        When::EveryGroup
    }

    fn own_recent(&self, budget: usize) -> usize {
        budget / 2
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.attention.to_vec()
    }
}
