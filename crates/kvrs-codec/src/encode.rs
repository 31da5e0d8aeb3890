//! Encoding of token groups: stages that every codec shares, and the codec of rotations with one scale a token.

mod bound;
mod largest;
mod minmax;
mod raw;
mod sketch;

pub use bound::{BOUND_SCALE, BoundEncoder};
pub use largest::{LargestEncoder, Target};
pub use minmax::MinMaxEncoder;
pub use raw::{RawPages, seal_side};
pub use sketch::SketchEncoder;

use crate::codebook::Book;
use crate::codec::{HeadCodec, SideCodec};
use crate::desc::{PageDesc, Side, SideDesc, TILE};
use crate::layout;
use crate::scale::{self, ScaleRule};
use half::f16;

/// Layout and constants that an encoder writes by.
#[derive(Debug, Clone, Copy)]
pub struct EncodeContext<'a> {
    /// Layout of the page.
    pub page: &'a PageDesc,
    /// Keys or values.
    pub side: Side,
    /// Constants of the side.
    pub codec: &'a SideCodec,
}

impl<'a> EncodeContext<'a> {
    /// One side of `codec`.
    #[must_use]
    pub fn new(codec: &'a HeadCodec, side: Side) -> Self {
        Self { page: &codec.desc, side, codec: codec.side(side).1 }
    }

    /// Layout of the side.
    #[must_use]
    pub fn desc(&self) -> &'a SideDesc {
        self.page.side(self.side)
    }

    /// Undoes the rotary embedding at `position` where keys are stored without it, and takes the key offset and the
    /// mean out of a row `[d]`.
    ///
    /// # Panics
    /// If the row is not as long as the constants.
    pub fn centre(&self, position: i64, row: &mut [f32]) {
        if let Some(rope) = &self.codec.rope {
            rope.rotate(-position, row);
        }
        if let Some(offset) = &self.codec.offset {
            offset.subtract(position, row);
        }
        if let Some(mean) = &self.codec.mean {
            row.iter_mut().zip(mean.iter()).for_each(|(x, m)| *x -= m);
        }
    }

    /// Writes per-token scale `index` of `slot`, rounded to f16.
    ///
    /// # Panics
    /// If the page is too short.
    pub fn write_scale(&self, page: &mut [u8], index: u32, slot: usize, scale: f32) {
        let at = self.desc().scales_at as usize + 2 * (index as usize * self.page.slots as usize + slot);
        page[at..at + 2].copy_from_slice(&scale::to_f16(scale).to_le_bytes());
    }

    /// Writes the f16 pair `index` of scale and minimum on the summed axis.
    ///
    /// # Panics
    /// If the page is too short.
    pub fn write_inner(&self, page: &mut [u8], index: usize, scale: f16, minimum: f16) {
        let at = self.desc().inner_at as usize + 4 * index;
        page[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        page[at + 2..at + 4].copy_from_slice(&minimum.to_le_bytes());
    }

    /// Centres each row, lets `row` write its codes `[n]` (and its scales into the page, at its slot), and packs the
    /// codes of every tile.
    ///
    /// # Panics
    /// If the rows are no whole tiles or have no position each.
    fn by_rows(
        &self,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
        mut row: impl FnMut(&[f32], &mut [u8], &mut [u8], usize),
    ) {
        let desc = self.desc();
        let (d, n) = (rows.len() / positions.len().max(1), desc.n as usize);
        assert!(positions.len().is_multiple_of(TILE) && slot.is_multiple_of(TILE), "whole tiles");
        assert_eq!(rows.len(), positions.len() * d, "one position per token");
        let (mut x, mut codes) = (vec![0.0; d], vec![0; TILE * n]);
        for (token, &position) in positions.iter().enumerate() {
            x.copy_from_slice(&rows[token * d..(token + 1) * d]);
            self.centre(position, &mut x);
            row(&x, &mut codes[token % TILE * n..][..n], page, slot + token);
            if token % TILE == TILE - 1 {
                self.write_codes(page, (slot + token) / TILE, &codes);
            }
        }
    }

    /// Packs the codes `[16][n]` of tile `tile`, run by run.
    ///
    /// # Panics
    /// If the page is too short or `codes` is not `[16][n]`.
    pub fn write_codes(&self, page: &mut [u8], tile: usize, codes: &[u8]) {
        let n = self.desc().n as usize;
        assert_eq!(codes.len(), TILE * n, "the codes of 16 tokens");
        let mut first = 0;
        for run in &self.desc().runs {
            let channels = run.channels as usize;
            let bytes = &mut page[layout::run_range(self.page, self.side, run, tile)];
            for block in 0..channels / 16 {
                let mut square = [0; 256];
                for (row, codes) in square.as_chunks_mut::<16>().0.iter_mut().zip(codes.chunks_exact(n)) {
                    row.copy_from_slice(&codes[first + 16 * block..][..16]);
                }
                layout::pack_block(self.side, run.width, &square, bytes, block, channels);
            }
            first += channels;
        }
    }
}

