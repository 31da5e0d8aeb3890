//! Where the codes of a run lie in a page.

use super::Simd;

/// The codes of a run in one page: tile `t` starts at `stride * t`.
#[derive(Clone, Copy)]
pub(crate) struct Codes<'a> {
    /// From the run's first byte in tile 0 on.
    pub(crate) bytes: &'a [u8],
    /// Bytes from tile to tile.
    pub(crate) stride: usize,
    /// Bytes of the run in a tile.
    pub(crate) len: usize,
    /// Tiles with a live slot, as bits.
    pub(crate) tiles: u8,
    /// Where the same bytes of the next page lie: only ever prefetched.
    pub(crate) next: *const u8,
    /// Where the run's token scales lie in the next page.
    pub(crate) next_scales: *const u8,
}

impl<'a> Codes<'a> {
    #[inline(always)]
    pub(super) fn tile(&self, tile: usize) -> &'a [u8] {
        &self.bytes[tile * self.stride..][..self.len]
    }

    /// Whether a slot of tile `tile` is live.
    #[inline(always)]
    pub(super) fn has(&self, tile: usize) -> bool {
        self.tiles >> tile & 1 != 0
    }

    /// Asks for the lines of the next page that stand for `at..at + len` of a tile.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, s: S, tile: usize, at: usize, len: usize) {
        if at == 0 && tile.is_multiple_of(2) {
            s.prefetch(self.next_scales.wrapping_add(32 * tile));
        }
        for line in (0..len).step_by(64) {
            s.prefetch(self.next.wrapping_add(tile * self.stride + at + line));
        }
    }
}
