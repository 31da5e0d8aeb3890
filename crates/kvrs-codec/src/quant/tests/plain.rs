//! Quantisers without a rotation, and `RaBitQ`: errors, stored numbers and refusals.

use super::*;
use crate::encode::BOUND_SCALE;
use half::f16;

pub(super) fn named(name: &str, params: impl Into<Value>) -> CodecSpec {
    serde_json::from_value(json!({ "name": name, "params": params.into() })).unwrap()
}

/// Rows whose channels have sizes from .01 to 10, and a dead channel.
fn uneven(key: u64, tokens: usize, d: usize) -> Vec<f32> {
    let size = |c: usize| if c == 5 { 0.0 } else { 10f64.powf(3.0 * (c % 7) as f64 / 6.0 - 2.0) };
    let x = rng::gaussian(key, tokens * d);
    x.iter().enumerate().map(|(i, x)| f16::from_f64(x * size(i % d)).to_f32()).collect()
}

/// Largest |x - y| over the block's range, of blocks of `tokens` times `channels`.
fn share_of_range(x: &[f32], y: &[f32], d: usize, [tokens, channels]: [usize; 2]) -> f32 {
    let mut worst = 0.0f32;
    for (x, y) in x.chunks(tokens * d).zip(y.chunks(tokens * d)) {
        for first in (0..d).step_by(channels) {
            let inside = |v: &[f32]| -> Vec<f32> {
                v.chunks(d).flat_map(|row| row[first..d.min(first + channels)].to_vec()).collect()
            };
            let (x, y) = (inside(x), inside(y));
            let ends = |fold: fn(f32, f32) -> f32| x.iter().copied().reduce(fold).unwrap();
            let range = ends(f32::max) - ends(f32::min);
            let size = ends(f32::max).abs().max(ends(f32::min).abs());
            let gap = x.iter().zip(&y).fold(0.0f32, |m, (x, y)| m.max((x - y).abs()));
            // The minimum and the step are rounded to f16.
            worst = worst.max((gap - size * 2f32.powi(-9) - 1e-6).max(0.0) / range.max(1e-9));
        }
    }
    worst
}

#[test]
fn kivi_errs_by_at_most_half_a_step_of_its_block() {
    for (bits, group) in [(2, 32), (4, 32), (1, 16), (3, 64), (8, 16), (2, 64)] {
        for d in [64, 72, 80, 112] {
            let spec = named("kivi", json!({ "bits": bits, "group": group }));
            let codec = codec(&spec, d);
            assert_eq!(codec.desc.group, group);
            let x = uneven(9, 128, d);
            for (side, block) in [(Side::Key, [group as usize, 1]), (Side::Value, [1, group as usize])] {
                let share = share_of_range(&x, &decoded(&codec, side, &x), d, block);
                let half = 0.5 / ((1u32 << bits) - 1) as f32;
                assert!(share <= half * 1.001, "{side:?}, {bits} bits, {group}, d {d}: {share} of {half}");
                let few = if bits == 8 { 0.4 } else { 0.8 };
                assert!(share >= half * few, "{side:?}, {bits} bits, {group}, d {d}: {share} of {half}");
            }
        }
    }
}

#[test]
fn kivi_stores_step_and_minimum_where_the_descriptor_says() {
    let codec = codec(&named("kivi", json!({ "bits": 2 })), 72);
    let mut rows = vec![0.0; 64 * 72];
    for (token, row) in rows.chunks_mut(72).enumerate() {
        row[3] = if token / 32 == 1 { 8.0 + (token % 4) as f32 } else { 0.0 };
        row[71] = -1.0; // the last block of values has 8 channels
    }
    let half = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let (desc, bytes) = (&codec.desc.key, page(&codec, Side::Key, &rows, 0));
    let pair = |index: usize| {
        let at = desc.inner_at as usize + 4 * index;
        (half(&bytes, at), half(&bytes, at + 2))
    };
    assert_eq!(
        [pair(3), pair(80 + 3), pair(71), pair(79)],
        [(0.0, 0.0), (1.0, 8.0), (0.0, -1.0), (0.0, 0.0)]
    );
    let (desc, bytes) = (&codec.desc.value, page(&codec, Side::Value, &rows, 0));
    let at = |token: usize, block: usize| desc.inner_at as usize + 4 * (3 * token + block);
    assert_eq!(half(&bytes, at(35, 0)), f16::from_f32(11.0 / 3.0).to_f32());
    assert_eq!((half(&bytes, at(0, 2) + 2), half(&bytes, at(0, 0) + 2)), (-1.0, 0.0));
}