/// Turns vectors into the codes and scales of a page.
pub trait Encode: Send + Sync + std::fmt::Debug {
    /// Encodes `rows` `[tokens][d]` (16-bit values as f32, finite; whole groups), each at its position, into `page`
    /// from `slot` on, a multiple of 16.
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    );

    /// The encoder as the kind that backends have kernels for.
    fn as_scaled(&self) -> Option<&ScaledEncoder> {
        None
    }
}

/// Length, rotation, a codebook per run and one scale per token.
#[derive(Debug, Clone)]
pub struct ScaledEncoder {
    /// How the scale follows from the codes; [`ScaleRule::Rms`] with dense transforms only.
    pub rule: ScaleRule,
    /// The codebooks of the runs.
    pub books: Vec<Book>,
}

/// Working memory of one row.
struct Scratch {
    /// Stored channels of unit variance `[n]`.
    u: Vec<f32>,
    /// Values of their codes `[n]`.
    v: Vec<f32>,
}

impl Encode for ScaledEncoder {
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        let mut scratch = Scratch::new(context);
        context.by_rows(rows, positions, page, slot, |x, codes, page, slot| {
            let scale = self.row(context, x, &mut scratch, codes);
            context.write_scale(page, 0, slot, scale);
        });
    }

    fn as_scaled(&self) -> Option<&ScaledEncoder> {
        Some(self)
    }
}

impl Scratch {
    fn new(context: &EncodeContext<'_>) -> Self {
        let n = context.desc().n as usize;
        Self { u: vec![0.0; n], v: vec![0.0; n] }
    }
}

impl ScaledEncoder {
    /// Codes `[n]` and scale of the centred row `x`.
    fn row(&self, context: &EncodeContext<'_>, x: &[f32], scratch: &mut Scratch, codes: &mut [u8]) -> f32 {
        let transform = &context.codec.transform;
        let (d, live) = (transform.d(), transform.live());
        let Scratch { u, v } = scratch;
        transform.analyse(x, u);
        let (norm, factor) = if self.rule == ScaleRule::Rms {
            let rms = scale::rms(&u[..live]);
            (rms, rms.inverse)
        } else {
            let norm = scale::norm(x);
            (norm, norm.inverse * transform.unit_factor())
        };
        for y in &mut *u {
            *y *= factor;
        }
        let mut first = 0;
        for (run, book) in context.desc().runs.iter().zip(&self.books) {
            let run = first..first + run.channels as usize;
            book.codes(&u[run.clone()], &mut codes[run.clone()]);
            v[run.clone()].iter_mut().zip(&codes[run.clone()]).for_each(|(v, &code)| *v = book.value(code));
            first = run.end;
        }
        codes[live..].fill(0);
        self.rule.scale(norm.length, d, &u[..live], &v[..live])
    }
}
