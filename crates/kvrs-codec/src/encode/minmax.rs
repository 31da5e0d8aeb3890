//! Codes between the minimum and the maximum of a block on the summed axis.

use super::{Encode, EncodeContext};
use crate::desc::{Inner, TILE};
use crate::scale::signed_f16;
use half::f16;

/// A pair of f16 (step, minimum) per block: keys per channel and block of tokens, values per token and block of
/// channels. Nothing is rotated.
#[derive(Debug, Clone, Copy)]
pub struct MinMaxEncoder {
    /// Bits of a code.
    pub width: u32,
}

impl Encode for MinMaxEncoder {
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        if context.desc().inner == Inner::GroupChannel {
            self.encode_keys(context, rows, positions, page, slot);
        } else {
            self.encode_values(context, rows, positions, page, slot);
        }
    }
}

impl MinMaxEncoder {
    /// Blocks of tokens, channel by channel.
    fn encode_keys(
        self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        let (block, n) = (context.desc().block as usize, context.desc().n as usize);
        let d = context.codec.transform.d();
        assert!(
            positions.len().is_multiple_of(block) && slot.is_multiple_of(block),
            "whole blocks of tokens"
        );
        let mut codes = vec![0; TILE * n];
        for (b, (rows, positions)) in rows.chunks_exact(block * d).zip(positions.chunks(block)).enumerate() {
            let mut rows = rows.to_vec();
            for (row, &position) in rows.chunks_exact_mut(d).zip(positions) {
                context.centre(position, row);
            }
            let ranges = channel_ranges(&rows, d, self.width);
            for c in 0..n {
                let range = ranges.get(c).copied().unwrap_or_default();
                context.write_inner(page, (slot / block + b) * n + c, range.step, range.low);
            }
            for (tile, rows) in rows.chunks_exact(TILE * d).enumerate() {
                for (codes, row) in codes.chunks_exact_mut(n).zip(rows.chunks_exact(d)) {
                    for ((code, &x), range) in codes.iter_mut().zip(row).zip(&ranges) {
                        *code = range.code(x);
                    }
                }
                context.write_codes(page, (slot + b * block) / TILE + tile, &codes);
            }
        }
    }

    /// Blocks of channels, token by token; the last may be short.
    fn encode_values(
        self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        let (block, n) = (context.desc().block as usize, context.desc().n as usize);
        context.by_rows(rows, positions, page, slot, |x, codes, page, slot| {
            for (b, (x, codes)) in x.chunks(block).zip(codes.chunks_mut(block)).enumerate() {
                let ends = |fold: fn(f32, f32) -> f32| x.iter().copied().reduce(fold).unwrap_or_default();
                let range = Range::new(ends(f32::min), ends(f32::max), self.width);
                codes.iter_mut().zip(x).for_each(|(code, &x)| *code = range.code(x));
                context.write_inner(page, slot * n.div_ceil(block) + b, range.step, range.low);
            }
        });
    }
}

/// The range of every channel of `rows` `[tokens][d]`.
fn channel_ranges(rows: &[f32], d: usize, width: u32) -> Vec<Range> {
    let (mut least, mut most) = (rows[..d].to_vec(), rows[..d].to_vec());
    for row in rows.chunks_exact(d) {
        least.iter_mut().zip(row).for_each(|(m, &x)| *m = m.min(x));
        most.iter_mut().zip(row).for_each(|(m, &x)| *m = m.max(x));
    }
    least.iter().zip(&most).map(|(&least, &most)| Range::new(least, most, width)).collect()
}

/// Evenly spaced values from a minimum on.
#[derive(Debug, Clone, Copy, Default)]
struct Range {
    low: f16,
    step: f16,
    /// `low` and `1 / step` in f32; 0 for a step of 0.
    wide_low: f32,
    inverse: f32,
    /// Largest code.
    top: f32,
}

impl Range {
    fn new(least: f32, most: f32, width: u32) -> Self {
        let (low, top) = (signed_f16(least), ((1u32 << width) - 1) as f32);
        let wide_low = low.to_f32();
        let step = signed_f16((most - wide_low).max(0.0) / top);
        let inverse = if step == f16::ZERO { 0.0 } else { 1.0 / step.to_f32() };
        Self { low, step, wide_low, inverse, top }
    }

    /// Clamping first and adding 2^23 is rounding to an integer with ties to even: both bounds are integers.
    fn code(&self, x: f32) -> u8 {
        (((x - self.wide_low) * self.inverse).clamp(0.0, self.top) + 8_388_608.0).to_bits() as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_span_the_range_and_ties_go_to_even() {
        let range = Range::new(-1.0, 2.0, 2);
        assert_eq!((range.low.to_f32(), range.step.to_f32()), (-1.0, 1.0));
        let codes = [-9.0, -1.0, -0.5, 0.5, 1.4, 2.0, 1e30].map(|x| range.code(x));
        assert_eq!(codes, [0, 0, 0, 2, 2, 3, 3]);
    }

    #[test]
    fn a_range_without_width_has_step_and_codes_0() {
        for x in [0.0, -0.0, 1.0001, -7e4, 3e38] {
            let range = Range::new(x, x, 4);
            let expected = signed_f16(x);
            assert_eq!(range.low.to_bits(), expected.to_bits(), "{x}");
            if x.abs() < 65504.0 {
                assert!(range.code(x) == 0 || range.step > f16::ZERO, "{x}");
            }
        }
        // The minimum rounds up beyond the maximum.
        let range = Range::new(1.0007, 1.0007, 2);
        assert_eq!((range.step, range.code(1.0007)), (f16::ZERO, 0));
    }
}
