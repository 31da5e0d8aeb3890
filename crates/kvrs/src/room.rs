//! Room in the arena: what a call needs is taken at once, and published prefixes make way for it.

use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::{Grant, Supply};
use kvrs_core::{Error, Result};

impl<B: Backend> KvStore<B> {
    /// Takes `(page bytes, count)` pages, all or none; `what` names the caller in the error.
    pub(crate) fn pages(&self, what: &str, wants: &[(u32, usize)]) -> Result<Supply<B::Chunk>> {
        self.making_room(|| self.arena.reserve(what, wants))
    }

    /// Takes room for `entries` table entries that share pages.
    pub(crate) fn grant(&self, what: &str, entries: u64) -> Result<Grant<B::Chunk>> {
        self.making_room(|| self.arena.grant(what, entries))
    }

    /// Tries until it succeeds or no published prefix is left that nobody else holds.
    fn making_room<T>(&self, take: impl Fn() -> Result<T>) -> Result<T> {
        loop {
            match take() {
                Err(Error::Capacity { needed, capacity, .. })
                    if needed <= capacity && self.prefixes.drop_oldest() => {}
                answer => return answer,
            }
        }
    }
}
