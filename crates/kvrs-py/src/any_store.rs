//! Stores of all backends behind one type.

use kvrs::{
    Compress, Decoded, Error, HeadSelection, KvStore, Plan, Queries, Result, ScoreFn, SeqId, Stats, Tokens,
    ViewMut,
};
use kvrs_codec::backend::Backend;
use std::any::Any;
use std::path::Path;
use std::sync::Arc;

/// A snapshot of a store of any backend.
pub(crate) struct Frozen {
    /// The `kvrs::Snapshot` of the store's own kind.
    snapshot: Box<dyn Any + Send + Sync>,
    pub(crate) length: usize,
}

impl Frozen {
    fn new<C: Send + Sync + 'static>(snapshot: kvrs::Snapshot<C>) -> Self {
        Self { length: snapshot.length(), snapshot: Box::new(snapshot) }
    }
}

/// Declares the store's methods that name no type of a backend, and passes them on.
macro_rules! any_store {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $out:ty;)*) => {
        /// What Python asks of a store: the methods of [`KvStore`], whose documentation is theirs.
        #[allow(clippy::too_many_arguments, reason = "those of the store")]
        pub(crate) trait AnyStore: Send + Sync {
            $(fn $name(&self $(, $argument: $type)*) -> $out;)*
            fn create_from(&self, n: usize, snapshot: &Frozen) -> Result<Vec<SeqId>>;
            fn snapshot(&self, seq: SeqId) -> Result<Frozen>;
            fn find_prefix(&self, token_ids: &[i64]) -> Result<Option<(Frozen, usize)>>;
        }

        impl<B: Backend> AnyStore for KvStore<B> {
            $(fn $name(&self $(, $argument: $type)*) -> $out {
                KvStore::$name(self $(, $argument)*)
            })*

            fn create_from(&self, n: usize, snapshot: &Frozen) -> Result<Vec<SeqId>> {
                match snapshot.snapshot.downcast_ref::<kvrs::Snapshot<B::Chunk>>() {
                    Some(snapshot) => KvStore::create_from(self, n, snapshot),
                    None => {
                        Err(Error::argument("from_", "a snapshot of another store", "a snapshot of this store"))
                    }
                }
            }

            fn snapshot(&self, seq: SeqId) -> Result<Frozen> {
                KvStore::snapshot(self, seq).map(Frozen::new)
            }

            fn find_prefix(&self, token_ids: &[i64]) -> Result<Option<(Frozen, usize)>> {
                let found = KvStore::find_prefix(self, token_ids)?;
                Ok(found.map(|(snapshot, n)| (Frozen::new(snapshot), n)))
            }
        }
    };
}

any_store! {
    fn plan(&self) -> &Plan;
    fn create(&self, n: usize) -> Result<Vec<SeqId>>;
    fn append(&self, layer: usize, seqs: &[SeqId], tokens: &Tokens<'_>) -> Result<()>;
    fn append_with(&self, layer: usize, seqs: &[SeqId], tokens: &Tokens<'_>, queries: &Queries<'_>) -> Result<()>;
    fn attend(
        &self,
        layer: usize,
        seqs: &[SeqId],
        queries: &Queries<'_>,
        out: &mut ViewMut<'_>,
        lse: Option<&mut [f32]>
    ) -> Result<()>;
    fn extend(
        &self,
        layer: usize,
        seqs: &[SeqId],
        queries: &Queries<'_>,
        tokens: &Tokens<'_>,
        out: &mut ViewMut<'_>,
        lse: Option<&mut [f32]>
    ) -> Result<()>;
    fn take_warnings(&self) -> Vec<String>;
    fn begin_prompt(&self, seqs: &[SeqId]) -> Result<()>;
    fn end_prompt(&self, seqs: &[SeqId]) -> Result<()>;
    fn reserve(&self, seqs: &[SeqId], tokens: usize) -> Result<()>;
    fn length(&self, seq: SeqId, layer: Option<usize>) -> Result<usize>;
    fn kept_positions(&self, seq: SeqId, layer: usize, head: usize) -> Result<Vec<i64>>;
    fn selection_report(&self, seq: SeqId) -> Result<Vec<HeadSelection>>;
    fn decode(&self, layer: usize, seq: SeqId, head: usize) -> Result<Decoded>;
    fn decode_into(
        &self,
        layer: usize,
        seqs: &[SeqId],
        keys: &mut ViewMut<'_>,
        values: &mut ViewMut<'_>
    ) -> Result<Vec<usize>>;
    fn keep(&self, seq: SeqId, layer: usize, positions: &[Vec<i64>]) -> Result<()>;
    fn truncate(&self, seq: SeqId, n: usize) -> Result<()>;
    fn drop_last(&self, seq: SeqId, n: usize) -> Result<()>;
    fn remove(&self, seq: SeqId, start: usize, stop: usize) -> Result<()>;
    fn fork(&self, seq: SeqId) -> Result<SeqId>;
    fn reorder(&self, seqs: &[SeqId], index: &[usize]) -> Result<()>;
    fn select_rows(&self, seqs: &[SeqId], index: &[usize]) -> Result<Vec<SeqId>>;
    fn publish(&self, seq: SeqId, token_ids: &[i64]) -> Result<usize>;
    fn save(&self, path: &Path, seq: SeqId, compress: Compress) -> Result<()>;
    fn load(&self, path: &Path) -> Result<SeqId>;
    fn to_host(&self, seqs: &[SeqId]) -> Result<()>;
    fn to_device(&self, seqs: &[SeqId]) -> Result<()>;
    fn free(&self, seq: SeqId) -> Result<()>;
    fn reset(&self) -> Result<()>;
    fn stats(&self) -> Result<Stats>;
    fn check(&self) -> Result<()>;
}

/// A store on `backend`; `functions` are the caller's own scores.
pub(crate) fn new_store<B: Backend>(
    plan: Plan,
    backend: Arc<B>,
    capacity: Option<u64>,
    functions: Option<Arc<ScoreFn>>,
) -> Result<Box<dyn AnyStore>> {
    let mut store = KvStore::new(plan, backend, capacity)?;
    if let Some(functions) = functions {
        store.set_score(functions);
    }
    Ok(Box::new(store))
}
