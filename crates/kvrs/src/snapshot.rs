//! Snapshots: prefixes that never change, from which sequences start.

use crate::locks::broken;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Error, Result, SeqId};
use std::sync::{Arc, Mutex, Weak};

/// The tokens of a sequence at one moment; a handle, whose pages live as long as any of its clones.
#[derive(Debug)]
pub struct Snapshot<C>(Arc<Frozen<C>>);

#[derive(Debug)]
pub(crate) struct Frozen<C> {
    pub(crate) sequence: Sequence<C>,
    store: u64,
}

/// The snapshots of a store that are alive, for its counting.
#[derive(Debug)]
pub(crate) struct Alive<C>(Mutex<Vec<Weak<Frozen<C>>>>);

impl<C> Clone for Snapshot<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> Snapshot<C> {
    /// Tokens that it holds.
    #[must_use]
    pub fn length(&self) -> usize {
        self.0.sequence.length()
    }

    pub(crate) fn sequence(&self) -> &Sequence<C> {
        &self.0.sequence
    }

    /// Whether no other handle to it is alive.
    pub(crate) fn is_last(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

impl<C> Default for Alive<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C> Alive<C> {
    fn add(&self, snapshot: &Snapshot<C>) -> Result<()> {
        let mut alive = self.0.lock().map_err(broken)?;
        alive.retain(|frozen| frozen.strong_count() > 0);
        alive.push(Arc::downgrade(&snapshot.0));
        Ok(())
    }

    /// Those that are alive now.
    pub(crate) fn get(&self) -> Result<Vec<Arc<Frozen<C>>>> {
        Ok(self.0.lock().map_err(broken)?.iter().filter_map(Weak::upgrade).collect())
    }
}

impl<B: Backend> KvStore<B> {
    /// Names the tokens that a sequence has now; it may go on, be truncated or freed.
    ///
    /// # Errors
    /// As [`KvStore::fork`].
    pub fn snapshot(&self, seq: SeqId) -> Result<Snapshot<B::Chunk>> {
        let row = self.row(seq)?;
        let mut sequence = row.write()?;
        sequence.check_even(seq)?;
        let mut grant = self.grant("the tables of a snapshot", sequence.entries())?;
        let frozen = sequence.fork(&mut grant);
        drop(sequence);
        self.freeze(frozen)
    }

    /// Makes `n` sequences that start with the tokens of a snapshot.
    ///
    /// # Errors
    /// [`Error::Argument`] for a snapshot of another store or an absurd `n`, [`Error::Capacity`] if the tables do
    /// not fit.
    pub fn create_from(&self, n: usize, snapshot: &Snapshot<B::Chunk>) -> Result<Vec<SeqId>> {
        if snapshot.0.store != self.id {
            return Err(Error::argument("from_", "a snapshot of another store", "a snapshot of this store"));
        }
        Self::check_new(n)?;
        let sequence = snapshot.sequence();
        let mut grant =
            self.grant("the tables of new sequences", sequence.entries().saturating_mul(n as u64))?;
        self.insert((0..n).map(|_| sequence.share(&mut grant)).collect())
    }

    pub(crate) fn freeze(&self, sequence: Sequence<B::Chunk>) -> Result<Snapshot<B::Chunk>> {
        let snapshot = Snapshot(Arc::new(Frozen { sequence, store: self.id }));
        self.snapshots.add(&snapshot)?;
        Ok(snapshot)
    }
}
