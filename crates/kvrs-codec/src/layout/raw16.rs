//! Width 16: token-major rows of little-endian 16-bit words, keys and values alike.

use crate::desc::Elem;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Reads 16 neighbouring elements of a row as f32, exactly.
///
/// # Panics
/// If `elem` is no 16-bit float.
#[must_use]
pub fn read_16(elem: Elem, bytes: &[u8; 32]) -> [f32; 16] {
    let mut out = [0.0; 16];
    match elem {
        Elem::F16 => {
            let mut words = [f16::ZERO; 16];
            for (w, b) in words.iter_mut().zip(bytes.as_chunks().0) {
                *w = f16::from_le_bytes(*b);
            }
            words.convert_to_f32_slice(&mut out);
        }
        Elem::Bf16 => {
            for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        _ => unreachable!("16-bit rows hold f16 or bf16"),
    }
    out
}

/// Reads the first channels of the row of token `token` of a width-16 tile as f32, exactly.
///
/// # Panics
/// If the tile is shorter than that row, `out` is longer than it, or `elem` is no 16-bit float.
pub fn read_row(elem: Elem, tile: &[u8], token: usize, channels: usize, out: &mut [f32]) {
    let row = &tile[2 * token * channels..][..2 * channels];
    if elem == Elem::Bf16 {
        // One plain loop, which the compiler turns into vectors.
        for (x, b) in out.iter_mut().zip(row.as_chunks().0) {
            *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
        return;
    }
    let (chunks, rest) = out.as_chunks_mut::<16>();
    for (out, bytes) in chunks.iter_mut().zip(row.as_chunks().0) {
        *out = read_16(elem, bytes);
    }
    let mut last = [0; 32];
    let bytes = &row[32 * chunks.len()..][..2 * rest.len()];
    last[..bytes.len()].copy_from_slice(bytes);
    rest.copy_from_slice(&read_16(elem, &last)[..rest.len()]);
}

/// 16 neighbouring elements of a row, rounded to nearest even.
///
/// # Panics
/// If `elem` is no 16-bit float.
#[must_use]
pub fn write_16(elem: Elem, values: &[f32; 16]) -> [u8; 32] {
    let mut bytes = [0; 32];
    match elem {
        Elem::F16 => {
            let mut words = [f16::ZERO; 16];
            words.convert_from_f32_slice(values);
            for (b, w) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
                *b = w.to_le_bytes();
            }
        }
        Elem::Bf16 => {
            for (b, x) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
                *b = bf16::from_f32(*x).to_le_bytes();
            }
        }
        _ => unreachable!("16-bit rows hold f16 or bf16"),
    }
    bytes
}

/// The bytes of the row of token `token` of a width-16 tile.
///
/// # Panics
/// If the tile is shorter than that row.
pub fn row_bytes_mut(tile: &mut [u8], token: usize, channels: usize) -> &mut [u8] {
    &mut tile[2 * token * channels..][..2 * channels]
}

/// Writes `row` into the row of token `token` of a width-16 tile, rounded to nearest even; channels beyond
/// `row` become zero.
///
/// # Panics
/// If the tile is shorter than that row, `row` is longer than it, or `elem` is no 16-bit float.
pub fn write_row(elem: Elem, row: &[f32], tile: &mut [u8], token: usize, channels: usize) {
    let (to, pad) = row_bytes_mut(tile, token, channels).split_at_mut(2 * row.len());
    let ((to, last), (row, rest)) = (to.as_chunks_mut::<32>(), row.as_chunks::<16>());
    for (to, row) in to.iter_mut().zip(row) {
        *to = write_16(elem, row);
    }
    if !rest.is_empty() {
        let mut chunk = [0.0; 16];
        chunk[..rest.len()].copy_from_slice(rest);
        last.copy_from_slice(&write_16(elem, &chunk)[..last.len()]);
    }
    pad.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_token_major_in_little_endian_and_pads_are_zero() {
        let mut tile = [0xFF; 16 * 16 * 2];
        write_row(Elem::F16, &[1.0, -2.0], &mut tile, 3, 16);
        assert_eq!(tile[3 * 32..3 * 32 + 6], [0x00, 0x3C, 0x00, 0xC0, 0, 0]);
        assert_eq!((tile[3 * 32 - 1], tile[4 * 32]), (0xFF, 0xFF));
        let mut row = [9.0; 3];
        read_row(Elem::F16, &tile, 3, 16, &mut row);
        assert_eq!(row, [1.0, -2.0, 0.0]);
    }

    #[test]
    fn every_16_bit_value_comes_back() {
        for elem in [Elem::F16, Elem::Bf16] {
            for bits in (0..=u16::MAX).step_by(7) {
                let mut tile = [0; 512];
                tile[..2].copy_from_slice(&bits.to_le_bytes());
                let mut row = [0.0];
                read_row(elem, &tile, 0, 16, &mut row);
                let mut back = [0; 512];
                write_row(elem, &row, &mut back, 0, 16);
                assert!(row[0].is_nan() || back[..2] == tile[..2], "{elem:?} {bits:04x}");
            }
        }
    }
}
