//! What a call's queries and keys tell the policies.

use super::facts::HeadFacts;
use super::plan::LayerEvict;
use crate::append::Checked;
use crate::compile::LayerPlan;
use crate::input::Queries;
use crate::sequence::Sequence;
use kvrs_codec::View;
use kvrs_codec::backend::Backend;
use kvrs_codec::view::Geometry;
use kvrs_core::Result;
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

/// What the host looks at of a row's queries and keys, both in their own type.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The last queries that the policy remembers, `[tokens][query_heads][key_dim]`.
    queries: Vec<u8>,
    /// All keys, `[tokens][kv_heads][key_dim]`.
    keys: Vec<u8>,
}

/// Brings to the host what [`take`] will look at, one for each row.
pub(crate) fn look<B: Backend>(
    backend: &B,
    plan: &LayerPlan,
    rows: &[impl Deref<Target = Sequence<B::Chunk>>],
    checked: &Checked<'_>,
    queries: Option<&Queries<'_>>,
) -> Result<Vec<Seen>> {
    let Some(evict) = &plan.evict else { return Ok(Vec::new()) };
    let one = |(row, sequence): (usize, &_)| {
        let (mut seen, columns) = (Seen::default(), &checked.columns[row]);
        if let (true, Some(queries)) = (remembers(plan, evict, sequence), queries) {
            let last = &columns[columns.len().saturating_sub(evict.remembers())..];
            backend.fetch(&queries.q, row, last, &mut seen.queries)?;
        }
        if asks_for_norms(evict) {
            backend.fetch(&checked.tokens.k, row, columns, &mut seen.keys)?;
        }
        Ok(seen)
    };
    rows.iter().enumerate().map(one).collect()
}

fn remembers<C>(plan: &LayerPlan, evict: &LayerEvict, sequence: &impl Deref<Target = Sequence<C>>) -> bool {
    sequence.held(plan) && evict.remembers() > 0
}

/// Whether a policy will ask for the norms of keys when they are encoded.
fn asks_for_norms(evict: &LayerEvict) -> bool {
    evict.policy.needs().key_norms && evict.acts_later()
}

/// Takes in what a call told about the rows' heads, before its tokens are appended.
pub(crate) fn take<C>(
    layer: usize,
    plan: &LayerPlan,
    rows: &mut [impl DerefMut<Target = Sequence<C>>],
    checked: &Checked<'_>,
    queries: Option<&Queries<'_>>,
    (sums, seen): (Option<Sums>, Vec<Seen>),
) {
    let Some(evict) = &plan.evict else { return };
    let mut sums = sums.map(|s| (s.attention, s.sums.into_iter()));
    for ((row, sequence), seen) in rows.iter_mut().enumerate().zip(seen) {
        let (held, remembers) = (sequence.held(plan), remembers(plan, evict, sequence));
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
        if let (true, Some(queries)) = (remembers, queries) {
            let scale = queries.scale(&plan.codec.shape);
            state.evict.tail.push(evict.remembers(), queries, scale, &seen.queries);
        }
        if asks_for_norms(evict) {
            add_norms(&mut state.evict.heads, &checked.tokens.k, columns.len(), &seen.keys);
        }
    }
}

/// Norms of a row's keys, `bytes` of `[tokens][kv_heads][key_dim]` in the type of `k`.
fn add_norms(heads: &mut [HeadFacts], k: &View<'_>, tokens: usize, bytes: &[u8]) {
    let [_, kv_heads, _, dim] = k.shape();
    let geometry = Geometry::contiguous(k.dtype(), [1, tokens, kv_heads, dim]);
    let keys = View::new("k", bytes, geometry).expect("the keys lie in their bytes");
    let mut key = vec![0.0; dim];
    for (h, head) in heads.iter_mut().enumerate() {
        for token in 0..tokens {
            keys.read_row([0, token, h], &mut key);
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
