//! Uncompressed 16-bit rows; neither offset nor mean is taken out.

use super::{ConstantCache, Entry, Settings, SideBuild, SideContext, dot_side};
use crate::codec::SideCodec;
use crate::desc::{Arith, Elem, NONE, RunDesc};
use crate::transform::Transform;
use crate::view::Dtype;
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "raw16",
    paper: "the cache's own 16-bit values",
    parameters: &[],
    check: |_| Ok(()),
    build,
};

#[expect(clippy::unnecessary_wraps, reason = "every codec's builder may fail")]
fn build(_: &Settings<'_>, context: &SideContext<'_>, _: &mut ConstantCache) -> Result<SideBuild> {
    Ok(side(context.d, context.window))
}

/// One run of 16-bit rows.
pub(super) fn side(d: usize, window: Dtype) -> SideBuild {
    let run = RunDesc {
        width: 16,
        elem: if window == Dtype::Bf16 { Elem::Bf16 } else { Elem::F16 },
        arith: Arith::F32,
        scale: NONE,
        channels: d.next_multiple_of(16) as u32,
        vec_at: 0,
        at: 0,
        lut_at: NONE,
        step: 1.0,
        zero: 0.0,
    };
    let codec = SideCodec {
        transform: Transform::Identity { d },
        lut8: [].into(),
        lut32: [].into(),
        offset: None,
        mean: None,
        rope: None,
        encoder: None,
    };
    SideBuild { desc: dot_side(d, vec![run], 0, 0), codec, group: 16 }
}
