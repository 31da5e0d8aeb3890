//! Shuffles and votes.

use super::{Random, words};

/// The lane that a lane reads, by the manual's words: segments of `width` lanes, and its own value where there is no
/// lane to read.
fn source(kind: usize, lane: u32, operand: u32, width: u32) -> u32 {
    let (segment, place) = (lane / width, lane % width);
    let first = segment * width;
    match kind {
        0 => first + operand % width,
        1 if place >= operand => lane - operand,
        2 if place + operand < width => lane + operand,
        // A segment may read an earlier one.
        3 if (lane ^ operand) / width <= segment => lane ^ operand,
        _ => lane,
    }
}

#[test]
fn shuffles_read_the_right_lane_for_every_width_operand_and_lane() {
    words("try_shuffles", 32, [32, 6, 1], &[0], 0, 6 * 32 * 128, |out| {
        for (i, &got) in out.iter().enumerate() {
            let (lane, kind, operand, width) = (i % 32, i / 32 % 4, i / 128 % 32, 1 << (i / 4096));
            let expected = 100 + source(kind, lane as u32, operand as u32, width);
            assert_eq!(got, expected, "kind {kind}, width {width}, operand {operand}, lane {lane}");
        }
    });
}

#[test]
fn shuffles_move_values_of_four_and_eight_bytes() {
    words("try_shuffled_types", 32, [1, 1, 1], &[0], 0, 192, |out| {
        let value = |kind: usize, lane: usize| {
            let words = &out[64 * kind + 2 * lane..];
            u64::from(words[1]) << 32 | u64::from(words[0])
        };
        for lane in 0..32 {
            let next = (lane + 1) % 32;
            assert_eq!(value(0, lane), u64::from((0.5 + next as f32).to_bits()));
            assert_eq!(value(1, lane), (1.0 / 3.0 + next as f64).to_bits());
            assert_eq!(value(2, lane), (next as u64) << 33 | 5);
        }
    });
}

#[test]
fn votes_count_the_lanes_of_their_mask_only() {
    let mut random = Random(5);
    let masks = [u32::MAX, 1, 1 << 31, 0xffff, 0xffff_0000, 0x5555_5555, random.word(), random.word()];
    let says: Vec<u32> =
        (0..32).map(|i| 1 << i).chain([0, u32::MAX]).chain((0..20).map(|_| random.word())).collect();
    let says = |mask: u32| says.iter().copied().chain([mask, !mask]).map(move |says| [mask, says]);
    let cases: Vec<[u32; 2]> = masks.into_iter().flat_map(says).collect();
    let blocks = cases.len() as u32;
    words("try_votes", 32, [blocks, 1, 1], cases.as_flattened(), 0, 96 * cases.len(), |out| {
        for (&[mask, says], results) in cases.iter().zip(out.chunks(96)) {
            for (lane, got) in results.chunks(3).enumerate().filter(|(lane, _)| mask >> lane & 1 == 1) {
                let (some, every) = (u32::from(says & mask != 0), u32::from(!says & mask == 0));
                assert_eq!(got[0], says & mask, "mask {mask:#x}, {says:#x}, lane {lane}");
                assert_eq!(
                    (u32::from(got[1] != 0), u32::from(got[2] != 0)),
                    (some, every),
                    "mask {mask:#x}, {says:#x}"
                );
            }
        }
    });
}
