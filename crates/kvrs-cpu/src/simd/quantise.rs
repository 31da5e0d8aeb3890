//! Channels of 16 tokens to codes and scales.

use super::encode::{Lanes, SimdEncode, halve};
use super::pack::Cells;
use super::search::{Found, Search};
use kvrs_codec::Side;
use kvrs_codec::desc::TILE;
use kvrs_codec::encode::EncodeContext;
use kvrs_codec::scale::ScaleRule;

/// No sum is taken.
const NONE: u32 = 0;
/// Channels times values of their codes.
const ALONG: u32 = 1;
/// Squares of the values.
const SQUARE: u32 = 2;

/// Stored channels that become codes.
pub(crate) struct Job<'a> {
    pub(crate) context: &'a EncodeContext<'a>,
    pub(crate) books: &'a [Found],
    /// Live channels, which `factors` bring to unit variance.
    pub(crate) y: &'a [Lanes],
    pub(crate) factors: &'a Lanes,
    pub(crate) cells: &'a mut [Cells],
    pub(crate) partial: &'a mut [Lanes; 16],
}

impl Job<'_> {
    /// Writes the codes and returns the scales.
    #[inline(always)]
    pub(crate) fn scales<S: SimdEncode>(
        &mut self,
        s: S,
        rule: ScaleRule,
        d: usize,
        lengths: &Lanes,
    ) -> Lanes {
        let (mut along, mut square) = ([0.0; TILE], [0.0; TILE]);
        match rule {
            ScaleRule::Raw | ScaleRule::Rms => _ = self.codes::<S, NONE>(s),
            ScaleRule::Norm => square = self.codes::<S, SQUARE>(s),
            ScaleRule::Lsq | ScaleRule::Unbiased => along = self.codes::<S, ALONG>(s),
        }
        let against = |(length, along): (&f32, &f32)| *length > 0.0 && (*along <= 0.0 || along.is_nan());
        if rule == ScaleRule::Lsq || rule == ScaleRule::Unbiased && lengths.iter().zip(&along).any(against) {
            square = self.codes::<S, SQUARE>(s);
        }
        let mut scales = [0.0; TILE];
        for t in 0..TILE {
            scales[t] = rule.of_sums(lengths[t], d, || along[t], || square[t]);
        }
        scales
    }

    /// Writes the codes and returns a sum over each token's channels in the order of `red16`.
    #[inline(always)]
    fn codes<S: SimdEncode, const SUM: u32>(&mut self, s: S) -> Lanes {
        match self.context.side {
            Side::Key => self.quantise::<S, SUM, true>(s),
            Side::Value => self.quantise::<S, SUM, false>(s),
        }
    }

    #[inline(always)]
    fn quantise<S: SimdEncode, const SUM: u32, const KEY: bool>(&mut self, s: S) -> Lanes {
        for half in 0..S::HALVES {
            for q in 0..4 {
                let mut sums = [s.splat_f(0.0); 4];
                let mut block = 0;
                for (run, book) in self.context.desc().runs.iter().zip(self.books) {
                    let blocks = block..block + run.channels as usize / 16;
                    block = blocks.end;
                    let place = Place { blocks, q, half };
                    sums = match run.width {
                        1 => self.quads::<S, 1, SUM, KEY>(s, book, place, sums),
                        2 => self.quads::<S, 2, SUM, KEY>(s, book, place, sums),
                        3 => self.quads::<S, 3, SUM, KEY>(s, book, place, sums),
                        4 => self.quads::<S, 4, SUM, KEY>(s, book, place, sums),
                        5 => self.quads::<S, 5, SUM, KEY>(s, book, place, sums),
                        6 => self.quads::<S, 6, SUM, KEY>(s, book, place, sums),
                        7 => self.quads::<S, 7, SUM, KEY>(s, book, place, sums),
                        _ => self.quads::<S, 8, SUM, KEY>(s, book, place, sums),
                    };
                }
                for i in 0..4 {
                    s.store_f(sums[i], &mut self.partial[4 * q + i], half);
                }
            }
        }
        halve(s, self.partial);
        self.partial[0]
    }

    /// Channels `4 q .. 4 q + 4` of each block of a run.
    #[inline(always)]
    fn quads<S: SimdEncode, const W: u32, const SUM: u32, const KEY: bool>(
        &mut self,
        s: S,
        book: &Search,
        place: Place,
        mut sums: [S::F; 4],
    ) -> [S::F; 4] {
        let Place { blocks, q, half } = place;
        let factor = s.load_f(self.factors, half);
        for block in blocks {
            let Some(y) = self.y.as_chunks::<4>().0.get(4 * block + q) else { break };
            let mut u = [factor; 4];
            for i in 0..4 {
                u[i] = s.mul(s.load_f(&y[i], half), factor);
            }
            let codes = book.codes::<S, W>(s, u);
            if SUM != NONE {
                let v = book.values::<S, W>(s, codes);
                for i in 0..4 {
                    sums[i] = s.add(sums[i], s.mul(if SUM == ALONG { u[i] } else { v[i] }, v[i]));
                }
            }
            let cells = &mut self.cells[block].0;
            if KEY {
                s.store_across(codes, &mut cells[q], half);
            } else {
                s.store_along(codes, cells, q, half);
            }
        }
        sums
    }
}

/// Quad `q` of some blocks, in half the lanes.
struct Place {
    blocks: std::ops::Range<usize>,
    q: usize,
    half: usize,
}
