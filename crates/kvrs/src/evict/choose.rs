//! What stays at the end of a prompt.

use super::plan::LayerEvict;
use crate::compile::LayerPlan;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::Side;
use kvrs_codec::backend::{AttendCall, AttendRow, Backend, Received, Results};
use kvrs_core::budget::Head;
use kvrs_core::page::Table;
use kvrs_core::policy::{Attention, Centre, Facts, Fold, History, PolicySpec, Queries, droppable};
use kvrs_core::{Error, Result};
use std::ops::Range;

/// What is known of a head at the end of a prompt, and what stays of it.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// Indices of the kept tokens, ascending.
    pub(crate) tokens: Vec<usize>,
    pub(crate) attention: Vec<f32>,
    pub(crate) history: Option<History>,
    norms: Vec<f32>,
    scores: Vec<f32>,
    pub(crate) droppable: Range<usize>,
    /// Places of the tokens that stay.
    pub(crate) kept: Vec<usize>,
    /// Those of them that are stored at the low rate.
    pub(crate) low: Vec<usize>,
}

impl<B: Backend> KvStore<B> {
    /// Lets a layer's policy choose, for a budget of `budget` tokens.
    pub(crate) fn choose(
        &self,
        layer: usize,
        plan: &LayerPlan,
        evict: &LayerEvict,
        sequence: &Sequence<B::Chunk>,
        budget: usize,
    ) -> Result<Vec<Ended>> {
        if evict.joint && sequence.layers[layer].tables.iter().any(|table| !table.sealed().is_empty()) {
            return Ok(sequence.layers[layer].tables.iter().map(Ended::all).collect());
        }
        let mut heads = self.facts(layer, plan, evict, sequence)?;
        let (length, recent) = (sequence.layers[layer].length, evict.recent(budget));
        for head in &mut heads {
            head.droppable = droppable(&head.tokens, length, plan.rule.sinks, recent);
        }
        let most = heads.iter().map(|head| head.droppable.len()).max().unwrap_or(0);
        let picks = evict.picks(budget, most);
        if picks >= most {
            for head in &mut heads {
                head.kept = (0..head.tokens.len()).collect();
            }
            return Ok(heads);
        }
        if evict.joint {
            self.choose_jointly(layer, plan, sequence, &mut heads, picks);
            return Ok(heads);
        }
        for (h, head) in heads.iter_mut().enumerate() {
            head.scores = self.score_head((layer, h), plan, evict, sequence, head)?;
        }
        let views: Vec<Head<'_>> = heads.iter().map(Ended::view).collect();
        let kept = evict.policy.sharing().select(&views, picks);
        for (head, kept) in heads.iter_mut().zip(kept) {
            (head.kept, head.scores, head.norms) = (kept, Vec::new(), Vec::new());
        }
        Ok(heads)
    }

    fn score_head(
        &self,
        (layer, head): (usize, usize),
        plan: &LayerPlan,
        evict: &LayerEvict,
        sequence: &Sequence<B::Chunk>,
        ended: &Ended,
    ) -> Result<Vec<f32>> {
        let facts = Facts {
            layer,
            head,
            tokens: &ended.tokens,
            prefix: ended.droppable.end,
            attention: &ended.attention,
            key_norms: &ended.norms,
            distances: &[],
        };
        let table = &sequence.layers[layer].tables[head];
        let distances = self.distances(plan, &evict.policy, (head, table), sequence.start(), &facts);
        let facts = Facts { distances: &distances, ..facts };
        let (PolicySpec::Custom(_), Some(score)) = (&evict.policy, self.score()) else {
            return Ok(evict.policy.scores(&facts));
        };
        let scores = score(&facts)?;
        if scores.len() == facts.tokens.len() {
            return Ok(scores);
        }
        let got = format!("{} numbers for layer {layer}, head {head}", scores.len());
        Err(Error::argument("score", got, format!("{}, one per token", facts.tokens.len())))
    }

    /// Distances of the values from the centre that the policy asks for; empty if it asks for none.
    pub(crate) fn distances(
        &self,
        plan: &LayerPlan,
        policy: &PolicySpec,
        (head, table): (usize, &Table<B::Chunk>),
        start: i64,
        facts: &Facts<'_>,
    ) -> Vec<f32> {
        let Some(centre) = policy.needs().distances else { return Vec::new() };
        let n = facts.tokens.len();
        let mut weights = policy.weights(facts);
        if weights.len() != n {
            weights = match centre {
                Centre::Mean => vec![1.0 / n as f32; n],
                Centre::Output => facts.attention.to_vec(),
            };
        }
        let dim = plan.codec.shape.value_dim;
        let mut values = Vec::with_capacity(n * dim);
        self.each_live(plan, head, table, start, [Side::Value], |[v]| values.extend_from_slice(v));
        let mut mean = vec![0.0f64; dim];
        for (v, weight) in values.chunks_exact(dim).zip(weights) {
            mean.iter_mut().zip(v).for_each(|(m, v)| *m += f64::from(weight) * f64::from(*v));
        }
        let distance = |v: &[f32]| {
            let square: f64 = mean.iter().zip(v).map(|(m, v)| (m - f64::from(*v)).powi(2)).sum();
            square.sqrt() as f32
        };
        values.chunks_exact(dim).map(distance).collect()
    }

