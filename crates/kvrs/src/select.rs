//! Taking tokens away: truncation and the keeping of chosen positions.

use crate::compile::{LayerPlan, PACKED};
use crate::locks::broken;
use crate::sequence::{LayerState, Sequence};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::Zone;
use kvrs_core::{Error, Result, SeqId};
use std::collections::BTreeSet;

impl<B: Backend> KvStore<B> {
    /// Brings every layer of a sequence to `n` tokens; the repair after a step that failed in the middle.
    ///
    /// Codes before `n` stay bit for bit; nothing becomes 16-bit again.
    ///
    /// # Errors
    /// [`Error::Sequence`] if `n` is above the length, or if pages that a query at `n` would see have gone
    /// behind a sliding window.
    pub fn truncate(&self, seq: SeqId, n: usize) -> Result<()> {
        let row = self.row(seq)?;
        let mut sequence = row.write().map_err(broken)?;
        let length = sequence.length();
        if n > length {
            return Err(Error::sequence("n", n, format!("0..={length}, the length of sequence {seq}")));
        }
        let plan = self.compiled()?;
        for (i, (state, plan)) in sequence.layers.iter().zip(&plan.layers).enumerate() {
            if state.length > n && !plan.rule.can_truncate(state.longest, n) {
                let least =
                    (n..=length).find(|n| plan.rule.can_truncate(state.longest, *n)).unwrap_or(length);
                let allowed =
                    format!("0 or {least}..={length}: layer {i} has dropped what lies behind its window");
                return Err(Error::sequence("n", n, allowed));
            }
        }
        sequence.truncate(n, self.plan.spec().sinks);
        Ok(())
    }

    /// Keeps only chosen tokens of a layer, one ascending list of positions per key-value head. Sinks and the
    /// 16-bit window stay whatever the lists say; emptied pages go back at once, half-empty ones are compacted.
    ///
    /// # Errors
    /// [`Error::Shape`] for the wrong number of lists, [`Error::Sequence`] for a position that is not kept now
    /// or lists that do not ascend.
    pub fn keep(&self, seq: SeqId, layer: usize, positions: &[Vec<i64>]) -> Result<()> {
        let plan = self.layer(layer)?;
        let heads = plan.codec.shape.kv_heads;
        if positions.len() != heads {
            return Err(Error::shape(
                "positions",
                format!("{} lists", positions.len()),
                format!("{heads}, one per head"),
            ));
        }
        let row = self.row(seq)?;
        let mut sequence = row.write().map_err(broken)?;
        let start = sequence.start();
        let state = &mut sequence.layers[layer];
        for (head, positions) in positions.iter().enumerate() {
            check_positions(head, positions, start, &state.tables[head].live_indices())?;
        }
        let droppable = state.droppable(plan);
        let zones: &[Zone] = if plan.raw() { &[Zone::Window] } else { &[Zone::Sealed] };
        for (group, (table, positions)) in state.tables.iter_mut().zip(positions).enumerate() {
            let keep: BTreeSet<usize> = positions.iter().map(|p| (p - start) as usize).collect();
            table.retain(|index| !droppable.contains(&index) || keep.contains(&index), zones);
            if plan.raw() {
                continue;
            }
            let codec = plan.class(group, PACKED);
            let slots = codec.desc.slots as usize;
            table.compact(PACKED, slots, |from, a, to, b| self.backend.copy_slot(codec, (from, a), (to, b)));
        }
        Ok(())
    }
}

impl<C> Sequence<C> {
    fn truncate(&mut self, n: usize, sinks: usize) {
        for state in &mut self.layers {
            state.length = state.length.min(n);
            state.origin = state.origin.min(n).max(sinks);
            state.longest = if n == 0 { 0 } else { state.longest };
            state.tables.iter_mut().for_each(|table| {
                table.truncate(n);
            });
            state.supplies.iter_mut().for_each(|supply| drop(std::mem::take(supply)));
        }
        self.target = n;
        if n == 0 {
            self.start = None;
        }
    }
}

impl<C> LayerState<C> {
    /// Indices that `keep` may drop: behind the sinks, before the 16-bit window.
    fn droppable(&self, plan: &LayerPlan) -> std::ops::Range<usize> {
        let end = if plan.raw() { self.length.saturating_sub(plan.rule.recent) } else { self.origin };
        plan.rule.sinks..end.max(plan.rule.sinks)
    }
}

fn check_positions(head: usize, positions: &[i64], start: i64, live: &[usize]) -> Result<()> {
    let what = format!("positions of head {head}");
    if let Some((a, b)) = positions.iter().zip(positions.iter().skip(1)).find(|(a, b)| a >= b) {
        return Err(Error::sequence(what, format!("{a} then {b}"), "ascending positions"));
    }
    let stored = |p: i64| usize::try_from(p - start).is_ok_and(|i| live.binary_search(&i).is_ok());
    match positions.iter().find(|p| !stored(**p)) {
        Some(bad) => Err(Error::sequence(what, bad, "positions that the head keeps now (kept_positions)")),
        None => Ok(()),
    }
}
