//! Eight bits a channel, scaled by the largest magnitude of the token.

use super::{Encode, EncodeContext};
use crate::scale::to_f16;
use half::f16;

/// What the channels become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Integers from -127 to 127, stored with 128 added.
    Int8,
    /// 8-bit floats with 4 exponent bits, up to 448.
    E4m3,
    /// 8-bit floats with 5 exponent bits.
    E5m2,
}

/// One f16 scale a token that brings its largest magnitude to the end of the target's range. Nothing is rotated.
#[derive(Debug, Clone, Copy)]
pub struct LargestEncoder {
    /// What the channels become.
    pub target: Target,
}

impl Encode for LargestEncoder {
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        context.by_rows(rows, positions, page, slot, |x, codes, page, slot| {
            let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let scale = to_f16(largest / self.target.largest());
            let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
            codes.iter_mut().zip(x).for_each(|(code, x)| *code = self.target.code(x * inverse));
            context.write_scale(page, 0, slot, scale.to_f32());
        });
    }
}

impl Target {
    /// What the largest magnitude of a token becomes. Both 8-bit floats take 448: 57344, the largest of `E5m2`, would
    /// need scales below f16's normal range.
    fn largest(self) -> f32 {
        if self == Self::Int8 { 127.0 } else { 448.0 }
    }

    /// The code of `t`, nearest even, saturating.
    fn code(self, t: f32) -> u8 {
        match self {
            Self::Int8 => rint(t.clamp(-127.0, 127.0)).wrapping_add(128),
            Self::E4m3 => float8::<3, -6>(t, 0x7E),
            Self::E5m2 => float8::<2, -14>(t, 0x7B),
        }
    }
}

/// A small number rounded to an integer, ties to even, as its low byte: numbers near 1.5 * 2^23 have no fractions.
fn rint(x: f32) -> u8 {
    (x + 12_582_912.0).to_bits() as u8
}

/// `t` as an 8-bit float with `MANTISSA` bits behind the point and least exponent `LEAST`, up to code `top`.
///
/// In units of the last place the magnitude is an integer; exponents add whole multiples of `2^MANTISSA` to it.
fn float8<const MANTISSA: i32, const LEAST: i32>(t: f32, top: u8) -> u8 {
    let (sign, magnitude) = ((t.to_bits() >> 24) as u8 & 0x80, t.abs().min(65504.0));
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(LEAST);
    let unit = f32::from_bits(((127 + MANTISSA - exponent) as u32) << 23); // 1 / unit in the last place
    let steps = u32::from(rint(magnitude * unit)) + (((exponent - LEAST) as u32) << MANTISSA);
    sign | steps.min(u32::from(top)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::e4m3;

    /// The code of the nearest of 128 values, the even code at a tie.
    fn nearest(t: f32, value: impl Fn(u8) -> f32) -> u8 {
        let finite = (0u8..128).filter(|&code| value(code).is_finite());
        let gap = |code: u8| (f64::from(value(code)) - f64::from(t.abs())).abs();
        let best = finite.min_by(|&a, &b| gap(a).total_cmp(&gap(b)).then((a % 2).cmp(&(b % 2)))).unwrap();
        best | if t.is_sign_negative() { 128 } else { 0 }
    }

    #[test]
    fn codes_of_8_bit_floats_are_those_of_the_nearest_values() {
        let e5m2 = |code: u8| f16::from_bits(u16::from(code) << 8).to_f32();
        let mut numbers: Vec<f32> = (0..60_000u32).map(|i| f32::from_bits(i * 5701 + 0x3500_0000)).collect();
        numbers.extend((0..127).flat_map(|code| {
            let middle = f32::midpoint(e4m3(code), e4m3((code + 1).min(126)));
            [middle, middle.next_up(), middle.next_down(), -middle]
        }));
        numbers.extend((0..123).flat_map(|code| {
            let middle = f32::midpoint(e5m2(code), e5m2(code + 1).min(57344.0));
            [middle, middle.next_up(), middle.next_down(), -middle]
        }));
        numbers.extend([0.0, -0.0, 1e-30, 448.0, 449.0, 465.0, 60000.0, 1e9, -1e9]);
        for t in numbers {
            assert_eq!(Target::E4m3.code(t), nearest(t, e4m3), "e4m3 of {t:e}");
            assert_eq!(Target::E5m2.code(t), nearest(t, e5m2), "e5m2 of {t:e}");
        }
    }

    #[test]
    fn integers_stay_within_127() {
        let codes = [-200.0, -127.4, -0.5, 0.5, 1.5, 126.6, 500.0].map(|t| Target::Int8.code(t));
        assert_eq!(codes, [1, 1, 128, 128, 130, 255, 255]);
        assert_eq!([0.5f32.next_up(), -0.5f32.next_up()].map(|t| Target::Int8.code(t)), [129, 127]);
    }
}
