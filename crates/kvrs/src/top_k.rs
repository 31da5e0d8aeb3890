//! Which scores of a query count.

use crate::plan::PlanSpec;
use kvrs_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Another attention than over all kept tokens, as it stands in a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name", content = "params", rename_all = "lowercase", deny_unknown_fields)]
pub enum AttendSpec {
    /// Top-k attention (Gupta et al., 2021, arXiv:2106.06899 section 2): every query head of a token keeps its `k`
    /// largest scores, and only those values are read. Nothing is evicted.
    TopK {
        /// Scores kept, 1 or more; equal scores go to the earlier token.
        k: usize,
    },
}

impl AttendSpec {
    /// Scores that a query keeps.
    pub(crate) fn top_k(&self) -> usize {
        let Self::TopK { k } = self;
        *k
    }
}

pub(crate) fn validate(spec: &PlanSpec) -> Result<()> {
    match spec.attend.as_ref().map(AttendSpec::top_k) {
        Some(0) => Err(Error::plan("attend.k", 0, "1 or more")),
        _ => Ok(()),
    }
}
