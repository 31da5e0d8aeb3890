//! What most quantisers share: a side on the Dot path, without its key offset or value mean.

use super::{ConstantCache, SideBuild, SideContext, dot_side};
use crate::codec::SideCodec;
use crate::desc::{Arith, Elem, NONE, RunDesc};
use crate::encode::Encode;
use crate::transform::Transform;
use kvrs_core::Result;
use std::sync::Arc;

/// A side on the Dot path, whose groups are 16 tokens.
pub(super) struct Parts {
    /// Runs that lie one after the other.
    pub(super) runs: Vec<RunDesc>,
    /// Per-token scales.
    pub(super) scales: u32,
    /// Levels of the runs.
    pub(super) lut8: Vec<i8>,
    pub(super) transform: Transform,
    pub(super) encoder: Arc<dyn Encode>,
}

impl Parts {
    /// One run of the channels as they are.
    pub(super) fn plain(d: usize, run: RunDesc, encoder: impl Encode + 'static) -> Self {
        let run = RunDesc { channels: d.next_multiple_of(16) as u32, ..run };
        Self {
            scales: u32::from(run.scale != NONE),
            runs: vec![run],
            lut8: Vec::new(),
            transform: Transform::Identity { d },
            encoder: Arc::new(encoder),
        }
    }

    /// Adds the key offset or the value mean.
    pub(super) fn build(self, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
        let centre = cache.centre(context)?;
        let desc = dot_side(context.d, self.runs, self.scales, centre.base_pairs());
        let codec = SideCodec {
            transform: self.transform,
            lut8: cache.levels(self.lut8),
            lut32: [].into(),
            offset: centre.offset,
            mean: centre.mean,
            rope: None,
            encoder: Some(self.encoder),
        };
        Ok(SideBuild { desc, codec, group: 16 })
    }
}

/// A run of integers at the start of a tile, without scale.
pub(super) fn integers(width: u32) -> RunDesc {
    RunDesc {
        width,
        elem: Elem::Int,
        arith: if width <= 5 { Arith::I8 } else { Arith::I8x2 },
        scale: NONE,
        channels: 0,
        vec_at: 0,
        at: 0,
        lut_at: NONE,
        step: 1.0,
        zero: 0.0,
    }
}
