//! A compiled codec: a page descriptor with the constants that prepare queries, finish outputs and encode.

use crate::desc::{PageDesc, Side, SideDesc};
use crate::encode::Encode;
use crate::offset::KeyOffset;
use crate::phasor::Phasors;
use crate::transform::Transform;
use kvrs_core::LayerShape;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The constants of one side.
#[derive(Debug, Clone)]
pub struct SideCodec {
    /// Analysis of a vector into stored channels; its transpose is the synthesis.
    pub transform: Transform,
    /// 8-bit levels of all runs ([`crate::RunDesc::lut_at`]).
    pub lut8: Arc<[i8]>,
    /// f32 levels of all runs.
    pub lut32: Arc<[f32]>,
    /// Keys: the constant that was removed before encoding, added to scores.
    pub offset: Option<KeyOffset>,
    /// The mean that was removed before encoding `[d]`: values of any path, keys of the Tile path.
    pub mean: Option<Arc<[f32]>>,
    /// Keys of the Tile path: the rotary embedding applied to rebuilt tiles.
    pub rope: Option<Arc<Phasors>>,
    /// Turns vectors into codes and scales; `None` for 16-bit rows, which are written as they came.
    pub encoder: Option<Arc<dyn Encode>>,
}

/// Tells a codec from every other one of the process; clones keep it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodecId(u64);

impl CodecId {
    /// An id that no codec has yet.
    #[must_use]
    pub fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// One class of pages of a layer and head group.
#[derive(Debug, Clone)]
pub struct HeadCodec {
    /// By which backends find what they keep of it.
    pub id: CodecId,
    /// What the bytes mean.
    pub desc: PageDesc,
    /// Constants of the keys.
    pub key: SideCodec,
    /// Constants of the values.
    pub value: SideCodec,
}

impl HeadCodec {
    /// Descriptor and constants of a side.
    #[must_use]
    pub fn side(&self, side: Side) -> (&SideDesc, &SideCodec) {
        match side {
            Side::Key => (&self.desc.key, &self.key),
            Side::Value => (&self.desc.value, &self.value),
        }
    }
}

/// All classes of a layer: `classes[head group][class]`; class 0 is raw 16-bit, class 1 the plan's codec.
#[derive(Debug, Clone)]
pub struct LayerCodec {
    /// Heads, dimensions, rotary embedding and sliding window.
    pub shape: LayerShape,
    /// Key-value heads that share a page table.
    pub heads_per_group: usize,
    /// Per head group, per class.
    pub classes: Vec<Vec<HeadCodec>>,
}

impl SideCodec {
    /// Prepares a query for the Dot path: `z = B^T q`, `[vec_len]`.
    ///
    /// # Panics
    /// If `q` is not `[d]` or `z` not as long as the transform's output.
    pub fn prepare(&self, q: &[f32], z: &mut [f32]) {
        self.transform.prepare(q, z);
    }

    /// Adds the output of a partial sum over stored channels: `out += B acc + mean * mass`.
    ///
    /// # Panics
    /// If `acc` is not `[vec_len]` or `out` not `[d]`.
    pub fn finish(&self, acc: &[f32], mass: f32, out: &mut [f32]) {
        self.transform.finish(acc, out);
        self.add_mean(mass, out);
    }

    /// The last step of [`Self::finish`]: `out += mean * mass`.
    pub fn add_mean(&self, mass: f32, out: &mut [f32]) {
        if let Some(mean) = &self.mean {
            out.iter_mut().zip(mean.iter()).for_each(|(o, m)| *o += m * mass);
        }
    }
}
