//! Locking of sequences: always in ascending order of ids, whatever the order in a call.
//!
//! Lock order of the store: id map, sequences ascending, published prefixes, arena. A poisoned lock means that a
//! panic broke a sequence half-way; the store then answers with an internal error.

use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Error, Result, SeqId};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) type Shared<C> = Arc<RwLock<Sequence<C>>>;

/// The sequences of a call, in the order of the call.
pub(crate) struct Rows<C> {
    sequences: Vec<Shared<C>>,
    /// Rows in ascending order of their ids.
    order: Vec<usize>,
}

pub(crate) fn broken<T>(_: T) -> Error {
    Error::Internal("a lock was poisoned by a panic".into())
}

impl<B: Backend> KvStore<B> {
    /// Looks up the sequences of a call.
    pub(crate) fn rows(&self, seqs: &[SeqId]) -> Result<Rows<B::Chunk>> {
        let mut order: Vec<usize> = (0..seqs.len()).collect();
        order.sort_by_key(|&row| seqs[row]);
        if let Some(pair) = order.windows(2).find(|p| seqs[p[0]] == seqs[p[1]]) {
            return Err(Error::sequence(
                "seqs",
                format!("{} twice", seqs[pair[0]]),
                "each id once in a call",
            ));
        }
        let map = self.sequences.read().map_err(broken)?;
        let sequences = seqs
            .iter()
            .map(|id| map.get(id).cloned().ok_or_else(|| unknown(*id, map.len())))
            .collect::<Result<_>>()?;
        Ok(Rows { sequences, order })
    }

    /// One sequence.
    pub(crate) fn row(&self, seq: SeqId) -> Result<Shared<B::Chunk>> {
        let map = self.sequences.read().map_err(broken)?;
        map.get(&seq).cloned().ok_or_else(|| unknown(seq, map.len()))
    }
}

pub(crate) fn unknown(seq: SeqId, live: usize) -> Error {
    let allowed = format!("an id that `new` gave and that was not freed ({live} sequences live)");
    Error::sequence("seq", format!("{seq}, which is not in this store"), allowed)
}

impl<C> Rows<C> {
    /// Read locks, in the order of the call.
    pub(crate) fn read(&self) -> Result<Vec<RwLockReadGuard<'_, Sequence<C>>>> {
        self.lock(|s| s.read().map_err(broken))
    }

    /// Write locks, in the order of the call.
    pub(crate) fn write(&self) -> Result<Vec<RwLockWriteGuard<'_, Sequence<C>>>> {
        self.lock(|s| s.write().map_err(broken))
    }

    fn lock<'a, G>(&'a self, lock: impl Fn(&'a Shared<C>) -> Result<G>) -> Result<Vec<G>> {
        if self.order.is_sorted() {
            return self.sequences.iter().map(lock).collect();
        }
        let mut guards: Vec<Option<G>> = self.sequences.iter().map(|_| None).collect();
        for &row in &self.order {
            guards[row] = Some(lock(&self.sequences[row])?);
        }
        Ok(guards.into_iter().map(|g| g.expect("every row was locked")).collect())
    }
}
