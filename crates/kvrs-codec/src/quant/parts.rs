//! What most quantisers share: a side without its key offset or value mean, and runs of codebooks.

use super::constants::Centre;
use super::{ConstantCache, SideBuild, SideContext, dot_side};
use crate::codebook::Book;
use crate::codec::SideCodec;
use crate::desc::{Arith, Elem, NONE, Path, RunDesc, tile_ops};
use crate::encode::Encode;
use crate::phasor::Phasors;
use crate::transform::Transform;
use kvrs_core::Result;
use std::sync::Arc;

/// A side whose groups are 16 tokens.
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
        Ok(self.around(context, cache, centre, None))
    }

    /// For keys without their rotary embedding: tiles are rebuilt, and get their mean and the embedding back.
    pub(super) fn build_unturned(
        self,
        context: &SideContext<'_>,
        cache: &mut ConstantCache,
    ) -> Result<SideBuild> {
        let (centre, rope) = cache.turned_centre(context)?;
        let mut side = self.around(context, cache, centre, rope);
        let turns = if side.codec.rope.is_some() { tile_ops::ROPE } else { 0 };
        let desc = &mut side.desc;
        (desc.path, desc.vec_len, desc.tile_ops) = (Path::Tile, desc.d, tile_ops::MATRIX | turns);
        Ok(side)
    }

    fn around(
        self,
        context: &SideContext<'_>,
        cache: &mut ConstantCache,
        centre: Centre,
        rope: Option<Arc<Phasors>>,
    ) -> SideBuild {
        let desc = dot_side(context.d, self.runs, self.scales, centre.base_pairs());
        let codec = SideCodec {
            transform: self.transform,
            lut8: cache.levels(self.lut8),
            lut32: [].into(),
            offset: centre.offset,
            mean: centre.mean,
            rope,
            encoder: Some(self.encoder),
        };
        SideBuild { desc, codec, group: 16 }
    }
}

/// Runs of books and their channels, one after the other, with the scale of the token; and their levels.
pub(super) fn runs(parts: &[(&Book, usize)]) -> (Vec<RunDesc>, Vec<i8>) {
    let (mut lut8, mut vec_at, mut at) = (Vec::new(), 0, 0);
    let runs = parts.iter().map(|&(book, channels)| {
        let (width, channels) = (book.width, channels as u32);
        let table = !book.levels.is_empty();
        let run = RunDesc {
            width,
            elem: if table { Elem::Lut8 } else { Elem::Int },
            arith: if width <= 5 { Arith::I8 } else { Arith::I8x2 },
            scale: 0,
            channels,
            vec_at,
            at,
            lut_at: if table { lut8.len() as u32 } else { NONE },
            step: book.step,
            zero: book.zero(),
        };
        lut8.extend_from_slice(book.levels);
        vec_at += channels;
        at += 2 * channels * width;
        run
    });
    (runs.collect(), lut8)
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
