//! Published prefixes: found again by their token ids, and given up, the least recently used first, when room is needed.
//!
//! Tokens are compared by a chain of SHA-256 over blocks of 64 ids, which begins with the plan's hash.

use crate::locks::broken;
use crate::sequence::Sequence;
use crate::snapshot::Snapshot;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::Table;
use kvrs_core::{Error, Result, SeqId};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Tokens of a block.
const BLOCK: usize = 64;

type Hash = [u8; 32];

/// The published prefixes of a store.
#[derive(Debug)]
pub(crate) struct Prefixes<C>(Mutex<Cache<C>>);

#[derive(Debug)]
struct Cache<C> {
    published: BTreeMap<u64, Published<C>>,
    /// Prefixes that begin with the tokens of each chain.
    by_hash: BTreeMap<Hash, Vec<u64>>,
    /// Uses so far.
    clock: u64,
}

#[derive(Debug)]
struct Published<C> {
    snapshot: Snapshot<C>,
    /// Hash of the tokens up to the end of each block.
    chain: Vec<Hash>,
    used: u64,
}

impl<C> Default for Prefixes<C> {
    fn default() -> Self {
        Self(Mutex::new(Cache { published: BTreeMap::new(), by_hash: BTreeMap::new(), clock: 0 }))
    }
}

impl<C> Prefixes<C> {
    /// Gives up the prefix that was not used for longest, of those that nobody else holds; false if there is none.
    pub(crate) fn drop_oldest(&self) -> bool {
        let Ok(mut cache) = self.0.lock() else { return false };
        let free = cache.published.iter().filter(|(_, published)| published.snapshot.is_last());
        let Some(oldest) = free.min_by_key(|(_, published)| published.used).map(|(id, _)| *id) else {
            return false;
        };
        let dropped = cache.remove(oldest);
        drop(cache);
        dropped.is_some()
    }

    /// Forgets all prefixes.
    pub(crate) fn clear(&self) -> Result<()> {
        let published = {
            let mut cache = self.0.lock().map_err(broken)?;
            cache.by_hash.clear();
            std::mem::take(&mut cache.published)
        };
        drop(published);
        Ok(())
    }

    /// Counts a use of the prefix with exactly these tokens; false if it is not published.
    fn touch(&self, chain: &[Hash]) -> Result<bool> {
        let mut cache = self.0.lock().map_err(broken)?;
        let known = chain.last().and_then(|hash| cache.by_hash.get(hash)).cloned().unwrap_or_default();
        let known = known.into_iter().find(|id| cache.published[id].chain.len() == chain.len());
        if let Some(id) = known {
            cache.use_now(id);
        }
        Ok(known.is_some())
    }

    fn add(&self, snapshot: Snapshot<C>, chain: Vec<Hash>) -> Result<()> {
        let mut cache = self.0.lock().map_err(broken)?;
        cache.clock += 1;
        let id = cache.clock;
        for hash in &chain {
            cache.by_hash.entry(*hash).or_default().push(id);
        }
        cache.published.insert(id, Published { snapshot, chain, used: id });
        Ok(())
    }

    /// The longest published beginning of the tokens behind `chain` that is `usable(snapshot, tokens)`.
    fn find(
        &self,
        chain: &[Hash],
        usable: impl Fn(&Snapshot<C>, usize) -> bool,
    ) -> Result<Option<(Snapshot<C>, usize)>> {
        let mut cache = self.0.lock().map_err(broken)?;
        for (block, hash) in chain.iter().enumerate().rev() {
            let tokens = (block + 1) * BLOCK;
            let ids = cache.by_hash.get(hash).into_iter().flatten().rev().copied();
            if let Some(id) = ids.into_iter().find(|id| usable(&cache.published[id].snapshot, tokens)) {
                cache.use_now(id);
                return Ok(Some((cache.published[&id].snapshot.clone(), tokens)));
            }
        }
        Ok(None)
    }
}

impl<C> Cache<C> {
    fn use_now(&mut self, id: u64) {
        self.clock += 1;
        if let Some(published) = self.published.get_mut(&id) {
            published.used = self.clock;
        }
    }