#[test]
fn bytes_and_8_bit_floats_err_as_their_formats_do() {
    let x = uneven(10, 64, 80);
    let cases =
        [("int8", json!({})), ("fp8", json!({ "format": "e4m3" })), ("fp8", json!({ "format": "e5m2" }))];
    for (name, params) in cases {
        let codec = codec(&named(name, params.clone()), 80);
        for side in [Side::Key, Side::Value] {
            for (x, y) in x.chunks(80).zip(decoded(&codec, side, &x).chunks(80)) {
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                for (x, y) in x.iter().zip(y) {
                    let allowed = match (name, params["format"].as_str()) {
                        ("int8", _) => largest / 254.0,
                        (_, Some("e4m3")) => (x.abs() / 16.0).max(largest / 448.0 * 2f32.powi(-10)),
                        _ => (x.abs() / 8.0).max(largest / 448.0 * 2f32.powi(-17)),
                    };
                    // The scale rounds: by 2^-11, and the largest value saturates.
                    assert!(
                        (x - y).abs() <= allowed * 1.01 + x.abs() / 2000.0,
                        "{name} {params}: {y} for {x}"
                    );
                }
            }
        }
    }
}

#[test]
fn zero_tiny_and_huge_rows_decode_to_something_near() {
    for spec in ["int8", "fp8", "kivi", "rabitq"] {
        let params = if matches!(spec, "kivi" | "rabitq") { json!({ "bits": 4 }) } else { json!({}) };
        let codec = codec(&named(spec, params), 64);
        let mut x = vec![0.0; 32 * 64];
        x[64] = -1.0;
        x[2 * 64..3 * 64].fill(65504.0);
        x[3 * 64 + 7] = -65504.0;
        x[4 * 64..5 * 64].fill(6e-8);
        x[5 * 64..6 * 64].fill(-0.0);
        for side in [Side::Key, Side::Value] {
            let y = decoded(&codec, side, &x);
            assert!(y.iter().all(|v| v.is_finite()), "{spec} {side:?}");
            // Channels of KIVI's keys share their range with the huge rows.
            let checked: &[usize] = if (spec, side) == ("kivi", Side::Key) { &[2] } else { &[0, 1, 2, 3, 5] };
            for &t in checked {
                let (x, y) = (&x[64 * t..][..64], &y[64 * t..][..64]);
                let zero = x.iter().all(|v| *v == 0.0);
                assert!(
                    if zero { y.iter().all(|v| *v == 0.0) } else { relative_error(x, y) < 0.02 },
                    "{spec} {t}"
                );
            }
        }
    }
}

/// Errors of `RaBitQ` on unit vectors: those of the evenly spaced books, scaled to unbiased inner products.
#[test]
fn rabitq_errs_as_its_grid_does() {
    let k = sphere(41, 4000, 128, 1.0);
    for (bits, cosine) in [(1, 0.798), (2, 0.9391), (3, 0.9814), (4, 0.9942), (6, 0.999_51), (8, 0.999_959)] {
        let codec = codec(&named("rabitq", json!({ "bits": bits })), 128);
        let y = decoded(&codec, Side::Key, &k);
        let mut mean = 0.0;
        for (k, y) in k.chunks(128).zip(y.chunks(128)) {
            let sum = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            assert!((sum(k, y) - 1.0).abs() < 1e-3, "the codes of a vector give its own square");
            mean += sum(k, y) / sum(y, y).sqrt() / 4000.0;
        }
        assert!(
            ((1.0 - mean) / (1.0 - cosine) - 1.0).abs() < 0.05,
            "{bits} bits: cosine {mean} for {cosine}"
        );
    }
}

