//! Encoding of token groups: stages that every codec shares, and the codec of rotations with one scale a token.

use crate::codebook::Book;
use crate::codec::{HeadCodec, SideCodec};
use crate::desc::{PageDesc, Side, SideDesc, TILE};
use crate::layout;
use crate::scale::{self, ScaleRule};

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

    /// Takes the key offset at `position` and the mean out of a row `[d]`.
    ///
    /// # Panics
    /// If the row is not as long as the constants.
    pub fn centre(&self, position: i64, row: &mut [f32]) {
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
    /// Centred vector `[d]`.
    x: Vec<f32>,
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
        let transform = &context.codec.transform;
        let (d, n) = (transform.d(), context.desc().n as usize);
        assert!(rows.len().is_multiple_of(TILE * d) && slot.is_multiple_of(TILE), "whole tiles");
        assert_eq!(rows.len(), positions.len() * d, "one position per token");
        let mut scratch = Scratch { x: vec![0.0; d], u: vec![0.0; n], v: vec![0.0; n] };
        let mut codes = vec![0; TILE * n];
        for (token, (row, &position)) in rows.chunks_exact(d).zip(positions).enumerate() {
            let at = token % TILE * n;
            scratch.x.copy_from_slice(row);
            context.centre(position, &mut scratch.x);
            let scale = self.row(context, &mut scratch, &mut codes[at..at + n]);
            context.write_scale(page, 0, slot + token, scale);
            if token % TILE == TILE - 1 {
                context.write_codes(page, (slot + token) / TILE, &codes);
            }
        }
    }

    fn as_scaled(&self) -> Option<&ScaledEncoder> {
        Some(self)
    }
}

impl ScaledEncoder {
    /// Codes `[n]` and scale of the centred row in `scratch`.
    fn row(&self, context: &EncodeContext<'_>, scratch: &mut Scratch, codes: &mut [u8]) -> f32 {
        let transform = &context.codec.transform;
        let (d, live) = (transform.d(), transform.live());
        let Scratch { x, u, v } = scratch;
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
