//! Where the codes of a run lie in the pages of a batch.

use super::Simd;

/// Tiles of a packed page.
pub(crate) const TILES: usize = 4;

/// A page with what its reader must know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageBytes<'a> {
    pub(crate) bytes: &'a [u8],
    /// Slots that some query sees.
    pub(crate) live: u64,
    /// Where the next page begins: only ever prefetched.
    pub(crate) next: *const u8,
}

impl PageBytes<'_> {
    /// Slots of a tile that some query sees.
    #[inline(always)]
    pub(crate) fn tile(&self, tile: usize) -> u16 {
        (self.live >> (16 * tile)) as u16
    }

    /// Whether every tile has a live slot.
    #[inline(always)]
    pub(super) fn whole(&self) -> bool {
        self.tile(0) != 0 && self.tile(1) != 0 && self.tile(2) != 0 && self.tile(3) != 0
    }
}

/// Where a run lies in every page of its class.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunAt {
    /// First byte in tile 0.
    pub(crate) codes: usize,
    /// Bytes from tile to tile.
    pub(crate) stride: usize,
    /// Bytes in a tile.
    pub(crate) len: usize,
    /// First byte of the f16 token scales.
    pub(crate) scales: Option<usize>,
}

impl RunAt {
    /// The codes in a tile of a page.
    #[inline(always)]
    pub(super) fn tile<'a>(&self, page: &PageBytes<'a>, tile: usize) -> &'a [u8] {
        &page.bytes[self.codes + tile * self.stride..][..self.len]
    }

    /// The token scales of a page, f16 by tile.
    #[inline(always)]
    pub(super) fn token_scales<'a>(&self, page: &PageBytes<'a>) -> Option<&'a [[u8; 32]; TILES]> {
        self.scales.map(|at| page.bytes[at..].as_chunks().0.first_chunk().expect("a scale per slot"))
    }

    /// Where the codes of a tile of the next page begin.
    #[inline(always)]
    pub(super) fn next_tile(&self, page: &PageBytes<'_>, tile: usize) -> *const u8 {
        page.next.wrapping_add(self.codes + tile * self.stride)
    }

    /// Asks for the token scales of the next page.
    #[inline(always)]
    pub(super) fn prefetch_scales<S: Simd>(&self, s: S, page: &PageBytes<'_>) {
        if let Some(at) = self.scales {
            s.prefetch(page.next.wrapping_add(at));
            s.prefetch(page.next.wrapping_add(at + 64));
        }
    }
}

/// Asks for part `part.0` of `part.1` of the `W` lines from `at` on: only a few can be on their way at a time.
#[inline(always)]
pub(super) fn prefetch<S: Simd, const W: usize>(s: S, at: *const u8, part: (usize, usize)) {
    let lines = W.div_ceil(part.1);
    for line in 0..lines {
        let line = part.0 * lines + line;
        if line < W {
            s.prefetch(at.wrapping_add(64 * line));
        }
    }
}