    /// Decodes these sides of the live tokens of a head, in the order of its table.
    pub(crate) fn each_live<const N: usize>(
        &self,
        plan: &LayerPlan,
        head: usize,
        table: &Table<B::Chunk>,
        start: i64,
        sides: [Side; N],
        mut each: impl FnMut([&[f32]; N]),
    ) {
        let shape = &plan.codec.shape;
        let dims = sides.map(|side| if side == Side::Key { shape.key_dim } else { shape.value_dim });
        let mut rows = [const { Vec::new() }; N];
        for entry in table.entries() {
            let codec = &plan.codec.classes[head][entry.class()];
            for (side, rows) in sides.into_iter().zip(&mut rows) {
                self.backend.decode_live(codec, entry, start, (side, 0), rows);
            }
            for i in 0..entry.live().count_ones() as usize {
                each(std::array::from_fn(|side| &rows[side][i * dims[side]..(i + 1) * dims[side]]));
            }
        }
    }

    /// What the policy asks to know of each head.
    fn facts(
        &self,
        layer: usize,
        plan: &LayerPlan,
        evict: &LayerEvict,
        sequence: &Sequence<B::Chunk>,
    ) -> Result<Vec<Ended>> {
        let state = &sequence.layers[layer];
        let tokens = |table: &Table<B::Chunk>| Ended { tokens: table.live_indices(), ..Ended::default() };
        let mut heads: Vec<Ended> = state.tables.iter().map(tokens).collect();
        let needs = evict.policy.needs();
        match needs.attention {
            Some(attention) if evict.remembers() > 0 => {
                self.vote(layer, plan, attention, sequence, &mut heads)?;
            }
            Some(_) => heads.iter_mut().zip(&state.evict.heads).for_each(|(head, facts)| {
                head.attention = facts.attention(head.tokens.len());
            }),
            None => {}
        }
        for (h, head) in heads.iter_mut().enumerate().filter(|_| needs.key_norms) {
            head.norms.clone_from(&state.evict.heads[h].norms);
            if head.norms.len() != head.tokens.len() {
                head.norms.clear();
                self.each_live(plan, h, &state.tables[h], sequence.start(), [Side::Key], |[k]| {
                    head.norms.push(super::observe::norm(k));
                });
            }
        }
        Ok(heads)
    }

    /// Attention of the remembered queries.
    fn vote(
        &self,
        layer: usize,
        plan: &LayerPlan,
        attention: Attention,
        sequence: &Sequence<B::Chunk>,
        heads: &mut [Ended],
    ) -> Result<()> {
        let (length, known) = (sequence.layers[layer].length, sequence.layers[layer].evict.tail.len());
        let (Fold::Above, Queries::Last(n)) = (attention.fold, attention.queries) else {
            let sums = self.tail_sums(layer, plan, attention, sequence, 0..known)?;
            heads.iter_mut().zip(sums).for_each(|(head, sums)| head.attention = sums);
            return Ok(());
        };
        for head in &mut *heads {
            let mut history = History::new(n);
            history.push(head.tokens.len());
            head.history = Some(history);
        }
        for block in History::counted(n, length) {
            let from = |index: usize| (index + known).saturating_sub(length);
            let queries = from(block.start)..from(block.end);
            let sums = self.tail_sums(layer, plan, attention, sequence, queries)?;
            for (head, sums) in heads.iter_mut().zip(sums) {
                let history = head.history.as_mut().expect("made above");
                history.add(block.len(), &sums);
            }
        }
        for head in heads {
            head.attention = head.history.as_ref().expect("made above").totals();
        }
        Ok(())
    }

    /// Attention that each kept token of each head received from a part of the remembered queries.
    fn tail_sums(
        &self,
        layer: usize,
        plan: &LayerPlan,
        attention: Attention,
        sequence: &Sequence<B::Chunk>,
        queries: Range<usize>,
    ) -> Result<Vec<Vec<f32>>> {
        let state = &sequence.layers[layer];
        let mut sums: Vec<Vec<f32>> = state.tables.iter().map(|table| vec![0.0; table.kept()]).collect();
        let Some((q, scale, softcap, sink_logits)) = state.evict.tail.view() else { return Ok(sums) };
        let first_index = state.length - state.evict.tail.len() + queries.start;
        let row = AttendRow {
            tables: state.tables.iter().collect(),
            start: sequence.start(),
            length: state.length,
            columns: queries.collect(),
            first_index,
        };
        let call = AttendCall {
            layer: &plan.codec,
            rows: vec![row],
            q,
            own: None,
            causal: true,
            scale,
            softcap,
            sink_logits,
            top_k: None,
        };
        let received = Received { reduce: attention.reduce, fold: attention.fold, sums: &mut sums };
        self.attend_unseen(&call, received)?;
        Ok(sums)
    }

    /// Attends for the sake of the statistics alone.
    pub(crate) fn attend_unseen(
        &self,
        call: &AttendCall<'_, B::Chunk>,
        received: Received<'_>,
    ) -> Result<()> {
        let received = Some(received);
        self.backend.attend(call, Results { out: None, lse: None, received, value_tiles: None })
    }
}

impl Ended {
    /// Everything that a table has, to stay.
    fn all<C>(table: &Table<C>) -> Self {
        let tokens = table.live_indices();
        Self { kept: (0..tokens.len()).collect(), tokens, ..Self::default() }
    }

    fn view(&self) -> Head<'_> {
        Head { scores: &self.scores, attention: &self.attention, droppable: &self.droppable }
    }

    /// Whether everything stays, at the plan's own rate.
    pub(crate) fn keeps_all(&self) -> bool {
        self.kept.len() == self.tokens.len() && self.low.is_empty()
    }
}
