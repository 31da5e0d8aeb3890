//! The store: sequences, their memory and the plan that they follow.

use crate::compile::{Compiled, LayerPlan};
use crate::constant::ConstantWatch;
use crate::evict::Score;
use crate::locks::{Shared, broken, unknown};
use crate::plan::Plan;
use crate::prefix::Prefixes;
use crate::sequence::Sequence;
use crate::snapshot::Alive;
use kvrs_codec::Dtype;
use kvrs_codec::backend::{Backend, ValueTiles};
use kvrs_core::page::Arena;
use kvrs_core::{Error, Result, SeqId};
use kvrs_cpu::Cpu;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

/// The input type of the first append and the 16-bit type of uncompressed tokens that follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Types {
    pub(crate) input: Dtype,
    pub(crate) window: Dtype,
}

/// A KV-cache store; see the crate's example. It may be shared between threads.
#[derive(Debug)]
pub struct KvStore<B: Backend = Cpu> {
    pub(crate) plan: Plan,
    pub(crate) backend: Arc<B>,
    pub(crate) arena: Arena<B>,
    pub(crate) sequences: RwLock<BTreeMap<SeqId, Shared<B::Chunk>>>,
    next_id: AtomicU64,
    pub(crate) types: OnceLock<Types>,
    pub(crate) encoded: AtomicU64,
    pub(crate) constants: ConstantWatch,
    pub(crate) warnings: Mutex<Vec<String>>,
    pub(crate) score: Score,
    pub(crate) value_tiles: ValueTiles,
    /// Tells this store from every other one of the process.
    pub(crate) id: u64,
    pub(crate) snapshots: Alive<B::Chunk>,
    pub(crate) prefixes: Prefixes<B::Chunk>,
}

impl<B: Backend> KvStore<B> {
    /// An empty store; `capacity` is a hard limit in bytes on everything that it allocates for tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] for a capacity below the smallest chunk; those of [`Backend::check`].
    pub fn new(plan: Plan, backend: Arc<B>, capacity: Option<u64>) -> Result<Self> {
        static STORES: AtomicU64 = AtomicU64::new(0);
        backend.check()?;
        let arena = Arena::new(Arc::clone(&backend), capacity)?;
        let constants = ConstantWatch::new(&plan);
        Ok(Self {
            plan,
            backend,
            arena,
            sequences: RwLock::default(),
            next_id: AtomicU64::new(0),
            types: OnceLock::new(),
            encoded: AtomicU64::new(0),
            constants,
            warnings: Mutex::default(),
            score: Score::default(),
            value_tiles: ValueTiles::default(),
            id: STORES.fetch_add(1, Ordering::Relaxed),
            snapshots: Alive::default(),
            prefixes: Prefixes::default(),
        })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Makes `n` empty sequences.
    ///
    /// # Errors
    /// [`Error::Argument`] for an absurd `n`.
    pub fn create(&self, n: usize) -> Result<Vec<SeqId>> {
        Self::check_new(n)?;
        self.insert((0..n).map(|_| self.empty()).collect())
    }

    /// An empty sequence that is not in the store yet.
    pub(crate) fn empty(&self) -> Sequence<B::Chunk> {
        let spec = self.plan.spec();
        Sequence::new(&spec.shape.layers, spec.sinks)
    }

    /// Refuses an absurd number of new sequences.
    pub(crate) fn check_new(n: usize) -> Result<()> {
        const MOST: usize = 1 << 20;
        if n > MOST { Err(Error::argument("n", n, format!("0..={MOST}"))) } else { Ok(()) }
    }

    /// Gives sequences ids and puts them into the store.
    pub(crate) fn insert(&self, sequences: Vec<Sequence<B::Chunk>>) -> Result<Vec<SeqId>> {
        Ok(self.insert_into(&mut *self.sequences.write().map_err(broken)?, sequences))
    }

    /// As [`KvStore::insert`], into the locked map.
    pub(crate) fn insert_into(
        &self,
        map: &mut BTreeMap<SeqId, Shared<B::Chunk>>,
        sequences: Vec<Sequence<B::Chunk>>,
    ) -> Vec<SeqId> {
        let first = self.next_id.fetch_add(sequences.len() as u64, Ordering::Relaxed);
        let ids = (first..).map(SeqId).zip(sequences);
        let insert = |(id, sequence)| {
            map.insert(id, Arc::new(RwLock::new(sequence)));
            id
        };
        ids.map(insert).collect()
    }

    /// Frees a sequence; its pages go back at once.
    ///
    /// # Errors
    /// [`Error::Sequence`] for an id that is not in the store.
    pub fn free(&self, seq: SeqId) -> Result<()> {
        let mut map = self.sequences.write().map_err(broken)?;
        let live = map.len();
        let sequence = map.remove(&seq).ok_or_else(|| unknown(seq, live))?;
        drop(map);
        drop(sequence);
        Ok(())
    }

    /// Frees all sequences and forgets all published prefixes; snapshots that the caller holds stay.
    ///
    /// # Errors
    /// [`Error::Internal`] after a panic.
    pub fn reset(&self) -> Result<()> {
        let freed = std::mem::take(&mut *self.sequences.write().map_err(broken)?);
        drop(freed);
        self.prefixes.clear()
    }

    /// Takes the warnings that have come up since the last call.
    #[must_use]
    pub fn take_warnings(&self) -> Vec<String> {
        self.warnings.lock().map(|mut w| std::mem::take(&mut *w)).unwrap_or_default()
    }

    /// Checks every invariant of pages and tables.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the invariant that is broken.
    pub fn check(&self) -> Result<()> {
        let map = self.sequences.read().map_err(broken)?;
        for sequence in map.values() {
            sequence.read().map_err(broken)?.check()?;
        }
        drop(map);
        self.snapshots.get()?.iter().try_for_each(|snapshot| snapshot.sequence.check())?;
        self.arena.check()
    }

    /// The plan's layers for this store's window type (f16 until the first append).
    pub(crate) fn compiled(&self) -> Result<&Compiled> {
        self.plan.compiled(self.types.get().map_or(Dtype::F16, |t| t.window))
    }

    pub(crate) fn layer(&self, layer: usize) -> Result<&LayerPlan> {
        let layers = &self.compiled()?.layers;
        layers.get(layer).ok_or_else(|| Error::argument("layer", layer, format!("0..{}", layers.len())))
    }
}
