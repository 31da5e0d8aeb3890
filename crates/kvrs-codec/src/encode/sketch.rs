//! Signs of random projections: of a vector itself, or of what other codes leave of it.

use super::{Encode, EncodeContext};
use crate::codebook::Book;
use crate::scale::{self, ScaleRule};
use crate::transform::Transform;

/// One bit per row of a sketch matrix and the length of what is sketched as a scale of its own; before it, if asked
/// for, a rotation with a codebook and its scale.
#[derive(Debug, Clone)]
pub struct SketchEncoder {
    /// What is coded first: the sketch is of the rotated rest.
    pub first: Option<(Transform, Book)>,
    /// The sketch matrix `[m][d]`, zero rows behind the live ones; it acts on rotated channels.
    pub sketch: Transform,
    /// Rows that carry something; the codes of the others are 0.
    pub live: usize,
}

impl Encode for SketchEncoder {
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        let mut y = vec![0.0; self.sketch.n()];
        let mut rest = First::new(self.first.as_ref());
        context.by_rows(rows, positions, page, slot, |x, codes, page, slot| {
            let (first, signs) = codes.split_at_mut(codes.len() - self.sketch.n());
            let (what, scale) = match &mut rest {
                Some(rest) => {
                    let scale = rest.row(x, first);
                    context.write_scale(page, 0, slot, scale);
                    (&rest.u[..x.len()], 1)
                }
                None => (x, 0),
            };
            context.write_scale(page, scale, slot, scale::norm(what).length);
            self.sketch.analyse(what, &mut y);
            signs.iter_mut().zip(&y).for_each(|(code, y)| *code = u8::from(*y >= 0.0));
            signs[self.live..].fill(0);
        });
    }
}

/// The part before the sketch, with working memory.
struct First<'a> {
    rotation: &'a Transform,
    book: &'a Book,
    /// Rotated channels `[n]`, then what the codes leave of them.
    u: Vec<f32>,
}

impl<'a> First<'a> {
    fn new(first: Option<&'a (Transform, Book)>) -> Option<Self> {
        first.map(|(rotation, book)| Self { rotation, book, u: vec![0.0; rotation.n()] })
    }

    /// Codes `[n]` and scale (of rule `raw`) of `x`; leaves the rest in `u`.
    fn row(&mut self, x: &[f32], codes: &mut [u8]) -> f32 {
        let (rotation, book, u) = (self.rotation, self.book, &mut self.u);
        rotation.analyse(x, u);
        let norm = scale::norm(x);
        let factor = norm.inverse * rotation.unit_factor();
        for u in &mut *u {
            *u *= factor;
        }
        book.codes(u, codes);
        codes[x.len()..].fill(0);
        let scale = ScaleRule::Raw.scale(norm.length, x.len(), &[], &[]);
        // The rest of what is decoded, so with the scale as it is stored.
        let stored = scale::to_f16(scale).to_f32();
        for (u, &code) in u.iter_mut().zip(&*codes) {
            *u = *u * scale - book.value(code) * stored;
        }
        scale
    }
}
