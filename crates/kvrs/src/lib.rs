//! A KV-cache store that keeps keys and values packed and computes attention on the packed bytes.
//!
//! A [`Plan`] says what to keep and how, a [`KvStore`] keeps it:
//!
//! ```
//! use kvrs::{CodecSpec, Cpu, Dtype, Geometry, KvStore, LayerShape, ModelShape, Plan, Queries, Rope, Tokens, View, ViewMut};
//!
//! let layer = LayerShape { query_heads: 2, kv_heads: 1, key_dim: 64, value_dim: 64, rope: Some(Rope::new(1e4)), sliding: None };
//! let plan = Plan::uniform(ModelShape::uniform(1, layer), &CodecSpec::turboquant(4.0))?;
//! let store = KvStore::new(plan, Cpu::shared(), None)?;
//! let seq = store.create(1)?;
//! let data: Vec<u8> = (0..300 * 64).flat_map(|i| ((i as f32 * 0.7).sin()).to_le_bytes()).collect();
//! let kv = View::new("k", &data, Geometry::contiguous(Dtype::F32, [1, 1, 300, 64]))?;
//! store.append(0, &seq, &Tokens::new(kv, kv))?;
//! let q = View::new("q", &data, Geometry::contiguous(Dtype::F32, [1, 2, 1, 64]))?;
//! let mut out = vec![0; 2 * 64 * 4];
//! let mut out = ViewMut::new("out", &mut out, Geometry::contiguous(Dtype::F32, [1, 2, 1, 64]))?;
//! store.attend(0, &seq, &Queries::new(q), &mut out, None)?;
//! assert!(store.stats()?.bytes_codes > 0);
//! # Ok::<(), kvrs::Error>(())
//! ```
#![forbid(unsafe_code)]

mod append;
mod attend;
mod calibration;
mod columns;
mod compile;
mod constant;
mod evict;
mod file;
mod fork;
mod hash;
mod input;
mod joint;
mod keep;
mod locks;
mod memory;
mod park;
mod plan;
mod plan_file;
mod prefix;
mod read;
mod remove;
mod reorder;
mod reserve;
mod room;
mod sequence;
mod snapshot;
mod stats;
mod store;
mod top_k;
mod truncate;

pub use calibration::Calibration;
pub use compile::LayerReport;
pub use evict::ScoreFn;
pub use evict::report::{HeadSelection, PolicyStats};
pub use file::{Compress, SequenceFile, inspect};
pub use input::{Queries, Tokens};
pub use joint::JointSpec;
pub use kvrs_codec::calibrated::{Array, Arrays};
pub use kvrs_codec::codebook::Book;
pub use kvrs_codec::quant::{self, CodecSpec};
pub use kvrs_codec::view::Geometry;
pub use kvrs_codec::{Dtype, View, ViewMut};
pub use kvrs_core::alloc;
pub use kvrs_core::budget::{self, Budget};
pub use kvrs_core::policy::{self, PolicySpec};
pub use kvrs_core::{Error, LayerShape, ModelShape, Pairing, Result, Rope, SeqId};
pub use kvrs_cpu::memory::Chunk;
pub use kvrs_cpu::{Cpu, Isa, get_num_threads, set_num_threads};
pub use memory::Memory;
pub use plan::{Plan, PlanSpec};
pub use read::Decoded;
pub use snapshot::Snapshot;
pub use stats::{LayerStats, Stats};
pub use store::KvStore;
pub use top_k::AttendSpec;
