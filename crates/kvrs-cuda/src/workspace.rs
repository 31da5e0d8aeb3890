//! Working memory of attention, and the views that kernels take.

use crate::args;
use crate::launcher::Launcher;
use crate::memory::Buffer;
use kvrs_codec::{Dtype, View, ViewMut};

/// Working memory of attention, kept from call to call.
#[derive(Debug)]
pub(crate) struct Workspace<L: Launcher> {
    pub(crate) lists: Buffer<L>,
    pub(crate) constants: Buffer<L>,
    pub(crate) queries: Buffer<L>,
    pub(crate) parts: Buffer<L>,
    pub(crate) record: Buffer<L>,
    pub(crate) lse: Buffer<L>,
    pub(crate) sums: Buffer<L>,
    pub(crate) tiles: Buffer<L>,
}

impl<L: Launcher> Default for Workspace<L> {
    fn default() -> Self {
        Self {
            lists: Buffer::default(),
            constants: Buffer::default(),
            queries: Buffer::default(),
            parts: Buffer::default(),
            record: Buffer::default(),
            lse: Buffer::default(),
            sums: Buffer::default(),
            tiles: Buffer::default(),
        }
    }
}

fn tensor(start: u64, strides: [isize; 4], dtype: Dtype) -> args::View {
    let dtype = match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 => 2,
    };
    args::View { start, strides: strides.map(|s| s as i64), dtype, pad: 0 }
}

pub(crate) fn view(view: &View<'_>) -> args::View {
    tensor(view.address(), view.strides(), view.dtype())
}

pub(crate) fn view_mut(view: &mut ViewMut<'_>) -> args::View {
    tensor(view.address(), view.strides(), view.dtype())
}
