//! What to keep and where: the arena, page tables, windows, shapes, ids and errors of kvrs.
//!
//! Nothing here knows what the bytes of a page mean, or on which device they lie.
#![forbid(unsafe_code)]

pub mod alloc;
pub mod budget;
pub mod error;
pub mod ids;
pub mod page;
pub mod policy;
pub mod shape;
pub mod statistics;
pub mod window;

pub use error::{Error, Result};
pub use ids::SeqId;
pub use shape::{LayerShape, ModelShape, Pairing, Rope};
