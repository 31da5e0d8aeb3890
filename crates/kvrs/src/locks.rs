//! Locking of sequences: always in ascending order of ids, whatever the order in a call.
//!
//! Lock order of the store: id map, sequences ascending, published prefixes, arena. A poisoned lock means that a
//! panic broke a sequence half-way; the store then answers with an internal error.

use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Error, Result, SeqId};
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

pub(crate) type Shared<C> = Arc<RwLock<Sequence<C>>>;

/// One sequence of a call.
pub(crate) struct Row<C> {
    id: SeqId,
    sequence: Shared<C>,
}

/// The sequences of a call, in the order of the call.
pub(crate) struct Rows<C> {
    rows: Vec<Row<C>>,
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
        let rows = seqs.iter().map(|id| row(&map, *id)).collect::<Result<_>>()?;
        Ok(Rows { rows, order })
    }

    /// One sequence.
    pub(crate) fn row(&self, seq: SeqId) -> Result<Row<B::Chunk>> {
        row(&*self.sequences.read().map_err(broken)?, seq)
    }
}

pub(crate) fn unknown(seq: SeqId, live: usize) -> Error {
    let allowed = format!("an id that `new` gave and that was not freed ({live} sequences live)");
    Error::sequence("seq", format!("{seq}, which is not in this store"), allowed)
}

fn row<C>(map: &BTreeMap<SeqId, Shared<C>>, id: SeqId) -> Result<Row<C>> {
    let sequence = map.get(&id).cloned().ok_or_else(|| unknown(id, map.len()))?;
    Ok(Row { id, sequence })
}

impl<C> Row<C> {
    /// A read lock on a sequence that is not parked.
    pub(crate) fn read(&self) -> Result<RwLockReadGuard<'_, Sequence<C>>> {
        self.awake(self.read_parked()?)
    }

    /// A write lock on a sequence that is not parked.
    pub(crate) fn write(&self) -> Result<RwLockWriteGuard<'_, Sequence<C>>> {
        self.awake(self.write_parked()?)
    }

    /// A read lock, also on a parked sequence.
    pub(crate) fn read_parked(&self) -> Result<RwLockReadGuard<'_, Sequence<C>>> {
        self.sequence.read().map_err(broken)
    }

    fn write_parked(&self) -> Result<RwLockWriteGuard<'_, Sequence<C>>> {
        self.sequence.write().map_err(broken)
    }

    /// `None` if the lock would have to be waited for.
    fn try_write(&self) -> Result<Option<RwLockWriteGuard<'_, Sequence<C>>>> {
        match self.sequence.try_write() {
            Ok(guard) => self.awake(guard).map(Some),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Poisoned(poisoned)) => Err(broken(poisoned)),
        }
    }

    fn awake<G: Deref<Target = Sequence<C>>>(&self, guard: G) -> Result<G> {
        if guard.parked.is_none() {
            return Ok(guard);
        }
        let got = format!("{}, whose pages are parked in host memory", self.id);
        Err(Error::sequence("seq", got, "a sequence in the store's memory: to_device brings it back"))
    }
}

impl<C> Rows<C> {
    /// Read locks, in the order of the call.
    pub(crate) fn read(&self) -> Result<Vec<RwLockReadGuard<'_, Sequence<C>>>> {
        self.lock(Row::read)
    }

    /// Write locks, in the order of the call.
    pub(crate) fn write(&self) -> Result<Vec<RwLockWriteGuard<'_, Sequence<C>>>> {
        self.lock(Row::write)
    }

    /// Write locks, in the order of the call, also on parked sequences.
    pub(crate) fn write_parked(&self) -> Result<Vec<RwLockWriteGuard<'_, Sequence<C>>>> {
        self.lock(Row::write_parked)
    }

    /// Write locks, in the order of the call; `None`, and none of them, if one would have to be waited for.
    pub(crate) fn try_write(&self) -> Result<Option<Vec<RwLockWriteGuard<'_, Sequence<C>>>>> {
        self.rows.iter().map(|row| row.try_write().transpose()).collect::<Option<_>>().transpose()
    }

    fn lock<'a, G>(&'a self, lock: impl Fn(&'a Row<C>) -> Result<G>) -> Result<Vec<G>> {
        if self.order.is_sorted() {
            return self.rows.iter().map(lock).collect();
        }
        let mut guards: Vec<Option<G>> = self.rows.iter().map(|_| None).collect();
        for &row in &self.order {
            guards[row] = Some(lock(&self.rows[row])?);
        }
        Ok(guards.into_iter().map(|g| g.expect("every row was locked")).collect())
    }
}