#[test]
fn the_error_bound_of_rabitq_holds_as_often_as_a_normal_variable_says() {
    let d = 128;
    let (k, q) = (sphere(42, 4096, d, 3.0), sphere(43, 64, d, 2.0));
    for bits in 1..=8 {
        let key = named("rabitq", json!({ "bits": bits, "error_bound": true }));
        let cache = &mut ConstantCache::default();
        let key = key.build(&context(Side::Key, d, None), cache).unwrap();
        let value =
            named("rabitq", json!({ "bits": 4 })).build(&context(Side::Value, d, None), cache).unwrap();
        let codec = assemble(key, value, 1).unwrap();
        let y = decoded(&codec, Side::Key, &k);
        let mut inside = 0;
        for (t, k) in k.chunks(64 * d).enumerate() {
            let bytes = page(&codec, Side::Key, k, 0);
            let levels = Levels::new(&codec.desc.key, &codec.key);
            for (i, k) in k.chunks(d).enumerate() {
                let tile = Tile {
                    page: &codec.desc,
                    side: Side::Key,
                    levels: &levels,
                    bytes: &bytes,
                    index: i / 16,
                };
                let stored = tile.token_scales(BOUND_SCALE)[i % 16];
                let (y, q) = (&y[(64 * t + i) * d..][..d], &q[t % 64 * d..][..d]);
                let gap: f64 =
                    q.iter().zip(k.iter().zip(y)).map(|(q, (k, y))| f64::from(*q) * f64::from(k - y)).sum();
                inside += usize::from(gap.abs() <= f64::from(error_bound(stored, 2.0, DEVIATIONS)));
            }
        }
        let coverage = inside as f64 / 4096.0;
        assert!((0.94 - 0.011..0.96).contains(&coverage), "{bits} bits: {coverage}");
    }
}

#[test]
fn what_a_side_cannot_use_is_refused_by_name() {
    let value = |spec: &CodecSpec| {
        spec.build(&context(Side::Value, 64, None), &mut ConstantCache::default()).unwrap_err().to_string()
    };
    let qjl = value(&named("qjl", json!({})));
    assert!(
        qjl.contains("values[0].name is qjl, which serves keys only; allowed: a codec for values"),
        "{qjl}"
    );
    let bound = value(&named("rabitq", json!({ "bits": 4, "error_bound": true })));
    assert!(bound.contains("values[0].error_bound is true; allowed: false for values"), "{bound}");
    refused(&named("rabitq", json!({ "bits": 2.5 })), 64, "bits is 2.5; allowed: an integer in 1..=8");
    refused(&named("rabitq", json!({ "bits": 2, "error_bound": 1 })), 64, "error_bound is 1; allowed: true");
    refused(&named("kivi", json!({ "bits": 9 })), 64, "bits is 9; allowed: an integer in 1..=8");
    refused(&named("kivi", json!({ "bits": 2, "group": 128 })), 64, "group is 128; allowed: 16, 32, 64");
    refused(&named("qjl", json!({ "m": 100 })), 64, "m is 100; allowed: a multiple of 16 in 16..=1024");
    refused(&named("qjl", json!({ "m": 2048 })), 64, "m is 2048; allowed: a multiple of 16");
    refused(&named("fp8", json!({ "format": "e3m4" })), 64, "format is e3m4; allowed: e4m3, e5m2");
    refused(
        &named("int8", json!({ "bits": 8 })),
        64,
        "a setting of keys[0].int8 is bits; allowed: no settings",
    );
}

#[test]
fn every_codec_loses_nothing_to_a_constant_that_is_taken_out() {
    let d = 64;
    let constant = sphere(31, 1, d, 400.0);
    let small: Vec<f32> = sphere(32, 64, d, 1.0);
    let shifted: Vec<f32> = small.iter().enumerate().map(|(i, x)| x + constant[i % d]).collect();
    let specs = [
        named("kivi", json!({ "bits": 4 })),
        named("rabitq", json!({ "bits": 4 })),
        named("rabitq", json!({ "bits": 4, "error_bound": true })),
        named("int8", json!({})),
        named("fp8", json!({ "format": "e5m2" })),
        named("qjl", json!({ "m": 1024 })),
        named("turboquant", json!({ "bits": 4, "variant": "prod" })),
    ];
    for spec in specs {
        let cache = &mut ConstantCache::default();
        let mut error = |rows: &[f32], constant: Option<&Vec<f32>>| {
            let key = spec.build(&context(Side::Key, d, constant.cloned()), cache).unwrap();
            let value = CodecSpec::turboquant(4.0).build(&context(Side::Value, d, None), cache).unwrap();
            let codec = assemble(key, value, 1).unwrap();
            let shift = f64::from(u8::from(rows[0] != small[0])) * 160_000.0;
            relative_error(rows, &decoded(&codec, Side::Key, rows)) * (1.0 + shift)
        };
        let (with, alone) = (error(&shifted, Some(&constant)), error(&small, None));
        assert!(with < alone * 1.05 + 1e-6, "{spec}: {with} against {alone}");
    }
}
