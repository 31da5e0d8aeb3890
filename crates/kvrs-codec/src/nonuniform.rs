//! Encoding by codebooks out of data, with the largest entries of each tile kept beside as differences.

use crate::desc::{Inner, Side, TILE};
use crate::encode::{Encode, EncodeContext};
use half::f16;
use std::cmp::Reverse;

/// Nearest level of an ascending codebook; without token scales for keys, by each token's range for values.
#[derive(Debug, Clone)]
pub struct NonuniformEncoder {
    /// Levels, ascending.
    levels: Vec<f32>,
    /// Midpoints of neighbouring levels.
    thresholds: Vec<f32>,
}

/// One tile on its way.
struct TileCodes {
    /// Channels before the codebook `[16][n]`.
    u: Vec<f32>,
    codes: Vec<u8>,
    /// `(scale, middle)` of each token.
    ranges: [(f32, f32); TILE],
    /// `token * n + channel` of the largest entries, ascending.
    outliers: Vec<usize>,
}

impl NonuniformEncoder {
    /// An encoder for ascending `levels`.
    #[must_use]
    pub fn new(levels: &[f32]) -> Self {
        let thresholds = levels.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
        Self { levels: levels.to_vec(), thresholds }
    }

    fn code(&self, u: f32) -> u8 {
        self.thresholds.partition_point(|threshold| *threshold <= u) as u8
    }

    fn encode_tile(&self, context: &EncodeContext<'_>, tile: &mut TileCodes) {
        let desc = context.desc();
        let (n, live) = (desc.n as usize, context.codec.transform.live());
        tile.outliers = largest(&tile.u, n, live, desc.sparse_per_tile as usize);
        tile.ranges = [(1.0, 0.0); TILE];
        if desc.inner == Inner::TokenBlock {
            for (token, range) in tile.ranges.iter_mut().enumerate() {
                let dense =
                    (0..live).map(|c| token * n + c).filter(|at| tile.outliers.binary_search(at).is_err());
                *range = range_of(dense.map(|at| tile.u[at]));
            }
        }
        for (at, code) in tile.codes.iter_mut().enumerate() {
            let (scale, middle) = tile.ranges[at / n];
            let inside = at % n < live && scale > 0.0;
            *code = if inside { self.code((tile.u[at] - middle) / scale) } else { 0 };
        }
    }

    /// Scales, middles and differences of a tile, after its codes.
    fn write_rest(&self, context: &EncodeContext<'_>, page: &mut [u8], number: usize, tile: &TileCodes) {
        let desc = context.desc();
        let n = desc.n as usize;
        if desc.inner == Inner::TokenBlock {
            for (token, (scale, middle)) in tile.ranges.iter().enumerate() {
                let at = desc.inner_at as usize + 4 * (number * TILE + token);
                put(page, at, *scale);
                put(page, at + 2, *middle);
            }
        }
        let mut order: Vec<(usize, usize)> = tile.outliers.iter().map(|at| (at / n, at % n)).collect();
        if context.side == Side::Value {
            order.sort_by_key(|(token, channel)| (*channel, *token));
        }
        for (i, (token, channel)) in order.into_iter().enumerate() {
            let at = token * n + channel;
            let (scale, middle) = tile.ranges[token];
            let dense = self.levels[usize::from(tile.codes[at])] * scale + middle;
            let place = desc.sparse_at as usize + 4 * (number * desc.sparse_per_tile as usize + i);
            page[place..place + 2].copy_from_slice(&((token * 0x400 + channel) as u16).to_le_bytes());
            put(page, place + 2, tile.u[at] - dense);
        }
    }
}

impl Encode for NonuniformEncoder {
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
        assert!(rows.len() == positions.len() * d && slot.is_multiple_of(TILE), "one position per token");
        let mut tile = TileCodes {
            u: vec![0.0; TILE * n],
            codes: vec![0; TILE * n],
            ranges: [(1.0, 0.0); TILE],
            outliers: Vec::new(),
        };
        let mut x = vec![0.0; d];
        for (i, rows) in rows.chunks_exact(TILE * d).enumerate() {
            for (token, (row, u)) in rows.chunks_exact(d).zip(tile.u.chunks_exact_mut(n)).enumerate() {
                x.copy_from_slice(row);
                context.centre(positions[i * TILE + token], &mut x);
                transform.analyse(&x, u);
            }
            self.encode_tile(context, &mut tile);
            context.write_codes(page, slot / TILE + i, &tile.codes);
            self.write_rest(context, page, slot / TILE + i, &tile);
        }
    }
}

/// Places of the `count` entries of largest magnitude among the `live` channels, the lower place at ties; ascending.
fn largest(u: &[f32], n: usize, live: usize, count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..u.len()).filter(|at| at % n < live).collect();
    let key = |at: &usize| (Reverse(u[*at].abs().to_bits()), *at);
    if count < places.len() {
        places.select_nth_unstable_by_key(count, key);
        places.truncate(count);
    }
    places.sort_unstable();
    places
}

/// Half the width of a token's range, and its middle, rounded as they are stored.
fn range_of(values: impl Iterator<Item = f32>) -> (f32, f32) {
    let (low, high) = values.fold((f32::MAX, f32::MIN), |(low, high), x| (low.min(x), high.max(x)));
    if low > high {
        return (0.0, 0.0);
    }
    let stored = |x: f32| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32();
    (stored((high - low) * 0.5), stored((high + low) * 0.5))
}

/// Writes `x` as f16, saturated.
fn put(page: &mut [u8], at: usize, x: f32) {
    page[at..at + 2].copy_from_slice(&f16::from_f32(x.clamp(-65504.0, 65504.0)).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_entries_win_and_ties_go_to_the_lower_place() {
        let u = [1.0, -3.0, 9.0, 3.0, 3.0, 9.0];
        assert_eq!(largest(&u, 3, 2, 2), [1, 3]); // channel 2 is padding
        assert_eq!(largest(&u, 3, 3, 3), [1, 2, 5]);
        assert_eq!(largest(&u, 3, 3, 9), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn codes_are_the_nearest_levels() {
        let encoder = NonuniformEncoder::new(&[-2.0, 0.0, 1.0, 5.0]);
        let codes: Vec<u8> =
            [-9.0, -1.1, -0.9, 0.4, 0.6, 2.9, 3.1].iter().map(|u| encoder.code(*u)).collect();
        assert_eq!(codes, [0, 0, 1, 1, 2, 2, 3]);
    }

    #[test]
    fn ranges_cover_their_values() {
        assert_eq!(range_of([1.0, 5.0, 3.0].into_iter()), (2.0, 3.0));
        assert_eq!(range_of(std::iter::empty()), (0.0, 0.0));
    }
}
