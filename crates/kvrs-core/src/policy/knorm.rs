//! `KNorm` (Devoto et al., 2024, arXiv:2406.11430): tokens with small keys receive much attention.

use super::{BUDGET, Entry, Facts, Method, Needs, When};
use crate::budget::Budget;
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry =
    Entry { name: "knorm", paper: "Devoto et al., 2024, arXiv:2406.11430", parameters: &[BUDGET] };

/// Keeps the tokens with the smallest norm of the key.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KNorm {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

impl Method for KNorm {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        Needs { key_norms: true, ..Needs::default() }
    }

    fn when(&self) -> When {
        When::EveryGroup
    }

    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.key_norms.iter().map(|norm| -norm).collect()
    }
}
