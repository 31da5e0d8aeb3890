//! Some tokens of a caller's tensor, brought to the host.

use crate::launcher::Launcher;
use kvrs_codec::backend::copy_tokens;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Place, View};
use kvrs_core::Result;
use std::ops::Range;

/// Appends all heads of tokens `columns` (ascending) of a row to `out`, `[columns][heads][channels]`.
pub(crate) fn fetch<L: Launcher>(
    launcher: &L,
    view: &View<'_>,
    row: usize,
    columns: &[usize],
    out: &mut Vec<u8>,
) -> Result<()> {
    let (Some(&first), Some(&last)) = (columns.first(), columns.last()) else { return Ok(()) };
    if view.place() == Place::Host {
        copy_tokens(view, row, columns, out);
        return Ok(());
    }
    let [_, heads, _, _] = view.shape();
    let block = |heads: Range<usize>| Block::new(view, row, heads, first..last + 1);
    let (whole, one) = (block(0..heads), block(0..heads.min(1)));
    let width = if whole.bytes() <= heads * one.bytes() { heads.max(1) } else { 1 };
    let starts = (0..heads).step_by(width);
    let parts =
        starts.map(|head| block(head..head + width).download(launcher)).collect::<Result<Vec<_>>>()?;
    let views = parts.iter().map(|(bytes, geometry)| View::new("the tensor", bytes, *geometry));
    let views = views.collect::<Result<Vec<_>>>()?;
    for column in columns {
        for view in &views {
            copy_tokens(view, 0, &[column - first], out);
        }
    }
    Ok(())
}

/// The bytes from the lowest to the highest element of some heads and neighbouring tokens.
struct Block {
    /// Address of the first element, and the bytes below it.
    first: u64,
    below: usize,
    above: usize,
    geometry: Geometry,
}

impl Block {
    fn new(view: &View<'_>, row: usize, heads: Range<usize>, tokens: Range<usize>) -> Self {
        let (strides, size) = (view.strides(), view.dtype().size());
        let shape = [1, heads.len(), tokens.len(), view.shape()[3]];
        let index = [row, heads.start, tokens.start, 0];
        let first: isize = index.iter().zip(strides).map(|(&i, stride)| i as isize * stride).sum();
        let reach = |sign: isize| {
            let axes = shape.iter().zip(strides).filter(|(_, stride)| stride.signum() == sign);
            axes.map(|(n, stride)| n.saturating_sub(1) * stride.unsigned_abs()).sum::<usize>()
        };
        let (below, above) = (reach(-1) * size, (reach(1) + 1) * size);
        let geometry = Geometry { dtype: view.dtype(), shape, strides, start: below };
        Self {
            first: view.address().wrapping_add_signed((first * size as isize) as i64),
            below,
            above,
            geometry,
        }
    }

    fn bytes(&self) -> usize {
        self.below + self.above
    }

    fn download(&self, launcher: &impl Launcher) -> Result<(Vec<u8>, Geometry)> {
        let mut bytes = vec![0; self.bytes()];
        // SAFETY: both ends are elements of one tensor, which its owner answers for.
        unsafe { launcher.download(self.first - self.below as u64, &mut bytes) }?;
        Ok((bytes, self.geometry))
    }
}
