//! Moving sequences between rows: beams that change places, and batches that shrink and grow.

use crate::locks::{Rows, Shared, broken, unknown};
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::{ChunkSource, Grant};
use kvrs_core::{Error, Result, SeqId};
use std::collections::BTreeMap;
use std::ops::DerefMut;
use std::sync::RwLockWriteGuard;

type MapGuard<'a, B> = RwLockWriteGuard<'a, BTreeMap<SeqId, Shared<<B as ChunkSource>::Chunk>>>;
type Writes<'a, B> = Vec<RwLockWriteGuard<'a, Sequence<<B as ChunkSource>::Chunk>>>;

impl<B: Backend> KvStore<B> {
    /// Afterwards `seqs[i]` holds what `seqs[index[i]]` held; ids stay. Rows that share a source share its pages, and
    /// rows that are no source are dropped. Only tables move.
    ///
    /// # Errors
    /// [`Error::Shape`] if `index` has not one number per row, [`Error::Argument`] for one that is no row,
    /// [`Error::Sequence`] for unknown or doubled ids and sequences in the middle of a step, [`Error::Capacity`] if
    /// the tables do not fit.
    pub fn reorder(&self, seqs: &[SeqId], index: &[usize]) -> Result<()> {
        if index.len() != seqs.len() {
            let got = format!("{} numbers", index.len());
            return Err(Error::shape("index", got, format!("{}, one per sequence", seqs.len())));
        }
        check_index(index, seqs.len())?;
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        check_even(&rows, seqs)?;
        let mut grant = self.grant("the tables of reordered sequences", extra_entries(&rows, index))?;
        let moved = gathered(&mut rows, index, &mut grant, || self.empty());
        let dropped: Vec<_> =
            rows.iter_mut().zip(moved).map(|(row, new)| std::mem::replace(&mut **row, new)).collect();
        drop(rows);
        drop(dropped);
        Ok(())
    }

    /// New sequences, of which the i-th holds what `seqs[index[i]]` held; those of `seqs` are freed. A batch shrinks,
    /// grows and repeats rows by it.
    ///
    /// # Errors
    /// As [`KvStore::reorder`], but `index` may have any length.
    pub fn select_rows(&self, seqs: &[SeqId], index: &[usize]) -> Result<Vec<SeqId>> {
        check_index(index, seqs.len())?;
        Self::check_new(index.len())?;
        let rows = self.rows(seqs)?;
        let (mut map, mut locked) = self.map_with(&rows)?;
        if let Some(gone) = seqs.iter().find(|id| !map.contains_key(id)) {
            return Err(unknown(*gone, map.len()));
        }
        check_even(&locked, seqs)?;
        let mut grant = self.grant("the tables of selected sequences", extra_entries(&locked, index))?;
        let moved = gathered(&mut locked, index, &mut grant, || self.empty());
        drop(locked);
        let freed: Vec<_> = seqs.iter().map(|id| map.remove(id)).collect();
        let ids = self.insert_into(&mut map, moved);
        drop(map);
        drop((freed, rows));
        Ok(ids)
    }

    /// The id map and sequences, all locked to be written.
    ///
    /// While another call has one of the sequences, the map stays open to everybody: it is let go, the sequences are
    /// waited for, and both are tried again.
    fn map_with<'a>(&'a self, rows: &'a Rows<B::Chunk>) -> Result<(MapGuard<'a, B>, Writes<'a, B>)> {
        loop {
            let map = self.sequences.write().map_err(broken)?;
            if let Some(locked) = rows.try_write()? {
                return Ok((map, locked));
            }
            drop(map);
            drop(rows.write()?);
        }
    }
}

fn check_index(index: &[usize], rows: usize) -> Result<()> {
    match index.iter().position(|row| *row >= rows) {
        Some(i) => Err(Error::argument(format!("index[{i}]"), index[i], format!("a row below {rows}"))),
        None => Ok(()),
    }
}

fn check_even<C>(rows: &[impl DerefMut<Target = Sequence<C>>], seqs: &[SeqId]) -> Result<()> {
    rows.iter().zip(seqs).try_for_each(|(row, id)| row.check_even(*id))
}

/// How often each row is a source.
fn uses(rows: usize, index: &[usize]) -> Vec<u64> {
    let mut uses = vec![0; rows];
    for row in index {
        uses[*row] += 1;
    }
    uses
}

/// Table entries of all copies beyond the first of each source.
fn extra_entries<C>(rows: &[impl DerefMut<Target = Sequence<C>>], index: &[usize]) -> u64 {
    let uses = uses(rows.len(), index);
    rows.iter().zip(uses).map(|(row, uses)| row.entries() * uses.saturating_sub(1)).sum()
}

/// The contents that `index` names: each source itself where it is named last, and forks of it before. Rows that
/// were sources are empty then.
fn gathered<C>(
    rows: &mut [impl DerefMut<Target = Sequence<C>>],
    index: &[usize],
    grant: &mut Grant<C>,
    empty: impl Fn() -> Sequence<C>,
) -> Vec<Sequence<C>> {
    let mut left = uses(rows.len(), index);
    let take = |source: &usize| {
        left[*source] -= 1;
        let row = &mut *rows[*source];
        if left[*source] > 0 { row.fork(grant) } else { std::mem::replace(row, empty()) }
    };
    index.iter().map(take).collect()
}
