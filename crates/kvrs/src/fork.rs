//! Forking: two sequences with the same tokens in the same pages, of which whoever writes first makes its own copy.

use crate::sequence::{LayerState, Sequence};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::{Grant, Supply, Table};
use kvrs_core::{Result, SeqId};

impl<B: Backend> KvStore<B> {
    /// A new sequence with the tokens of another: tables are copied, pages are shared.
    ///
    /// A page that both use is copied by whichever writes into it first; sequences may be freed in any order.
    /// Statistics of policies are copied, and an open prompt is open in both. What [`KvStore::reserve`] took for
    /// the sequence stays with it, and its next step takes the copies of shared pages on top.
    ///
    /// # Errors
    /// [`kvrs_core::Error::Sequence`] for an unknown id or a sequence in the middle of a step,
    /// [`kvrs_core::Error::Capacity`] if the tables do not fit.
    pub fn fork(&self, seq: SeqId) -> Result<SeqId> {
        let row = self.row(seq)?;
        let mut sequence = row.write()?;
        sequence.check_even(seq)?;
        let mut grant = self.grant("the tables of a fork", sequence.entries())?;
        let fork = sequence.fork(&mut grant);
        drop(sequence);
        Ok(self.insert(vec![fork])?[0])
    }
}

impl<C> Sequence<C> {
    /// Table entries of all layers.
    pub(crate) fn entries(&self) -> u64 {
        self.tables().map(Table::entry_count).sum::<usize>() as u64
    }

    /// Shares all pages with a new sequence. Pages that were reserved stay, but may be too few from now on.
    pub(crate) fn fork(&mut self, grant: &mut Grant<C>) -> Self {
        self.target = 0;
        self.share(grant)
    }

    /// A sequence with the same tokens in the same pages and nothing reserved; the caller sees to it that this one
    /// reserves anew before it writes.
    pub(crate) fn share(&self, grant: &mut Grant<C>) -> Self {
        Self {
            start: self.start,
            layers: self.layers.iter().map(|layer| layer.share(grant)).collect(),
            target: 0,
            prompt: self.prompt,
            shared: Supply::default(),
            parked: None,
        }
    }
}

impl<C> LayerState<C> {
    fn share(&self, grant: &mut Grant<C>) -> Self {
        let Self { length, origin, longest, .. } = *self;
        Self {
            length,
            origin,
            longest,
            tables: self.tables.iter().map(|table| table.share(grant)).collect(),
            supplies: self.tables.iter().map(|_| Supply::default()).collect(),
            kept: Supply::default(),
            evict: self.evict.share(),
        }
    }
}
