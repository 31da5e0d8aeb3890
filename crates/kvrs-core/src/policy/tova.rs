//! TOVA (Oren et al., 2024, arXiv:2401.06104): what the last query attends to.

use super::{Attention, BUDGET, Entry, Facts, Fold, Method, Needs, Queries, Reduce, When};
use crate::budget::Budget;
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry =
    Entry { name: "tova", paper: "Oren et al., 2024, arXiv:2401.06104", parameters: &[BUDGET] };

/// Keeps the tokens with the largest attention of the last query.
///
/// The paper takes the mean over all heads of a layer; here it is that of a key-value head's own group, so that heads
/// may keep different tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tova {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

impl Method for Tova {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        let attention = Attention { fold: Fold::Last, reduce: Reduce::Mean, queries: Queries::Last(1) };
        Needs { attention: Some(attention), ..Needs::default() }
    }

    fn when(&self) -> When {
        When::EveryGroup
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.attention.to_vec()
    }
}
