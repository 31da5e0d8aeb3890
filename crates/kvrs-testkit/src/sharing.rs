//! Forks, snapshots and the moving of rows, in both stores of a [`Pair`].

use crate::naive::Sequence;
use crate::pair::Pair;
use kvrs::{Chunk, Compress, Result, SeqId, Snapshot};
use kvrs_codec::backend::Backend;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Layer, head and index.
type Place = (usize, usize, usize);

/// A snapshot, and what it ought to hold.
#[derive(Debug, Clone)]
pub struct Frozen<C = Chunk> {
    /// That of the store under test.
    pub snapshot: Snapshot<C>,
    contents: Contents,
    _alive: Arc<()>,
}

/// A sequence's file, and what it ought to hold.
#[derive(Debug, Clone)]
pub struct Saved {
    /// The file.
    pub bytes: Vec<u8>,
    contents: Contents,
}

/// What the naive store and the bookkeeping of sealed tokens know of a sequence.
#[derive(Debug, Clone)]
struct Contents {
    sequence: Sequence,
    sealed: BTreeMap<Place, (Vec<f32>, Vec<f32>)>,
}

impl<B: Backend> Pair<B> {
    fn contents(&self, id: SeqId) -> Contents {
        let places = self.sealed.iter().filter(|(place, _)| place.0 == id);
        let sealed = places.map(|((_, l, h, i), kv)| ((*l, *h, *i), kv.clone())).collect();
        Contents { sequence: self.naive.sequences[&id].clone(), sealed }
    }

    fn put(&mut self, id: SeqId, contents: Contents) {
        self.forget(id);
        self.naive.sequences.insert(id, contents.sequence);
        self.sealed.extend(contents.sealed.into_iter().map(|((l, h, i), kv)| ((id, l, h, i), kv)));
    }

    fn forget(&mut self, id: SeqId) {
        self.naive.sequences.remove(&id);
        self.sealed.retain(|place, _| place.0 != id);
    }

    /// Forks a sequence in both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn fork(&mut self, id: SeqId) -> Result<SeqId> {
        let fork = self.store.fork(id)?;
        self.put(fork, self.contents(id));
        Ok(fork)
    }

    /// Removes a range of tokens from both.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn remove(&mut self, id: SeqId, range: std::ops::Range<usize>) {
        self.store.remove(id, range.start, range.end).expect("a range inside the sequence");
        self.naive.remove(id, &range);
        self.sealed.retain(|place, _| place.0 != id || !range.contains(&place.3));
    }

    /// Reorders both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn reorder(&mut self, seqs: &[SeqId], index: &[usize]) -> Result<()> {
        self.store.reorder(seqs, index)?;
        let contents: Vec<_> = index.iter().map(|row| self.contents(seqs[*row])).collect();
        seqs.iter().zip(contents).for_each(|(id, contents)| self.put(*id, contents));
        Ok(())
    }

    /// Selects rows of both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn select_rows(&mut self, seqs: &[SeqId], index: &[usize]) -> Result<Vec<SeqId>> {
        let ids = self.store.select_rows(seqs, index)?;
        let contents: Vec<_> = index.iter().map(|row| self.contents(seqs[*row])).collect();
        for id in seqs {
            self.forget(*id);
        }
        ids.iter().zip(contents).for_each(|(id, contents)| self.put(*id, contents));
        Ok(ids)
    }

    /// Takes a snapshot of a sequence of both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn snapshot(&mut self, id: SeqId) -> Result<Frozen<B::Chunk>> {
        let (snapshot, contents) = (self.store.snapshot(id)?, self.contents(id));
        Ok(Frozen { snapshot, contents, _alive: Arc::clone(&self.frozen) })
    }

    /// A sequence that starts from a snapshot, in both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn create_from(&mut self, frozen: &Frozen<B::Chunk>) -> Result<SeqId> {
        let id = self.store.create_from(1, &frozen.snapshot)?[0];
        self.put(id, frozen.contents.clone());
        Ok(id)
    }

    /// Saves a sequence of both.
    ///
    /// # Errors
    /// What the store answered.
    pub fn save(&self, id: SeqId, compress: Compress) -> Result<Saved> {
        let mut bytes = Vec::new();
        self.store.save_to("memory", &mut bytes, id, compress)?;
        Ok(Saved { bytes, contents: self.contents(id) })
    }

    /// Loads a sequence into both.
    ///
    /// # Errors
    /// What the store answered; nothing has changed then.
    pub fn load(&mut self, saved: &Saved) -> Result<SeqId> {
        let id = self.store.load_from("memory", std::io::Cursor::new(&saved.bytes))?;
        self.put(id, saved.contents.clone());
        Ok(id)
    }
}
