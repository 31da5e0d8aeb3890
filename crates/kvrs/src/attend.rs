//! Attention: over what is stored, and over the call's own tokens first in `extend`.

use crate::append::Checked;
use crate::columns;
use crate::compile::LayerPlan;
use crate::evict::observe::{self, Sums};
use crate::input::{Queries, Tokens};
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::ViewMut;
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, Received, Results};
use kvrs_core::{Error, Result, SeqId};
use std::ops::Deref;

impl<B: Backend> KvStore<B> {
    /// Attends over what is stored; a pure read.
    ///
    /// With `n` unmasked queries in a row the r-th stands at index `length - n + r`. `out` is
    /// `[B, query_heads, Tq, value_dim]`, `lse` `[B, query_heads, Tq]` (natural logarithm).
    ///
    /// # Errors
    /// Shape, dtype, argument and sequence errors name the argument.
    pub fn attend(
        &self,
        layer: usize,
        seqs: &[SeqId],
        queries: &Queries<'_>,
        out: &mut ViewMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        self.check_queries(plan, seqs.len(), queries, out, lse.as_deref())?;
        let columns = columns::of_mask(queries.mask, seqs.len(), queries.q.shape()[2]);
        let rows = self.rows(seqs)?;
        let rows = rows.read()?;
        for (row, (sequence, columns)) in rows.iter().zip(&columns).enumerate() {
            let length = sequence.layers[layer].length;
            if queries.causal && columns.len() > length {
                let allowed = format!("at most {length} queries, the length of the sequence, when causal");
                return Err(Error::shape(
                    format!("q of row {row}"),
                    format!("{} queries", columns.len()),
                    allowed,
                ));
            }
        }
        let first = |length: usize, queries: usize| length.saturating_sub(queries);
        let call =
            AttendCall { rows: attend_rows(layer, &rows, columns, first), ..call(plan, queries, None) };
        let value_tiles = Some(&self.value_tiles);
        self.backend.attend(&call, Results { out: Some(out), lse, received: None, value_tiles })
    }

    /// Attends over the stored past and the call's own tokens (exactly as given, causal), then appends them:
    /// what a model calls, for prompts and for decoding.
    ///
    /// # Errors
    /// As [`KvStore::append`] and [`KvStore::attend`]; nothing has changed.
    pub fn extend(
        &self,
        layer: usize,
        seqs: &[SeqId],
        queries: &Queries<'_>,
        tokens: &Tokens<'_>,
        out: &mut ViewMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        self.check_queries(plan, seqs.len(), queries, out, lse.as_deref())?;
        self.append_queried(layer, seqs, queries, tokens, |call, received| {
            let value_tiles = Some(&self.value_tiles);
            self.backend.attend(call, Results { out: Some(out), lse, received, value_tiles })
        })
    }

    /// Appends tokens together with their queries, which policies that read attention learn from.
    ///
    /// # Errors
    /// As [`KvStore::extend`]; nothing has changed.
    pub fn append_with(
        &self,
        layer: usize,
        seqs: &[SeqId],
        tokens: &Tokens<'_>,
        queries: &Queries<'_>,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        queries.check_alone(&plan.codec.shape, seqs.len(), self.backend.place())?;
        self.append_queried(layer, seqs, queries, tokens, |call, received| {
            received.map_or(Ok(()), |received| self.attend_unseen(call, received))
        })
    }

    fn check_queries(
        &self,
        plan: &LayerPlan,
        rows: usize,
        queries: &Queries<'_>,
        out: &ViewMut<'_>,
        lse: Option<&[f32]>,
    ) -> Result<()> {
        queries.check(&plan.codec.shape, rows, out, lse.map(<[f32]>::len), self.backend.place())
    }

    /// Appends tokens with their queries; `attend` sees the call before they are appended, with the sums that the
    /// policy asks for.
    fn append_queried(
        &self,
        layer: usize,
        seqs: &[SeqId],
        queries: &Queries<'_>,
        tokens: &Tokens<'_>,
        attend: impl FnOnce(&AttendCall<'_, B::Chunk>, Option<Received<'_>>) -> Result<()>,
    ) -> Result<()> {
        check_own(queries, tokens)?;
        let checked = self.check_tokens(layer, seqs.len(), tokens)?;
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        self.prepare(layer, &mut rows, &checked, Some(queries))?;
        let plan = self.layer(layer)?;
        let mut sums = observe::start(layer, plan, &rows, &checked);
        let call = own_call(layer, plan, &rows, &checked, queries);
        attend(&call, sums.as_mut().map(Sums::received))?;
        let seen = observe::look(&*self.backend, plan, &rows, &checked, Some(queries))?;
        observe::take(layer, plan, &mut rows, &checked, Some(queries), (sums, seen));
        self.commit(layer, &mut rows, &checked)
    }
}

impl Sums {
    fn received(&mut self) -> Received<'_> {
        Received { reduce: self.attention.reduce, fold: self.attention.fold, sums: &mut self.sums }
    }
}

/// Checks that queries belong to the call's own tokens.
fn check_own(queries: &Queries<'_>, tokens: &Tokens<'_>) -> Result<()> {
    if queries.q.shape()[2] != tokens.k.shape()[2] {
        let allowed = format!("as many queries as k has tokens: {}", tokens.k.shape()[2]);
        return Err(Error::shape("q", format!("{:?}", queries.q.shape()), allowed));
    }
    if queries.mask.is_some() || !queries.causal {
        let allowed = "causal queries; the mask is the tokens'";
        return Err(Error::argument("queries", "masked or not causal", allowed));
    }
    Ok(())
}

/// Attention over the stored past and the call's own tokens.
fn own_call<'a, C>(
    layer: usize,
    plan: &'a LayerPlan,
    rows: &'a [impl Deref<Target = Sequence<C>>],
    checked: &Checked<'a>,
    queries: &Queries<'a>,
) -> AttendCall<'a, C> {
    let own = Some((checked.tokens.k, checked.tokens.v));
    let past = attend_rows(layer, rows, checked.columns.clone(), |length, _| length);
    AttendCall { rows: past, ..call(plan, queries, own) }
}

fn call<'a, C>(
    plan: &'a LayerPlan,
    queries: &Queries<'a>,
    own: Option<(kvrs_codec::View<'a>, kvrs_codec::View<'a>)>,
) -> AttendCall<'a, C> {
    AttendCall {
        layer: &plan.codec,
        rows: Vec::new(),
        q: queries.q,
        own,
        causal: queries.causal,
        scale: queries.scale(&plan.codec.shape),
        softcap: queries.softcap,
        sink_logits: queries.sink_logits,
        top_k: plan.top_k,
    }
}

fn attend_rows<'a, C>(
    layer: usize,
    rows: &'a [impl Deref<Target = Sequence<C>>],
    columns: Vec<Vec<usize>>,
    first_index: impl Fn(usize, usize) -> usize,
) -> Vec<AttendRow<'a, C>>
where
    C: 'a,
{
    let rows = rows.iter().zip(columns);
    rows.map(|(sequence, columns)| {
        let state = &sequence.layers[layer];
        AttendRow {
            tables: state.tables.iter().collect(),
            start: sequence.start(),
            length: state.length,
            first_index: first_index(state.length, columns.len()),
            columns,
        }
    })
    .collect()
}
