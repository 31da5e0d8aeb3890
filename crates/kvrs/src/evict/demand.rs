//! What the policies of a plan demand of a call before anything changes.

use super::{LayerEvict, Prompt};
use crate::compile::{Compiled, LayerPlan};
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::policy::PolicySpec;
use kvrs_core::{Error, Result};

impl<B: Backend> KvStore<B> {
    /// What a policy of the layer demands of a row's new tokens.
    pub(crate) fn check_prompt(
        &self,
        layer: usize,
        sequence: &Sequence<B::Chunk>,
        prompt: Prompt,
        (row, tokens): (usize, usize),
        queries: bool,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        let Some(evict) = plan.evict.as_ref().filter(|_| tokens > 0) else { return Ok(()) };
        let held = prompt != Prompt::Closed && evict.holds();
        if evict.asks(held) && !queries {
            let name = evict.name();
            let allowed = format!("the queries of the tokens: {name} in layer {layer} reads their attention");
            return Err(Error::argument("q", "None", allowed));
        }
        let target = sequence.layers[layer].length + tokens;
        let from = match prompt {
            Prompt::Whole { to } if target > to => {
                let allowed = format!("at most {to}: every layer gets the prompt of {to} tokens first");
                return Err(Error::sequence(format!("tokens of row {row}"), target, allowed));
            }
            Prompt::Open { from } => from,
            _ => 0,
        };
        if held {
            self.check_score(plan)?;
        }
        match self.plan.spec().prompt_budget.filter(|most| held && target - from > *most) {
            Some(most) => {
                let allowed = format!("at most prompt_budget = {most} until the prompt ends");
                Err(Error::sequence(format!("tokens of the prompt of row {row}"), target - from, allowed))
            }
            None => Ok(()),
        }
    }

    /// Checks that a layer's policy has its scores.
    pub(crate) fn check_score(&self, plan: &LayerPlan) -> Result<()> {
        match &plan.evict {
            Some(evict) if matches!(evict.policy, PolicySpec::Custom(_)) && self.score().is_none() => Err(
                Error::plan(&evict.field, "custom without a score", "KvStore::set_score before the prompt"),
            ),
            _ => Ok(()),
        }
    }
}

impl<C> Sequence<C> {
    /// Where the sequence will stand in its prompt when `tokens` more come.
    pub(crate) fn next_prompt(&self, all: &Compiled, tokens: usize) -> Prompt {
        let empty = self.layers.iter().all(|layer| layer.length == 0);
        let holds = || all.layers.iter().any(|l| l.evict.as_ref().is_some_and(LayerEvict::holds));
        match self.prompt {
            Prompt::Open { .. } => self.prompt,
            _ if empty && tokens > 1 && holds() => Prompt::Whole { to: tokens },
            _ if empty => Prompt::Closed,
            prompt => prompt,
        }
    }
}
