//! Neighbouring elements to and from f32.

use super::Dtype;
use crate::desc::Elem;
use crate::layout;
use half::{bf16, f16};

/// Channels that pass through the stack at once.
pub(super) const PART: usize = 128;

/// Reads little-endian elements, exactly.
pub(super) fn read(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        Dtype::F16 => layout::read_row(Elem::F16, bytes, 0, out.len(), out),
        Dtype::Bf16 => layout::read_row(Elem::Bf16, bytes, 0, out.len(), out),
    }
}

/// Whether the magnitudes of all little-endian elements are at most `limit`; a NaN's is not.
pub(super) fn within(dtype: Dtype, bytes: &[u8], limit: f32) -> bool {
    // Without its sign, a 16-bit float orders as its bits do, infinity and NaN behind all others.
    let largest = |rounded: u16, value: f32| rounded - u16::from(value > limit);
    let most = match dtype {
        Dtype::F32 => {
            // One pass without branches: `max` would hide a NaN.
            let fine = |b: &[u8; 4]| f32::from_le_bytes(*b).abs() <= limit;
            return bytes.as_chunks().0.iter().fold(true, |all, b| all & fine(b));
        }
        Dtype::F16 => largest(f16::from_f32(limit).to_bits(), f16::from_f32(limit).to_f32()),
        Dtype::Bf16 => largest(bf16::from_f32(limit).to_bits(), bf16::from_f32(limit).to_f32()),
    };
    let magnitude = |b: &[u8; 2]| i16::from_le_bytes(*b) & i16::MAX;
    bytes.as_chunks().0.iter().fold(0, |most, b| magnitude(b).max(most)) as u16 <= most
}

/// Writes little-endian elements, rounded to nearest even.
pub(super) fn write(dtype: Dtype, values: &[f32], out: &mut [u8]) {
    match dtype {
        Dtype::F32 => {
            for (b, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *b = x.to_le_bytes();
            }
        }
        Dtype::F16 => layout::write_row(Elem::F16, values, out, 0, values.len()),
        Dtype::Bf16 => layout::write_row(Elem::Bf16, values, out, 0, values.len()),
    }
}
