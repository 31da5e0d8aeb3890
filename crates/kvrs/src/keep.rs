//! Keeping chosen positions: the policies' own mover, for the caller's selections.

use crate::compile::LayerPlan;
use crate::evict::{Move, spare_pages};
use crate::sequence::LayerState;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::layout::movable;
use kvrs_core::page::{Supply, Table, Zone};
use kvrs_core::{Error, Result, SeqId};

impl<B: Backend> KvStore<B> {
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
        let mut sequence = row.write()?;
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
        let mut supplies = self.spares(plan, &state.tables, moves)?;
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
            self.gather(task, kept, &[]);
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

    /// Pages that each head needs while its tokens move: raw pages that other tables use too do not become free.
    fn spares(
        &self,
        plan: &LayerPlan,
        tables: &[Table<B::Chunk>],
        moves: bool,
    ) -> Result<Vec<Supply<B::Chunk>>> {
        let shared = |table: &Table<B::Chunk>| {
            table.sinks().iter().chain(table.window()).filter(|entry| entry.shared()).count()
        };
        let need = |table| if moves { spare_pages(plan) + shared(table) } else { 0 };
        let wants: Vec<_> = tables.iter().map(|table| (plan.raw_page_bytes(), need(table))).collect();
        let all: Vec<_> = wants.iter().copied().filter(|(_, n)| *n > 0).collect();
        let mut supply = self.pages("the moving of kept tokens", &all)?;
        Ok(wants.into_iter().map(|want| supply.split(&[want])).collect())
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
