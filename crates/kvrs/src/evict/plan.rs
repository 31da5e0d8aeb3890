//! A layer's policy, made ready when the plan is.

use crate::compile::{Compiled, LayerPlan};
use crate::joint;
use crate::memory::sequence_bytes;
use crate::plan::PlanSpec;
use kvrs_core::budget::{Budget, Sharing};
use kvrs_core::policy::{PolicySpec, Queries, When};
use kvrs_core::{Error, Result};
use std::ops::Range;

/// The policy of a layer.
#[derive(Debug, Clone)]
pub(crate) struct LayerEvict {
    pub(crate) policy: PolicySpec,
    /// Where it stands in the plan.
    pub(crate) field: String,
    /// Layers that divide a budget with this one, itself included.
    layers: usize,
    /// This layer's place among them.
    rank: usize,
    sinks: usize,
    recent: usize,
    /// Whether tokens and rates are chosen jointly.
    pub(crate) joint: bool,
}

impl LayerEvict {
    /// The policy of layer `layer`.
    pub(crate) fn of(spec: &PlanSpec, layer: usize) -> Option<Self> {
        if let Some(joint) = joint::of_layer(spec, layer) {
            let alike = |layers: Range<usize>| layers.filter(|i| joint::of_layer(spec, *i).is_some()).count();
            return Some(Self {
                policy: joint.policy(),
                field: "joint".to_owned(),
                layers: alike(0..spec.shape.layers.len()),
                rank: alike(0..layer),
                sinks: spec.sinks,
                recent: spec.recent,
                joint: true,
            });
        }
        let policy = spec.evict.get(layer)?.as_ref()?;
        let alike = |other: &Option<PolicySpec>| other.as_ref() == Some(policy);
        Some(Self {
            policy: policy.clone(),
            field: format!("evict[{layer}]"),
            layers: spec.evict.iter().filter(|other| alike(other)).count(),
            rank: spec.evict[..layer].iter().filter(|other| alike(other)).count(),
            sinks: spec.sinks,
            recent: spec.recent,
            joint: false,
        })
    }