    fn remove(&mut self, id: u64) -> Option<Published<C>> {
        let removed = self.published.remove(&id)?;
        for hash in &removed.chain {
            if let Some(ids) = self.by_hash.get_mut(hash) {
                ids.retain(|other| *other != id);
                if ids.is_empty() {
                    self.by_hash.remove(hash);
                }
            }
        }
        Some(removed)
    }
}

impl<B: Backend> KvStore<B> {
    /// Publishes the whole blocks of 64 tokens that a sequence begins with, so that [`KvStore::find_prefix`] finds
    /// them by their ids; returns the number of tokens. `token_ids` are those of the sequence from its first token on.
    ///
    /// Under a capacity, published prefixes that nobody else holds make way for new pages, the least recently used
    /// first; sequences that were made from them keep what they have.
    ///
    /// # Errors
    /// [`Error::Sequence`] for an unknown id, a sequence with an open prompt or in the middle of a step, more ids than
    /// tokens, or a length to which the sequence cannot be truncated; [`Error::Capacity`] if the tables do not fit.
    pub fn publish(&self, seq: SeqId, token_ids: &[i64]) -> Result<usize> {
        let row = self.row(seq)?;
        let mut sequence = row.write()?;
        sequence.check_closed(seq)?;
        let length = sequence.length();
        if token_ids.len() > length {
            let allowed = format!("at most {length}, the length of sequence {seq}");
            return Err(Error::sequence("token_ids", format!("{} ids", token_ids.len()), allowed));
        }
        let chain = self.chain(token_ids);
        let n = chain.len() * BLOCK;
        self.check_cut(&sequence, n)?;
        if n == 0 || self.prefixes.touch(&chain)? {
            return Ok(n);
        }
        let mut grant = self.grant("the tables of a prefix", sequence.entries())?;
        let mut prefix = sequence.fork(&mut grant);
        drop(sequence);
        prefix.truncate(n, self.plan.spec().sinks);
        self.prefixes.add(self.freeze(prefix)?, chain)?;
        Ok(n)
    }

    /// The longest published prefix of the tokens, and how many of them it holds: a multiple of 64.
    ///
    /// A longer prefix serves too, cut to the tokens that are the same, unless a sliding window or a policy has
    /// dropped some of them.
    ///
    /// # Errors
    /// [`Error::Capacity`] if the tables of a cut prefix do not fit.
    pub fn find_prefix(&self, token_ids: &[i64]) -> Result<Option<(Snapshot<B::Chunk>, usize)>> {
        let chain = self.chain(token_ids);
        let usable = |snapshot: &Snapshot<B::Chunk>, n: usize| {
            let sequence = snapshot.sequence();
            snapshot.length() == n || (self.check_cut(sequence, n).is_ok() && self.has_all(sequence))
        };
        let Some((snapshot, n)) = self.prefixes.find(&chain, usable)? else { return Ok(None) };
        if snapshot.length() == n {
            return Ok(Some((snapshot, n)));
        }
        let mut grant = self.grant("the tables of a prefix", snapshot.sequence().entries())?;
        let mut cut = snapshot.sequence().share(&mut grant);
        cut.truncate(n, self.plan.spec().sinks);
        Ok(Some((self.freeze(cut)?, n)))
    }

    /// Hash of the tokens up to the end of each whole block.
    fn chain(&self, token_ids: &[i64]) -> Vec<Hash> {
        let mut last: Hash = Sha256::digest(self.plan.hash()).into();
        let blocks = token_ids.chunks_exact(BLOCK);
        let next = |block: &[i64]| {
            let mut sha = Sha256::new();
            sha.update(last);
            for id in block {
                sha.update(id.to_le_bytes());
            }
            last = sha.finalize().into();
            last
        };
        blocks.map(next).collect()
    }

    /// Whether no policy has dropped a token.
    fn has_all(&self, sequence: &Sequence<B::Chunk>) -> bool {
        let Ok(plan) = self.compiled() else { return false };
        let layers = sequence.layers.iter().zip(&plan.layers).filter(|(_, plan)| plan.evict.is_some());
        layers.into_iter().all(|(state, _)| state.tables.iter().map(Table::kept).all(|n| n == state.length))
    }
}
