//! Removing a range of tokens from the middle of a sequence.

use crate::compile::LayerPlan;
use crate::sequence::LayerState;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::RAW_SLOTS;
use kvrs_core::{Error, Result, SeqId};
use std::ops::Range;

impl<B: Backend> KvStore<B> {
    /// Removes the tokens with indices `start..stop` from every layer and head; sinks and recent tokens too.
    ///
    /// What is left keeps its index and position, and the length stays: the next token follows the last one as if
    /// nothing had gone, a query sees what is left up to its own index, and [`KvStore::truncate`] counts the
    /// removed tokens and cannot bring them back. Sealed pages that are emptied are freed at once, those of the
    /// 16-bit window when its tokens would have been sealed.
    ///
    /// # Errors
    /// [`Error::Sequence`] for an unknown id or a range that does not lie inside the sequence.
    pub fn remove(&self, seq: SeqId, start: usize, stop: usize) -> Result<()> {
        let row = self.row(seq)?;
        let mut sequence = row.write()?;
        let length = sequence.length();
        if stop > length {
            return Err(Error::sequence("stop", stop, format!("0..={length}, the length of sequence {seq}")));
        }
        if start > stop {
            return Err(Error::sequence("start", start, format!("0..={stop}, not above stop")));
        }
        for (i, plan) in self.compiled()?.layers.iter().enumerate() {
            let held = sequence.held(plan);
            sequence.layers[i].remove(plan, held, &(start..stop));
        }
        // Pages were counted for what the tables held.
        sequence.target = 0;
        Ok(())
    }
}

impl<C> LayerState<C> {
    fn remove(&mut self, plan: &LayerPlan, held: bool, range: &Range<usize>) {
        for (table, facts) in self.tables.iter_mut().zip(&mut self.evict.heads) {
            let tokens = table.live_indices();
            let stays: Vec<usize> = (0..tokens.len()).filter(|i| !range.contains(&tokens[*i])).collect();
            if stays.len() < tokens.len() {
                facts.keep(&stays, tokens.len());
            }
        }
        if plan.rule.stays_raw() && plan.rule.sliding.is_none() && !held {
            self.close_pages(range.end);
        }
        for table in &mut self.tables {
            table.remove(range);
        }
    }

    /// Lets the full pages that begin before `stop` leave the window, which never seals them: those that become empty
    /// can be freed then.
    fn close_pages(&mut self, stop: usize) {
        for table in &mut self.tables {
            let full = |table: &kvrs_core::page::Table<C>| {
                let first = table.window().front();
                first.is_some_and(|entry| entry.count() == RAW_SLOTS && entry.index(0) < stop)
            };
            while full(table) {
                table.seal_raw();
            }
            let first = table.window().front().map_or(self.length, |entry| entry.index(0));
            self.origin = self.origin.max(first);
        }
    }
}
