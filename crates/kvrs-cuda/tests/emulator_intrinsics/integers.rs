//! prmt, dp4a and bits.

use super::{Random, corners, words};

/// The byte that a nibble of prmt's selector stands for.
fn chosen(a: u32, b: u32, nibble: u32) -> u8 {
    let bytes: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    let byte = bytes[nibble as usize % 8];
    if nibble < 8 { byte } else { ((byte as i8) >> 7) as u8 }
}

#[test]
fn byte_perm_is_right_for_every_selector() {
    let pairs = [[0x3322_1100, 0x7766_5544], [0x80ff_7f01, 0x0180_ff00], [0xdead_beef, 0x8421_1248]];
    words("try_byte_perm", 256, [256, 3, 1], pairs.as_flattened(), 0, 3 << 16, |out| {
        for (pair, results) in pairs.iter().zip(out.chunks(1 << 16)) {
            for (selector, &got) in results.iter().enumerate() {
                let byte = |i: usize| chosen(pair[0], pair[1], (selector >> (4 * i)) as u32 & 15);
                let expected = u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]);
                assert_eq!(got, expected, "{pair:x?}, selector {selector:#x}");
            }
        }
    });
}

#[test]
fn dp4a_multiplies_bytes_with_and_without_signs_and_wraps() {
    let values = corners(20, 1);
    let sums = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff];
    let pairs = values.iter().flat_map(|&a| values.iter().map(move |&b| (a, b)));
    let triples: Vec<[u32; 3]> = pairs.flat_map(|(a, b)| sums.map(|c| [a, b, c])).collect();
    let blocks = triples.len().div_ceil(128) as u32;
    words("try_dp4a", 128, [blocks, 1, 1], triples.as_flattened(), triples.len(), 2 * triples.len(), |out| {
        for (&[a, b, c], got) in triples.iter().zip(out.chunks(2)) {
            let bytes = || a.to_le_bytes().into_iter().zip(b.to_le_bytes());
            let signed: i64 = bytes().map(|(x, y)| i64::from(x as i8) * i64::from(y as i8)).sum();
            let unsigned: i64 = bytes().map(|(x, y)| i64::from(x) * i64::from(y)).sum();
            let expected = [signed, unsigned].map(|sum| (sum + i64::from(c)) as u32);
            assert_eq!(got, expected, "{a:#x} {b:#x} {c:#x}");
        }
    });
}

/// Place of the lowest bit plus one, or 0.
fn first_set(x: u64) -> u32 {
    (0..64).find(|&i| x >> i & 1 == 1).map_or(0, |i| i + 1)
}

#[test]
fn bits_are_counted_found_and_moved() {
    let mut random = Random(3);
    let single =
        (0..32).flat_map(|i| [[1u32 << i, 0], [0, 1 << i], [u32::MAX >> i, 1], [u32::MAX << i, u32::MAX]]);
    let pairs: Vec<[u32; 2]> =
        single.chain([[0, 0]]).chain((0..300).map(|_| [random.word(), random.word()])).collect();
    let blocks = pairs.len().div_ceil(128) as u32;
    words("try_bits", 128, [blocks, 1, 1], pairs.as_flattened(), pairs.len(), 10 * pairs.len(), |out| {
        for (&[low, high], got) in pairs.iter().zip(out.chunks(10)) {
            let both = u64::from(high) << 32 | u64::from(low);
            let ones = |x: u64| (0..64).map(|i| (x >> i & 1) as u32).sum::<u32>();
            let width = |x: u64| (0..64).rev().find(|&i| x >> i & 1 == 1).map_or(0, |i| i + 1);
            let reversed = (0..32).fold(0, |r, i| r | (low >> i & 1) << (31 - i));
            let shift = low % 32;
            let expected = [
                ones(u64::from(low)),
                ones(both),
                first_set(u64::from(low)),
                first_set(both),
                32 - width(u64::from(low)),
                64 - width(both),
                ((u128::from(low) * u128::from(high)) >> 32) as u32,
                reversed,
                ((u128::from(both) << shift) >> 32) as u32,
                (both >> shift) as u32,
            ];
            assert_eq!(got, expected, "{low:#x} {high:#x}");
        }
    });
}
