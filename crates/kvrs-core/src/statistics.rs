//! What a policy may ask to know about attention: sums over queries of the probability that each token received.

use serde::{Deserialize, Serialize};

/// How the query heads of a group become one number per key-value head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// The mean over the group.
    #[default]
    Mean,
    /// The largest of the group.
    Max,
    /// The sum over the group.
    Sum,
}

/// What of each query, once its group has been reduced, is added to a token's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fold {
    /// The probability itself.
    #[default]
    Sum,
    /// 1 if the probability is above `1 / visible`, that of a query that attends to all it sees alike.
    Above,
    /// The probability, of the last query alone.
    Last,
}

/// Which queries are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Queries {
    /// Every query, from the first of the prompt on.
    #[default]
    All,
    /// The last ones of the prompt; a policy that acts again later goes on with every query after it.
    Last(usize),
}

/// Numbers of attention, one per key-value head and kept token.
///
/// For each query the group is reduced first; the queries are then folded in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Attention {
    /// What of each query is added.
    pub fold: Fold,
    /// How the query heads of a group become one.
    pub reduce: Reduce,
    /// Which queries count.
    pub queries: Queries,
}

/// The point from which the distance of each value is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Centre {
    /// The values' mean weighted by the policy's attention, which is the attention output.
    Output,
    /// The plain mean of the kept values.
    Mean,
}

/// What a policy asks to know, one number per key-value head and kept token each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Needs {
    /// Attention that the token received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<Attention>,
    /// Euclidean norm of the token's key.
    pub key_norms: bool,
    /// Euclidean distance of the token's value from a centre.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distances: Option<Centre>,
}

impl Needs {
    /// Whether keys and values alone do not suffice: `append` must be given the queries.
    #[must_use]
    pub fn queries(&self) -> bool {
        self.attention.is_some()
    }
}
