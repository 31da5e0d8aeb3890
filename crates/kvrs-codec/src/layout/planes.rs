//! Widths 1 to 8 as planes of 4, 2 and 1 bits; width 8 is a byte.
//!
//! Blocks go in pairs: plane 4 of both (128 bytes each), plane 2 of both (64 bytes each), one shared plane 1
//! (64 bytes); a last block without a partner has 128, 64 and 32 bytes. The low bits of a code lie in the
//! largest plane.

/// Codes of a block as `[field][lane * 4 + adj]`.
pub type Cells = [[u8; 64]; 4];

/// Where the planes of a block lie in the tile of its run, in bytes.
struct Planes {
    four: Option<usize>,
    two: Option<usize>,
    one: Option<usize>,
    /// The block has no partner.
    lone: bool,
    /// The block is the second of its pair.
    odd: usize,
}

impl Planes {
    fn new(width: u32, block: usize, run_channels: usize) -> Self {
        assert!((1..=7).contains(&width), "planes hold 1 to 7 bits, not {width}");
        let (pair, odd, width) = (block / 2, block % 2, width as usize);
        let lone = 2 * pair + 1 >= run_channels / 16;
        let blocks = if lone { 1 } else { 2 };
        let mut at = pair * 64 * width;
        let mut plane = |bits: usize| {
            (width & bits != 0).then(|| {
                let here = at;
                at += blocks * 32 * bits;
                if bits == 1 { here } else { here + odd * 32 * bits }
            })
        };
        Self { four: plane(4), two: plane(2), one: plane(1), lone, odd }
    }

    /// Bits of plane 1 for the fields: with width 3 the bit lands in the half of the nibble that plane 2 leaves free.
    fn one_bits(width: u32) -> [u32; 4] {
        if width == 3 { [2, 0, 3, 1] } else { [0, 1, 2, 3] }
    }
}

fn unit<const N: usize>(tile: &[u8], at: usize) -> &[u8; N] {
    tile[at..].first_chunk().expect("tiles hold all planes of their blocks")
}

fn unit_mut<const N: usize>(tile: &mut [u8], at: usize) -> &mut [u8; N] {
    tile[at..].first_chunk_mut().expect("tiles hold all planes of their blocks")
}

/// Unpacks the codes of block `block` as `[field][lane * 4 + adj]`.
///
/// # Panics
/// If `width` is not 1 to 8, or the tile is shorter than the run's.
pub fn unpack_cells(width: u32, tile: &[u8], block: usize, run_channels: usize, cells: &mut Cells) {
    if width == 8 {
        *cells = std::array::from_fn(|z| *unit(tile, block * 256 + 64 * z));
        return;
    }
    let planes = Planes::new(width, block, run_channels);
    let mut low = 0;
    if let Some(at) = planes.four {
        for half in 0..2 {
            let bytes: &[u8; 64] = unit(tile, at + 64 * half);
            cells[2 * half] = bytes.map(|b| b & 15);
            cells[2 * half + 1] = bytes.map(|b| b >> 4);
        }
        low = 4;
    } else {
        *cells = [[0; 64]; 4];
    }
    if let Some(at) = planes.two {
        let bytes: &[u8; 64] = unit(tile, at);
        for (z, field) in cells.iter_mut().enumerate() {
            field.iter_mut().zip(bytes).for_each(|(c, b)| *c |= (b >> (2 * z) & 3) << low);
        }
        low += 2;
    }
    if let Some(at) = planes.one {
        unpack_one(&planes, width, at, tile, low, cells);
    }
}

fn unpack_one(planes: &Planes, width: u32, at: usize, tile: &[u8], low: u32, cells: &mut Cells) {
    let bits = Planes::one_bits(width);
    if planes.lone {
        let bytes: &[u8; 32] = unit(tile, at);
        for (field, bit) in cells.iter_mut().zip(bits) {
            let (first, second) = field.split_at_mut(32);
            first.iter_mut().zip(bytes).for_each(|(c, b)| *c |= (b >> bit & 1) << low);
            second.iter_mut().zip(bytes).for_each(|(c, b)| *c |= (b >> (4 + bit) & 1) << low);
        }
    } else {
        let bytes: &[u8; 64] = unit(tile, at);
        for (field, bit) in cells.iter_mut().zip(bits) {
            let bit = bit + 4 * planes.odd as u32;
            field.iter_mut().zip(bytes).for_each(|(c, b)| *c |= (b >> bit & 1) << low);
        }
    }
}

/// Packs the codes `[field][lane * 4 + adj]` of block `block`; bits of other blocks stay.
///
/// # Panics
/// If `width` is not 1 to 8, or the tile is shorter than the run's.
pub fn pack_cells(width: u32, cells: &Cells, tile: &mut [u8], block: usize, run_channels: usize) {
    if width == 8 {
        for (z, field) in cells.iter().enumerate() {
            *unit_mut(tile, block * 256 + 64 * z) = *field;
        }
        return;
    }
    let planes = Planes::new(width, block, run_channels);
    let mut low = 0;
    if let Some(at) = planes.four {
        for half in 0..2 {
            let bytes: &mut [u8; 64] = unit_mut(tile, at + 64 * half);
            *bytes = std::array::from_fn(|i| cells[2 * half][i] & 15 | cells[2 * half + 1][i] << 4);
        }
        low = 4;
    }
    if let Some(at) = planes.two {
        let bytes: &mut [u8; 64] = unit_mut(tile, at);
        let part = |z: usize, i: usize| (cells[z][i] >> low & 3) << (2 * z);
        *bytes = std::array::from_fn(|i| part(0, i) | part(1, i) | part(2, i) | part(3, i));
        low += 2;
    }
    if let Some(at) = planes.one {
        pack_one(&planes, width, at, tile, low, cells);
    }
}

fn pack_one(planes: &Planes, width: u32, at: usize, tile: &mut [u8], low: u32, cells: &Cells) {
    let bits = Planes::one_bits(width);
    let nibble = |i: usize| (0..4).fold(0, |n, z| n | (cells[z][i] >> low & 1) << bits[z]);
    if planes.lone {
        let bytes: &mut [u8; 32] = unit_mut(tile, at);
        *bytes = std::array::from_fn(|i| nibble(i) | nibble(i + 32) << 4);
    } else {
        let shift = 4 * planes.odd;
        let bytes: &mut [u8; 64] = unit_mut(tile, at);
        for (i, b) in bytes.iter_mut().enumerate() {
            *b = *b & !(15 << shift) | nibble(i) << shift;
        }
    }
}