    /// Its name, for people.
    pub(crate) fn name(&self) -> &'static str {
        if self.joint { "joint" } else { self.policy.name() }
    }

    /// Whether it acts again when groups leave the window.
    pub(crate) fn acts_later(&self) -> bool {
        self.policy.when() != When::PromptEnd
    }

    /// When it acts, for people.
    pub(crate) fn moment(&self) -> &'static str {
        match self.policy.when() {
            When::PromptEnd => "at the end of a prompt: tokens after it all stay",
            When::EveryGroup => "whenever a group leaves the window",
            When::Batches => "whenever the budget is full, half of it at once",
        }
    }

    /// Whether the tokens of an open prompt stay raw until its end.
    pub(crate) fn holds(&self) -> bool {
        !matches!(self.policy, PolicySpec::StreamingLlm(_)) || self.shares()
    }

    /// Whether the budget is a share of the prompt.
    pub(crate) fn shares(&self) -> bool {
        matches!(self.policy.budget(), Some(Budget::Share(_)))
    }

    /// Queries that are remembered in an open prompt; 0 if their attention is added up as they come, or not asked for.
    pub(crate) fn remembers(&self) -> usize {
        match self.policy.needs().attention.map(|attention| attention.queries) {
            Some(Queries::Last(n)) => n,
            _ => 0,
        }
    }

    /// Whether the attention of a call's queries is added up.
    pub(crate) fn tracks(&self, held: bool) -> bool {
        let Some(attention) = self.policy.needs().attention else { return false };
        if held { attention.queries == Queries::All } else { self.acts_later() }
    }

    /// Whether a call needs queries.
    pub(crate) fn asks(&self, held: bool) -> bool {
        self.policy.needs().queries() && (held || self.acts_later())
    }

    /// Newest tokens that never go, for a budget of `budget` tokens.
    pub(crate) fn recent(&self, budget: usize) -> usize {
        self.policy.recent(budget, self.recent)
    }

    /// Tokens per head, on average over the layers, for a sequence of `length` tokens.
    ///
    /// # Errors
    /// [`Error::Plan`] if a budget in bytes is too small for it.
    pub(crate) fn resolve(&self, layers: &[LayerPlan], length: usize) -> Result<usize> {
        let budget = self.policy.budget().expect("a validated policy has a budget");
        let least = self.policy.least_budget(self.sinks, self.recent);
        let bytes = |kept: usize| sequence_bytes(layers, length, kept);
        budget.resolve(&format!("{}.budget", self.field), length, least, bytes)
    }

    /// The budget of a sequence whose prompt has not ended; `None` if it is a share of the prompt.
    pub(crate) fn early(&self, layers: &[LayerPlan]) -> Option<usize> {
        if self.shares() { None } else { self.resolve(layers, 0).ok() }
    }

    /// Tokens that are chosen by score in this layer, per head on average, of `droppable` ones.
    pub(crate) fn picks(&self, budget: usize, droppable: usize) -> usize {
        let picks = budget.saturating_sub(self.policy.protected(budget, self.sinks, self.recent));
        let layers = self.policy.sharing().layers(picks.max(1), self.layers, droppable);
        layers.ok().and_then(|layers| layers.get(self.rank).copied()).unwrap_or(picks)
    }

    /// Tokens that a head keeps at most, on average over the heads, after a prompt of `length` tokens.
    pub(crate) fn most(&self, budget: usize, length: usize) -> usize {
        let protected = self.sinks + self.recent(budget);
        let droppable = length.saturating_sub(protected);
        length.min(protected + self.picks(budget, droppable))
    }

    /// As [`Self::most`], for a sequence that has evicted before: with fewer tokens to choose from a pyramid is flatter.
    pub(crate) fn most_again(&self, budget: usize, length: usize) -> usize {
        let flat = matches!(self.policy.sharing(), Sharing::Pyramid { .. });
        let least = if flat { budget.min(length) } else { 0 };
        (self.most(budget, length).max(least) + usize::from(flat)).min(length)
    }

    /// Whether heads may keep different numbers of tokens.
    pub(crate) fn ragged(&self) -> bool {
        self.joint || matches!(self.policy.sharing(), Sharing::Ada { .. } | Sharing::Entropy { .. })
    }

    /// Tokens that a head keeps of a prompt of `length` tokens, on average over the heads.
    pub(crate) fn kept(&self, layers: &[LayerPlan], length: usize) -> Result<usize> {
        Ok(self.most(self.resolve(layers, length)?, length))
    }
}

/// Checks the policies of a plan, apart from what needs the layouts.
pub(crate) fn validate(spec: &PlanSpec) -> Result<()> {
    let layers = spec.shape.layers.len();
    if !spec.evict.is_empty() && spec.evict.len() != layers {
        return Err(Error::plan(
            "evict",
            format!("{} policies", spec.evict.len()),
            format!("{layers}, one a layer"),
        ));
    }
    for (i, policy) in spec.evict.iter().enumerate() {
        let Some(policy) = policy else { continue };
        let field = format!("evict[{i}]");
        if let Some(sliding) = spec.shape.layers[i].sliding {
            let got = format!("{} in a layer with a sliding window of {sliding}", policy.name());
            return Err(Error::plan(field, got, "None: the window already says which tokens go"));
        }
        policy.validate_as(&field, spec.sinks, spec.recent)?;
    }
    match spec.prompt_budget {
        Some(0) => Err(Error::plan("prompt_budget", 0, "None or at least 1 token")),
        _ => Ok(()),
    }
}

/// Checks that budgets in bytes hold what must be kept.
pub(crate) fn validate_bytes(compiled: &Compiled) -> Result<()> {
    let policies = compiled.layers.iter().filter_map(|layer| layer.evict.as_ref());
    policies
        .map(|evict| evict.resolve(&compiled.layers, 0))
        .find(Result::is_err)
        .map_or(Ok(()), |e| e.map(|_| ()))
}
