//! `StreamingLLM` (Xiao et al., 2023, arXiv:2309.17453): the sinks and the newest tokens, at their own positions.

use super::{BUDGET, Entry, Facts, Method, When};
use crate::budget::Budget;
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry =
    Entry { name: "streamingllm", paper: "Xiao et al., 2023, arXiv:2309.17453", parameters: &[BUDGET] };

/// Keeps the sinks and the newest `budget - sinks` tokens.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamingLlm {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

impl Method for StreamingLlm {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn when(&self) -> When {
        When::EveryGroup
    }

    /// The place among the kept tokens: the newer, the better.
    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        (0..facts.tokens.len()).map(|i| i as f32).collect()
    }
}
