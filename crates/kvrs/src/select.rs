//! Taking tokens away: truncation and the keeping of chosen positions.

use crate::compile::{LayerPlan, RAW};
use crate::evict::{Move, Prompt, spare_pages};
use crate::locks::broken;
use crate::sequence::{LayerState, Sequence};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::layout::movable;
use kvrs_core::page::{Supply, Table, Zone};
use kvrs_core::{Error, Result, SeqId};

impl<B: Backend> KvStore<B> {
    /// Brings every layer of a sequence to `n` tokens; the repair after a step that failed in the middle.
    ///
    /// Codes before `n` stay bit for bit; nothing becomes 16-bit again.
    ///
    /// # Errors
    /// [`Error::Sequence`] if `n` is above the length, if pages that a query at `n` would see have gone behind a
    /// sliding window, or, other than for 0, while layers still lack a part of the first prompt.
    pub fn truncate(&self, seq: SeqId, n: usize) -> Result<()> {
        let row = self.row(seq)?;
        let mut sequence = row.write().map_err(broken)?;
        let length = sequence.length();
        if n > length {
            return Err(Error::sequence("n", n, format!("0..={length}, the length of sequence {seq}")));
        }
        if let (Prompt::Whole { to }, 1..) = (sequence.prompt, n) {
            let allowed = format!("0: layers are still to get the prompt of {to} tokens");
            return Err(Error::sequence("n", n, allowed));
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
            let got = format!("{} lists", positions.len());
            return Err(Error::shape("positions", got, format!("{heads}, one per head")));
        }
        let row = self.row(seq)?;
        let mut sequence = row.write().map_err(broken)?;
        if sequence.held(plan) {
            let got = format!("{seq}, whose prompt is open");
            return Err(Error::sequence("seq", got, "a sequence after end_prompt"));
        }
        let start = sequence.start();
        let state = &mut sequence.layers[layer];
        for (head, positions) in positions.iter().enumerate() {
            check_positions(head, positions, start, &state.tables[head].live_indices())?;
        }
        let droppable = state.droppable(plan);
        let stays = plan.rule.stays_raw() && plan.rule.sliding.is_none();
        let first = if stays { droppable.end.max(state.origin) } else { state.origin };
        let moves = first > state.origin;
        let mut supplies = self.spares(plan, heads, moves)?;
        for (head, positions) in positions.iter().enumerate() {
            let kept =
                state.chosen(head, &droppable, |i| positions.binary_search(&(start + i as i64)).is_ok());
            let (table, supply, kept_pages) =
                (&mut state.tables[head], &mut supplies[head], &mut Supply::default());
            let mut task = Move { layer, head, plan, table, supply, kept: kept_pages, start, first };
            self.keep_head(&mut task, &kept, moves);
        }
        state.origin = first;
        // Pages were counted for the window as it was.
        sequence.target = 0;
        Ok(())
    }

    /// Keeps the ascending indices `kept` of a head; `moves`: the window of a raw layer starts anew.
    fn keep_head(&self, task: &mut Move<'_, B::Chunk>, kept: &[usize], moves: bool) {
        let plan = task.plan;
        if plan.rule.sliding.is_some() && plan.rule.stays_raw() {
            task.table.retain(|index| kept.binary_search(&index).is_ok(), &[Zone::Window]);
            return;
        }
        if moves {
            self.gather(task, kept);
        } else {
            self.thin(plan, task.head, (task.table, task.supply), kept);
        }
        self.pack(plan, task.head, task.table);
    }

    /// Packs sealed pages together as far as a codec allows.
    fn pack(&self, plan: &LayerPlan, head: usize, table: &mut Table<B::Chunk>) {
        let codec = plan.class(head, plan.target());
        if movable(&codec.desc) {
            let copy = |from: &_, a, to: &mut _, b| self.backend.copy_slot(codec, (from, a), (to, b));
            table.compact(plan.target(), codec.desc.slots as usize, copy);
        }
    }

    /// Pages that each head needs while its tokens move.
    fn spares(&self, plan: &LayerPlan, heads: usize, moves: bool) -> Result<Vec<Supply<B::Chunk>>> {
        let want = [(plan.page_bytes(RAW), if moves { spare_pages(plan) } else { 0 })];
        let all: Vec<_> = (0..heads).map(|_| want[0]).filter(|(_, n)| *n > 0).collect();
        let mut supply = self.arena.reserve("the moving of kept tokens", &all)?;
        Ok((0..heads).map(|_| supply.split(&want)).collect())
    }
}

impl<C> Sequence<C> {
    fn truncate(&mut self, n: usize, sinks: usize) {
        for state in &mut self.layers {
            let length = state.length;
            state.length = length.min(n);
            state.origin = state.origin.min(n).max(sinks);
            state.longest = if n == 0 { 0 } else { state.longest };
            state.tables.iter_mut().for_each(|table| {
                table.truncate(n);
            });
            let kept: Vec<usize> = state.tables.iter().map(Table::kept).collect();
            state.evict.truncate(n, length, &kept);
            state
                .supplies
                .iter_mut()
                .chain([&mut state.kept])
                .for_each(|supply| drop(std::mem::take(supply)));
        }
        self.target = n;
        self.shared = Supply::default();
        self.layers.iter_mut().for_each(|state| state.evict.borrowed = 0);
        self.prompt = match self.prompt {
            Prompt::Open { from } => {
                self.target = 0;
                Prompt::Open { from: from.min(n) }
            }
            Prompt::Closed | Prompt::Whole { .. } => Prompt::Closed,
        };
        if n == 0 {
            self.start = None;
        }
    }
}

impl<C> LayerState<C> {
    /// Indices of a head that stay: all that are not droppable, and those that are wanted; its statistics follow.
    fn chosen(
        &mut self,
        head: usize,
        droppable: &std::ops::Range<usize>,
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        let tokens = self.tables[head].live_indices();
        let stays = |i: &usize| !droppable.contains(&tokens[*i]) || wanted(tokens[*i]);
        let places: Vec<usize> = (0..tokens.len()).filter(stays).collect();
        self.evict.heads[head].keep(&places, tokens.len());
        places.into_iter().map(|place| tokens[place]).collect()
    }

    /// Indices that `keep` may drop: behind the sinks, before the 16-bit window.
    fn droppable(&self, plan: &LayerPlan) -> std::ops::Range<usize> {
        let end =
            if plan.rule.stays_raw() { self.length.saturating_sub(plan.rule.recent) } else { self.origin };
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
