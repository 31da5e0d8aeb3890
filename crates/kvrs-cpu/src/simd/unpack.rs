//! Planes of packed codes to bytes, one block of 16 rows by 16 lanes at a time.
//!
//! Up to 4 bits the codes stay inside nibbles, at the bits where they were packed: a table per row quad knows which
//! bits count, so that a two-bit code costs one and a half instructions (`docs/layouts.md` draws the planes).

use super::Simd;

/// Levels by nibble for each of the four row quads of a block.
pub(crate) type Tables = [[u8; 16]; 4];

#[inline(always)]
fn unit<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].try_into().expect("the slice has N bytes")
}

/// The two halves of every byte as nibbles, unmasked above the first.
#[inline(always)]
fn nibbles<S: Simd>(s: S, x: S::I) -> [S::I; 2] {
    let low = s.splat_bytes(15);
    [s.and(x, low), s.and(s.shift_right::<4>(x), low)]
}

/// Bits `of_a` of `a` and `of_b` of `b`.
#[inline(always)]
fn mix<S: Simd>(s: S, a: S::I, of_a: u8, b: S::I, of_b: u8) -> S::I {
    s.or(s.and(a, s.splat_bytes(of_a)), s.and(b, s.splat_bytes(of_b)))
}

/// The tables in registers; with 4 bits all are the same.
#[inline(always)]
pub(crate) fn tables<S: Simd, const W: usize>(s: S, tables: &Tables) -> [S::I; 4] {
    if W == 4 {
        [s.table16(&tables[0]); 4]
    } else {
        [s.table16(&tables[0]), s.table16(&tables[1]), s.table16(&tables[2]), s.table16(&tables[3])]
    }
}

/// Table indices of the four row quads of block `odd` of a pair of `W` <= 4 bits (`64 * W` bytes).
#[inline(always)]
pub(crate) fn narrow<S: Simd, const W: usize>(s: S, pair: &[u8], odd: usize, half: usize) -> [S::I; 4] {
    assert!(pair.len() == 64 * W && odd < 2);
    match W {
        4 => plane4(s, pair, 128 * odd, half),
        2 => plane2(s, pair, 64 * odd, half),
        1 => {
            let a = nibbles(s, s.load(unit(pair, 0), half))[odd];
            [a; 4]
        }
        _ => {
            let y = s.load(unit(pair, 128), half);
            let y = if odd == 0 { y } else { s.shift_right::<4>(y) };
            three(s, s.load(unit(pair, 64 * odd), half), y)
        }
    }
}

/// As [`narrow`], for the last block of a run that has no partner (`32 * W` bytes).
#[inline(always)]
pub(crate) fn narrow_lone<S: Simd, const W: usize>(s: S, bytes: &[u8], half: usize) -> [S::I; 4] {
    assert!(bytes.len() == 32 * W);
    match W {
        4 => plane4(s, bytes, 0, half),
        2 => plane2(s, bytes, 0, half),
        1 => [s.and(s.load_lone(unit(bytes, 0), half), s.splat_bytes(15)); 4],
        _ => three(s, s.load(unit(bytes, 0), half), s.load_lone(unit(bytes, 64), half)),
    }
}

#[inline(always)]
fn plane4<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> [S::I; 4] {
    let [a, b] = nibbles(s, s.load(unit(bytes, at), half));
    let [c, d] = nibbles(s, s.load(unit(bytes, at + 64), half));
    [a, b, c, d]
}

#[inline(always)]
fn plane2<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> [S::I; 4] {
    let [a, b] = nibbles(s, s.load(unit(bytes, at), half));
    [a, a, b, b]
}

/// Three bits: plane 1 holds its bits where plane 2 leaves the nibble free.
#[inline(always)]
fn three<S: Simd>(s: S, two: S::I, one: S::I) -> [S::I; 4] {
    let high = s.shift_right::<4>(two);
    [mix(s, two, 3, one, 4), mix(s, two, 12, one, 1), mix(s, high, 3, one, 8), mix(s, high, 12, one, 2)]
}

/// Codes of the four row quads of block `odd` of a pair of `W` >= 5 bits (`64 * W` bytes).
#[inline(always)]
pub(crate) fn wide<S: Simd, const W: usize>(s: S, pair: &[u8], odd: usize, half: usize) -> [S::I; 4] {
    assert!(pair.len() == 64 * W && odd < 2);
    if W == 8 {
        return bytes8(s, pair, 256 * odd, half);
    }
    let mut codes = plane4(s, pair, 128 * odd, half);
    if W & 2 != 0 {
        add_two(s, s.load(unit(pair, 256 + 64 * odd), half), &mut codes);
    }
    if W & 1 != 0 {
        let one = s.load(unit(pair, 64 * (W - 1)), half);
        add_one::<S, W>(s, if odd == 0 { one } else { s.shift_right::<4>(one) }, &mut codes);
    }
    codes
}

/// As [`wide`], for the last block of a run that has no partner (`32 * W` bytes).
#[inline(always)]
pub(crate) fn wide_lone<S: Simd, const W: usize>(s: S, bytes: &[u8], half: usize) -> [S::I; 4] {
    assert!(bytes.len() == 32 * W);
    if W == 8 {
        return bytes8(s, bytes, 0, half);
    }
    let mut codes = plane4(s, bytes, 0, half);
    if W & 2 != 0 {
        add_two(s, s.load(unit(bytes, 128), half), &mut codes);
    }
    if W & 1 != 0 {
        add_one::<S, W>(s, s.load_lone(unit(bytes, 32 * (W - 1)), half), &mut codes);
    }
    codes
}

#[inline(always)]
fn bytes8<S: Simd>(s: S, bytes: &[u8], at: usize, half: usize) -> [S::I; 4] {
    [
        s.load(unit(bytes, at), half),
        s.load(unit(bytes, at + 64), half),
        s.load(unit(bytes, at + 128), half),
        s.load(unit(bytes, at + 192), half),
    ]
}

/// Adds the bits of plane 2 as bits 4 and 5.
#[inline(always)]
fn add_two<S: Simd>(s: S, two: S::I, codes: &mut [S::I; 4]) {
    let mask = s.splat_bytes(0x30);
    let fields = [s.shift_left::<4>(two), s.shift_left::<2>(two), two, s.shift_right::<2>(two)];
    for z in 0..4 {
        codes[z] = s.or(codes[z], s.and(fields[z], mask));
    }
}

/// Adds the bits of plane 1 (low nibbles) as bit 4 or, behind a plane 2, as bit 6.
#[inline(always)]
fn add_one<S: Simd, const W: usize>(s: S, one: S::I, codes: &mut [S::I; 4]) {
    let (mask, fields) = if W & 2 == 0 {
        (
            0x10,
            [s.shift_left::<4>(one), s.shift_left::<3>(one), s.shift_left::<2>(one), s.shift_left::<1>(one)],
        )
    } else {
        (
            0x40,
            [s.shift_left::<6>(one), s.shift_left::<5>(one), s.shift_left::<4>(one), s.shift_left::<3>(one)],
        )
    };
    let mask = s.splat_bytes(mask);
    for z in 0..4 {
        codes[z] = s.or(codes[z], s.and(fields[z], mask));
    }
}

/// Signed levels of codes of `W` >= 5 bits: by table up to 6 bits, integers around zero beyond.
#[inline(always)]
pub(crate) fn wide_levels<S: Simd, const W: usize>(s: S, table: &[u8; 64], codes: S::I) -> S::I {
    if W <= 6 { s.lookup64(table, codes) } else { s.sub_bytes(codes, s.splat_bytes(1 << (W - 1))) }
}
