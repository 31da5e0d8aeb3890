//! Scores from the caller's own function.

use super::{
    Attention, BUDGET, Centre, Entry, Facts, MAX_QUERIES, Method, Needs, Parameter, Queries, When,
    check_range,
};
use crate::budget::Budget;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "custom",
    paper: "the caller's own",
    parameters: &[
        BUDGET,
        Parameter { name: "needs", allowed: "attention, key_norms, distances", default: Some("{}") },
    ],
};

/// Keeps the tokens that the caller's function scores highest, at the end of the prompt.
///
/// The function is no part of a plan: whoever runs the plan calls it with the [`Facts`] that other policies get.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Custom {
    /// How many tokens are kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// What the function asks to know.
    pub needs: Needs,
}

impl Method for Custom {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        self.needs
    }

    fn when(&self) -> When {
        When::PromptEnd
    }

    fn check(&self, field: &str) -> Result<()> {
        let (field, attention) = (format!("{field}.needs"), self.needs.attention);
        if let Some(Attention { queries: Queries::Last(n), .. }) = attention {
            check_range(&field, "attention.queries.last", n, 1..=MAX_QUERIES)?;
        }
        if self.needs.distances == Some(Centre::Output) && attention.is_none() {
            let allowed = "mean, or output together with attention";
            return Err(Error::plan(format!("{field}.distances"), "output", allowed));
        }
        Ok(())
    }

    fn scores(&self, _: &Facts<'_>) -> Vec<f32> {
        panic!("the scores of a custom policy come from the caller's function")
    }

    fn weights(&self, facts: &Facts<'_>) -> Vec<f32> {
        super::caote::centre_weights(self.needs.distances, facts.tokens.len(), facts.attention)
    }
}
