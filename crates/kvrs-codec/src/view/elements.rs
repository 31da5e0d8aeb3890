//! Neighbouring elements to and from f32.

use super::Dtype;
use crate::desc::Elem;
use crate::layout;

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
