//! Memory and its bookkeeping: chunks cut in slabs, slabs in pages, and page tables that say which token
//! stands in which slot.

mod arena;
mod compact;
mod entry;
mod evict;
mod footprint;
mod link;
mod pool;
mod restore;
mod slab;
mod space;
mod supply;
mod table;

pub use arena::{Arena, ArenaStats, ChunkSource};
pub use entry::{Entry, Slots};
pub use footprint::footprint;
pub use link::Grant;
pub use pool::ENTRY_BYTES;
pub use restore::EntryParts;
pub use supply::{Page, Supply};
pub use table::{PACKED_SLOTS, RAW_SLOTS, Table, Zone};

#[cfg(test)]
mod arena_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
pub(crate) mod testing;
