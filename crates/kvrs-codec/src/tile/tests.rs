//! Stored values against the descriptor's formula, written out by hand.

use super::*;
use crate::desc::{Arith, NONE};
use crate::layout::pack_block;
use crate::transform::Transform;

#[test]
fn e4m3_has_the_values_of_its_definition() {
    let cases =
        [(0x00, 0.0), (0x01, 2f32.powi(-9)), (0x08, 2f32.powi(-6)), (0x38, 1.0), (0xBC, -1.5), (0x7E, 448.0)];
    for (bits, value) in cases {
        assert_eq!(e4m3(bits).to_bits(), f32::to_bits(value), "{bits:02x}");
    }
    assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
}

/// Two 3-bit blocks of integers with a token scale each, inner scales and one sparse difference in each tile.
fn side(inner: Inner) -> SideDesc {
    let run = |at, vec_at, scale| RunDesc {
        width: 3,
        elem: Elem::Int,
        arith: Arith::F32,
        scale,
        channels: 16,
        vec_at,
        at,
        lut_at: NONE,
        step: 0.5,
        zero: -3.0,
    };
    SideDesc {
        path: Path::Dot,
        parts: 1,
        d: 32,
        n: 32,
        vec_len: 32,
        inner,
        block: 16,
        base_pairs: 0,
        sparse_per_tile: 1,
        tile_ops: 0,
        tile_bytes: 192,
        codes_at: 0,
        scales_at: 768,
        scales: 2,
        inner_at: 1024,
        sparse_at: 2048,
        runs: vec![run(0, 0, 1), run(96, 16, 0)],
    }
}

fn halves(at: usize, bytes: &mut [u8], values: &[f32]) {
    for (b, v) in bytes[at..].as_chunks_mut().0.iter_mut().zip(values) {
        *b = f16::from_f32(*v).to_le_bytes();
    }
}

/// Code of a token and channel.
fn code(slot: usize, channel: usize) -> u8 {
    ((slot * 5 + channel * 3) % 8) as u8
}

fn page(side: Side, desc: &SideDesc) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    for (tile, run) in (0..4).flat_map(|t| (0..2).map(move |r| (t, r))) {
        let codes = std::array::from_fn(|i| code(16 * tile + i / 16, 16 * run + i % 16));
        let at = tile * 192 + desc.runs[run].at as usize;
        pack_block(side, 3, &codes, &mut bytes[at..at + 96], 0, 16);
    }
    let scales: Vec<f32> = (0..128).map(|i| 1.0 + i as f32 / 128.0).collect();
    halves(768, &mut bytes, &scales);
    let inner: Vec<f32> = (0..256).map(|i| if i % 2 == 0 { i as f32 / 64.0 } else { -(i as f32) }).collect();
    halves(1024, &mut bytes, &inner);
    for tile in 0..4 {
        let place = 7 * 0x400 + 20; // token 7, channel 20
        bytes[2048 + 4 * tile..][..2].copy_from_slice(&(place as u16).to_le_bytes());
        halves(2050 + 4 * tile, &mut bytes, &[100.0]);
    }
    bytes
}

fn decoded(side: Side, inner: Inner, slot: usize) -> Vec<f32> {
    let constants = SideCodec {
        transform: Transform::Identity { d: 32 },
        lut8: [].into(),
        lut32: [].into(),
        offset: None,
        mean: None,
        rope: None,
        encoder: None,
    };
    let (key, value) = (desc_of(side, Side::Key, inner), desc_of(side, Side::Value, inner));
    let desc = PageDesc { slots: 64, group: 16, heads: 1, page_bytes: 4096, key, value };
    let bytes = page(side, desc.side(side));
    let codec =
        HeadCodec { id: crate::codec::CodecId::fresh(), desc, key: constants.clone(), value: constants };
    let mut out = vec![0.0; 32];
    decode_slot(&codec, side, &bytes, slot, 0, 0, &mut out);
    out
}

fn desc_of(wanted: Side, this: Side, inner: Inner) -> SideDesc {
    side(if wanted == this { inner } else { Inner::None })
}

#[test]
fn stored_values_follow_the_formula_of_the_descriptor() {
    let pair = |i: usize| ((2 * i) as f32 / 64.0, -((2 * i + 1) as f32));
    for (side, inner) in [(Side::Key, Inner::GroupChannel), (Side::Value, Inner::TokenBlock)] {
        for slot in [0, 7, 16 + 7, 63] {
            for (c, got) in decoded(side, inner, slot).into_iter().enumerate() {
                let scale = 1.0 + ([64, 0][c / 16] + slot) as f32 / 128.0;
                let (s, m) = pair(if side == Side::Key { slot / 16 * 32 + c } else { slot * 2 + c / 16 });
                let sparse = if slot % 16 == 7 && c == 20 { 100.0 } else { 0.0 };
                let expected = (f32::from(code(slot, c)) - 3.0) * 0.5 * scale * s + m + sparse;
                assert!(
                    (got - expected).abs() < 1e-4,
                    "{side:?} slot {slot} channel {c}: {got} for {expected}"
                );
            }
        }
    }
}
