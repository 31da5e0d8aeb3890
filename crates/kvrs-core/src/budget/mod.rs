//! How many tokens each layer and head keeps.
//!
//! A [`Budget`] becomes tokens per head with [`Budget::resolve`]; what of them is not protected is divided among
//! layers by [`Sharing::layers`], and among the heads of a layer by [`Sharing::counts`].

mod ada;
mod apportion;
mod entropy;
mod pyramid;
mod size;
#[cfg(test)]
mod tests;

pub use ada::{AdaKv, ada};
pub use apportion::apportion;
pub use entropy::{Entropy, entropy, entropy_of};
pub use pyramid::{PyramidKv, pyramid};
pub use size::{Budget, bytes_of};

pub(crate) use ada::ENTRY as ADAKV;
pub(crate) use entropy::ENTRY as ENTROPY;
pub(crate) use pyramid::ENTRY as PYRAMIDKV;

use crate::policy::{Parameter, select};
use crate::{Error, Result};
use std::ops::Range;

/// Policies whose scores compare across heads: they are made of attention, which sums to one per query.
pub(crate) const ATTENTION_SCORES: [&str; 4] = ["snapkv", "h2o", "tova", "caote"];

/// The settings of a policy that divides a layer's budget among its heads.
pub(crate) const HEAD_SHARING: [Parameter; 2] = [
    Parameter { name: "scores", allowed: "snapkv, h2o, tova, caote", default: None },
    Parameter { name: "floor", allowed: "a number in [0, 1]", default: Some("0.2") },
];

/// How a budget is divided among the layers, and a layer's among its heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sharing {
    /// Every head of every layer has the same.
    Uniform,
    /// Layers by [`pyramid()`] with this slope, heads of a layer the same.
    Pyramid {
        /// The mean budget over that of the last layer.
        beta: f64,
    },
    /// Heads of a layer by [`ada()`].
    Ada {
        /// Share of the mean that each head has at least.
        floor: f64,
    },
    /// Heads of a layer by [`entropy()`].
    Entropy {
        /// Share of the mean that each head has at least.
        floor: f64,
    },
}

/// What is known of a head when its layer's budget is divided; arrays have one number per kept token.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Scores, higher is kept.
    pub scores: &'a [f32],
    /// Attention; empty where the sharing does not read it.
    pub attention: &'a [f32],
    /// Places that may go.
    pub droppable: &'a Range<usize>,
}

impl Sharing {
    /// Tokens to be chosen by score in each of `layers` layers, if they are `picks` on average and a layer has
    /// `prompt` tokens to choose from; the sum is `layers * min(picks, prompt)`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the pyramid has less than one token per layer.
    pub fn layers(self, picks: usize, layers: usize, prompt: usize) -> Result<Vec<usize>> {
        match self {
            Self::Pyramid { beta } => pyramid(picks, layers, prompt, beta),
            _ => Ok(uniform(picks, layers, prompt)),
        }
    }

    /// Tokens to be chosen by score in each head of a layer that has `picks` per head on average.
    #[must_use]
    pub fn counts(self, heads: &[Head<'_>], picks: usize) -> Vec<usize> {
        let lens: Vec<usize> = heads.iter().map(|head| head.droppable.len()).collect();
        match self {
            Self::Uniform | Self::Pyramid { .. } => lens.into_iter().map(|len| picks.min(len)).collect(),
            Self::Ada { floor } => {
                let scores: Vec<&[f32]> =
                    heads.iter().map(|head| &head.scores[head.droppable.clone()]).collect();
                ada(&scores, picks * heads.len(), floor_tokens(floor, picks))
            }
            Self::Entropy { floor } => {
                let weights: Vec<f64> = heads.iter().map(|head| entropy_of(head.attention)).collect();
                entropy(&weights, picks * heads.len(), floor_tokens(floor, picks), &lens)
            }
        }
    }

    /// Ascending places that stay in each head of a layer that chooses `picks` by score per head on average.
    #[must_use]
    pub fn select(self, heads: &[Head<'_>], picks: usize) -> Vec<Vec<usize>> {
        let counts = self.counts(heads, picks);
        let kept = |(head, count): (&Head<'_>, usize)| select(head.scores, head.droppable.clone(), count);
        heads.iter().zip(counts).map(kept).collect()
    }
}

/// The same for all layers, and no more than there is: `min(picks, prompt)` each.
#[must_use]
pub fn uniform(picks: usize, layers: usize, prompt: usize) -> Vec<usize> {
    vec![picks.min(prompt); layers]
}

/// Tokens that a head has at least, of `picks` on average: `floor` of them, rounded up, and never none.
#[must_use]
pub fn floor_tokens(floor: f64, picks: usize) -> usize {
    ((floor * picks as f64).ceil() as usize).clamp(1, picks.max(1))
}

/// Checks a share of the mean budget.
pub(crate) fn check_floor(field: &str, floor: f64) -> Result<()> {
    if (0.0..=1.0).contains(&floor) {
        return Ok(());
    }
    Err(Error::plan(format!("{field}.floor"), floor, "a number in [0, 1]"))
}
