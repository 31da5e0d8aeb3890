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
    let words: [u16; 16] = std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
    match elem {
        Elem::F16 => {
            let mut out = [0.0; 16];
            words.map(f16::from_bits).convert_to_f32_slice(&mut out);
            out
        }
        Elem::Bf16 => words.map(|w| f32::from_bits(u32::from(w) << 16)),
        _ => unreachable!("16-bit rows hold f16 or bf16"),
    }
}

/// Reads the first channels of the row of token `token` of a width-16 tile as f32, exactly.
///
/// # Panics
/// If the tile is shorter than that row, `out` is longer than it, or `elem` is no 16-bit float.
pub fn read_row(elem: Elem, tile: &[u8], token: usize, channels: usize, out: &mut [f32]) {
    let row = &tile[2 * token * channels..][..2 * channels];
    for (out, bytes) in out.chunks_mut(16).zip(row.as_chunks().0) {
        out.copy_from_slice(&read_16(elem, bytes)[..out.len()]);
    }
}

/// Writes `row` into the row of token `token` of a width-16 tile, rounded to nearest even; channels beyond
/// `row` become zero.
///
/// # Panics
/// If the tile is shorter than that row, `row` is longer than it, or `elem` is no 16-bit float.
pub fn write_row(elem: Elem, row: &[f32], tile: &mut [u8], token: usize, channels: usize) {
    let (to, pad) = tile[2 * token * channels..][..2 * channels].split_at_mut(2 * row.len());
    for (b, &x) in to.as_chunks_mut().0.iter_mut().zip(row) {
        *b = match elem {
            Elem::F16 => f16::from_f32(x).to_le_bytes(),
            Elem::Bf16 => bf16::from_f32(x).to_le_bytes(),
            _ => unreachable!("16-bit rows hold f16 or bf16"),
        };
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
