//! What a call's queries and keys tell the policies.

use super::facts::HeadFacts;
use super::plan::LayerEvict;
use crate::append::Checked;
use crate::compile::LayerPlan;
use crate::input::Queries;
use crate::sequence::Sequence;
use kvrs_core::policy::{Attention, Fold, History, Queries as Which};
use std::ops::{Deref, DerefMut};

/// Attention of a call's queries that is being added up, `[row * kv_heads + head]`.
pub(crate) struct Sums {
    pub(crate) attention: Attention,
    pub(crate) sums: Vec<Vec<f32>>,
}

/// The sums that a call begins with; `None` if no row's policy asks for them.
pub(crate) fn start<C>(
    layer: usize,
    plan: &LayerPlan,
    rows: &[impl Deref<Target = Sequence<C>>],
    checked: &Checked<'_>,
) -> Option<Sums> {
    let evict = plan.evict.as_ref()?;
    let attention = evict.policy.needs().attention?;
    if !rows.iter().any(|sequence| evict.tracks(sequence.held(plan))) {
        return None;
    }
    let sums = rows.iter().zip(&checked.columns).flat_map(|(sequence, columns)| {
        let state = &sequence.layers[layer];
        let heads = state.evict.heads.iter().zip(&state.tables);
        heads.map(|(head, table)| head.start(attention.fold, table.kept(), columns.len()))
    });
    Some(Sums { attention, sums: sums.collect() })
}

/// Takes in what a call told about the rows' heads, before its tokens are appended.
pub(crate) fn take<C>(
    layer: usize,
    plan: &LayerPlan,
    rows: &mut [impl DerefMut<Target = Sequence<C>>],
    checked: &Checked<'_>,
    queries: Option<&Queries<'_>>,
    sums: Option<Sums>,
) {
    let Some(evict) = &plan.evict else { return };
    let mut sums = sums.map(|s| (s.attention, s.sums.into_iter()));
    for (row, sequence) in rows.iter_mut().enumerate() {
        let held = sequence.held(plan);
        let columns = &checked.columns[row];
        let state = &mut sequence.layers[layer];
        for (head, table) in state.evict.heads.iter_mut().zip(&state.tables) {
            if let Some((attention, sums)) = &mut sums {
                let sums = sums.next().expect("one array per row and head");
                if evict.tracks(held) && !columns.is_empty() {
                    head.begin_history(*attention, table.kept());
                    head.add(attention.fold, columns.len(), sums);
                }
            }
        }
        if let (true, Some(queries)) = (held && evict.remembers() > 0, queries) {
            let scale = queries.scale(&plan.codec.shape);
            state.evict.tail.push(evict.remembers(), queries, scale, row, columns);
        }
        add_norms(evict, &mut state.evict.heads, checked, row);
    }
}

/// Norms of the call's keys, for a policy that will ask for them when the keys are encoded.
fn add_norms(evict: &LayerEvict, heads: &mut [HeadFacts], checked: &Checked<'_>, row: usize) {
    if !(evict.policy.needs().key_norms && evict.acts_later()) {
        return;
    }
    let mut key = vec![0.0; checked.tokens.k.shape()[3]];
    for (h, head) in heads.iter_mut().enumerate() {
        for &column in &checked.columns[row] {
            checked.tokens.k.read_row([row, h, column], &mut key);
            head.norms.push(norm(&key));
        }
    }
}

/// Euclidean length, summed in f64.
pub(crate) fn norm(x: &[f32]) -> f32 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32
}

impl HeadFacts {
    /// Starts counters where the attention is counted and none run yet.
    pub(crate) fn begin_history(&mut self, attention: Attention, kept: usize) {
        let (Fold::Above, Which::Last(n), None) = (attention.fold, attention.queries, &self.history) else {
            return;
        };
        let mut history = History::new(n);
        history.push(kept);
        self.history = Some(history);
    }
}
