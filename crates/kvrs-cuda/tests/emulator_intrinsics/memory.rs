//! Loads, asynchronous copies and atomic additions.

use super::words;

#[test]
fn loads_of_every_width_read_their_bytes() {
    let bytes: Vec<u8> = (0..512u32).map(|i| (i * 7 + i / 256) as u8).collect();
    let input: Vec<u32> = bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    words("try_loads", 32, [1, 1, 1], &input, 0, 32 * 9, |out| {
        for (lane, got) in out.chunks(9).enumerate() {
            let half = u32::from(bytes[2 * lane]) | u32::from(bytes[2 * lane + 1]) << 8;
            let small = [input[lane], half, u32::from(bytes[lane])];
            let expected = [&input[4 * lane..4 * lane + 4], &input[2 * lane..2 * lane + 2], &small].concat();
            assert_eq!(got, expected, "lane {lane}");
        }
    });
}

#[test]
fn asynchronous_copies_of_every_width_move_their_bytes_or_zeros() {
    let input: Vec<u32> = (0..384).map(|i| 1000 + i).collect();
    for valid in [0, 1, 20, 32] {
        words("try_cp_async", 32, [1, 1, 1], &input, valid, 384, |out| {
            for (i, &got) in out.iter().enumerate() {
                let (lane, copied) = (i / 4 % 32, i % 4 < 4 >> (i / 128));
                let expected = if !copied {
                    7
                } else if lane < valid {
                    input[i]
                } else {
                    0
                };
                assert_eq!(got, expected, "{valid} valid, word {i}");
            }
        });
    }
}

#[test]
fn atomic_operations_lose_nothing() {
    words("try_atomics", 64, [9, 1, 1], &[0], 0, 2, |out| {
        assert_eq!(out, [576 * 575 / 2, (0..576).map(|i| i ^ 5).max().unwrap()]);
    });
}
