use super::*;
use crate::encode::EncodeContext;
use crate::rng;
use crate::tile::{Levels, Tile, ZERO_BLOCK};
use serde_json::json;
use serde_json::{Map, Value};

mod plain;
mod sketches;

const SEED: u64 = 11;

fn spec(params: impl Into<Value>) -> CodecSpec {
    serde_json::from_value(json!({ "name": "turboquant", "params": params.into() })).unwrap()
}

fn context(side: Side, d: usize, constant: Option<Vec<f32>>) -> SideContext<'static> {
    let constant = constant.map(Into::into);
    SideContext {
        side,
        d,
        layer: 0,
        seed: SEED,
        window: Dtype::F16,
        rope: None,
        constant,
        group: 0,
        arrays: None,
    }
}

fn codec(spec: &CodecSpec, d: usize) -> HeadCodec {
    let cache = &mut ConstantCache::default();
    let side = |side, cache: &mut _| spec.build(&context(side, d, None), cache).unwrap();
    let (key, value) = (side(Side::Key, cache), side(Side::Value, cache));
    assemble(key, value, 1).unwrap()
}

/// Consecutive positions.
fn from(position: i64, tokens: usize) -> Vec<i64> {
    (position..).take(tokens).collect()
}

/// Encodes up to 64 rows as a page.
fn page(codec: &HeadCodec, side: Side, rows: &[f32], position: i64) -> Vec<u8> {
    let context = EncodeContext::new(codec, side);
    let mut bytes = vec![0; codec.desc.page_bytes as usize];
    context.codec.encoder.as_ref().unwrap().encode(
        &context,
        rows,
        &from(position, rows.len() / codec.side(side).0.d as usize),
        &mut bytes,
        0,
    );
    bytes
}

fn decoded(codec: &HeadCodec, side: Side, rows: &[f32]) -> Vec<f32> {
    let (desc, constants) = codec.side(side);
    let d = desc.d as usize;
    let levels = Levels::new(desc, constants);
    let mut blocks = vec![ZERO_BLOCK; desc.n as usize / 16];
    let mut out = vec![0.0; rows.len()];
    for (rows, out) in rows.chunks(64 * d).zip(out.chunks_mut(64 * d)) {
        let bytes = page(codec, side, rows, 0);
        for (index, out) in out.chunks_mut(16 * d).enumerate() {
            let tile = Tile { page: &codec.desc, side, levels: &levels, bytes: &bytes, index };
            let position = |token: usize| (16 * index + token) as i64;
            tile.rebuild(constants, u16::MAX, position, &mut blocks, out);
        }
    }
    out
}

/// Vectors on the unit sphere times `factor`.
fn sphere(key: u64, count: usize, d: usize, factor: f64) -> Vec<f32> {
    let mut x = rng::gaussian(key, count * d);
    for row in x.chunks_mut(d) {
        let length = row.iter().map(|v| v * v).sum::<f64>().sqrt();
        for v in row {
            *v *= factor / length;
        }
    }
    x.iter().map(|&v| v as f32).collect()
}

fn relative_error(x: &[f32], y: &[f32]) -> f64 {
    let square = |a: f32| f64::from(a).powi(2);
    x.iter().zip(y).map(|(a, b)| square(a - b)).sum::<f64>() / x.iter().map(|a| square(*a)).sum::<f64>()
}

#[test]
fn the_error_is_that_of_the_paper_at_every_rate_and_length() {
    let table = [(64, [0.3584, 0.1145, 0.0334, 0.00913]), (128, [0.3609, 0.1160, 0.0340, 0.00931])];
    let table = table.into_iter().chain([(256, [0.3621, 0.1167, 0.0343, 0.00941])]);
    for ((d, errors), factor) in table.zip([1e-4, 1.0, 1e3]) {
        let x = sphere(d as u64, 4000, d, factor);
        for (bits, expected) in (1..).zip(errors) {
            let codec = codec(&spec(json!({ "bits": bits, "scale": "raw" })), d);
            let got = relative_error(&x, &decoded(&codec, Side::Key, &x));
            assert!((got / expected - 1.0).abs() < 0.02, "d {d}, {bits} bits: {got} instead of {expected}");
        }
    }
}

#[test]
fn more_bits_and_fractional_bits_err_as_their_books_do_on_the_sphere() {
    let x = sphere(5, 2000, 128, 1.0);
    let halves = f64::midpoint(0.1160, 0.0340);
    for (bits, expected) in
        [(2.5, halves), (5.0, 2.472e-3), (6.0, 6.448e-4), (7.0, 2.909e-4), (8.0, 8.318e-5)]
    {
        let codec = codec(&spec(json!({ "bits": bits, "scale": "raw" })), 128);
        let got = relative_error(&x, &decoded(&codec, Side::Value, &x));
        let few = if bits > 6.0 { 0.05 } else { 0.02 }; // rare channels beyond the book carry some of the error
        assert!((got / expected - 1.0).abs() < few, "{bits} bits: {got} instead of {expected}");
    }
}

/// RMSE times sqrt d of `<q, y>` against `<q, k>` for unit vectors of cosine 1/2, averaged exactly over the
/// directions of `q` around `k`.
fn inner_product_error(k: &[f32], y: &[f32], d: usize) -> f64 {
    let squares = k.chunks(d).zip(y.chunks(d)).map(|(k, y)| {
        let sum = |f: fn(f64, f64) -> f64| -> f64 {
            k.iter().zip(y).map(|(&k, &y)| f(f64::from(k), f64::from(y) - f64::from(k))).sum()
        };
        let (along, square) = (sum(|k, gap| k * gap), sum(|_, gap| gap * gap));
        0.25 * along * along + 0.75 * (square - along * along) / (d - 1) as f64
    });
    (squares.sum::<f64>() / (k.len() / d) as f64 * d as f64).sqrt()
}

#[test]
fn inner_products_err_as_the_scale_rule_says() {
    let k = sphere(21, 4000, 128, 1.0);
    // The raw scale feels the size of the gaussian book: the book of the sphere has .737, .284, .125.
    let table = [(2, [0.7325, 0.450, 0.313]), (3, [0.2788, 0.186, 0.161]), (4, [0.1244, 0.087, 0.083])];
    for (bits, errors) in table {
        for (rule, expected) in ["raw", "norm", "unbiased"].into_iter().zip(errors) {
            let codec = codec(&spec(json!({ "bits": bits, "scale": rule })), 128);
            let got = inner_product_error(&k, &decoded(&codec, Side::Key, &k), 128);
            assert!((got / expected - 1.0).abs() < 0.02, "{bits} bits, {rule}: {got} instead of {expected}");
        }
    }
}

#[test]
fn awkward_vectors_decode_to_something_near() {
    for d in [16, 64, 72, 128] {
        for bits in [1.0, 3.0, 4.0, 6.0, 8.0] {
            let codec = codec(&CodecSpec::turboquant(bits), d);
            let mut x = vec![0.0; 16 * d];
            x[d] = -1.0; // one-hot
            x[2 * d..3 * d].fill(65504.0);
            x[3 * d..4 * d].fill(6e-8);
            x[4 * d + d - 1] = 65504.0;
            x[5 * d..6 * d].fill(-0.0);
            x[6 * d..7 * d].fill(1e-17);
            for side in [Side::Key, Side::Value] {
                let y = decoded(&codec, side, &x);
                assert!(y.iter().all(|v| v.is_finite()), "d {d}, {bits} bits");
                for (token, (x, y)) in x.chunks(d).zip(y.chunks(d)).enumerate() {
                    let zero = [0, 5, 6].contains(&token) || token > 6;
                    assert!(!zero || y.iter().all(|v| *v == 0.0), "d {d}, {bits} bits, token {token}");
                    // The scale of 6e-8 is below f16's range; one and few bits err more.
                    let checked = bits > 2.0 && [1, 2, 4].contains(&token);
                    assert!(!checked || relative_error(x, y) < 0.1, "d {d}, {bits} bits, token {token}");
                }
            }
        }
    }
}

#[test]
fn groups_may_be_encoded_one_by_one() {
    let rope = Rope::new(1e4);
    for bits in [2.5, 4.0, 7.0] {
        let spec = CodecSpec::turboquant(bits);
        let k0 = Some(sphere(7, 1, 64, 5.0).into());
        let mut key_context = context(Side::Key, 64, None);
        (key_context.rope, key_context.constant) = (Some(&rope), k0);
        let value_context = context(Side::Value, 64, Some(vec![0.25; 64]));
        let cache = &mut ConstantCache::default();
        let key = spec.build(&key_context, cache).unwrap();
        let value = spec.build(&value_context, cache).unwrap();
        let codec = assemble(key, value, 1).unwrap();
        let rows = sphere(8, 64, 64, 2.0);
        for side in [Side::Key, Side::Value] {
            let whole = page(&codec, side, &rows, 1000);
            let (context, mut parts) = (EncodeContext::new(&codec, side), vec![0; whole.len()]);
            let encoder = context.codec.encoder.as_ref().unwrap();
            for tile in [2, 0, 3, 1] {
                let rows = &rows[tile * 16 * 64..][..16 * 64];
                encoder.encode(&context, rows, &from(1000 + 16 * tile as i64, 16), &mut parts, 16 * tile);
            }
            assert!(whole == parts, "{side:?} at {bits} bits");
        }
    }
}

#[test]
fn a_constant_costs_no_accuracy_once_it_is_taken_out() {
    let d = 64;
    let constant = sphere(31, 1, d, 50.0);
    let shifted: Vec<f32> =
        sphere(32, 64, d, 1.0).iter().enumerate().map(|(i, x)| x + constant[i % d]).collect();
    for side in [Side::Key, Side::Value] {
        let spec = CodecSpec::turboquant(4.0);
        let cache = &mut ConstantCache::default();
        let mut build = |side: Side| spec.build(&context(side, d, Some(constant.clone())), cache).unwrap();
        let with = assemble(build(Side::Key), build(Side::Value), 1).unwrap();
        let error = |y: Vec<f32>| relative_error(&shifted, &y) * 2500.0;
        let (with, without) =
            (error(decoded(&with, side, &shifted)), error(decoded(&codec(&spec, d), side, &shifted)));
        assert!(with < 0.011 && without > 10.0, "{side:?}: {with} against {without}");
    }
}

#[test]
fn pages_lie_as_the_layout_says() {
    let codec = codec(&CodecSpec::turboquant(4.0), 128);
    let PageDesc { key, value, page_bytes, group, .. } = &codec.desc;
    assert_eq!((key.codes_at, value.codes_at, key.scales_at, value.scales_at), (0, 4096, 8192, 8320));
    assert_eq!((*page_bytes, *group), (8448, 16)); // 8.25 KiB
    let shape =
        LayerShape { query_heads: 1, kv_heads: 1, key_dim: 128, value_dim: 72, rope: None, sliding: None };
    let raw = raw(&shape, Dtype::Bf16).unwrap();
    assert_eq!((raw.desc.slots, raw.desc.value.codes_at, raw.desc.page_bytes), (16, 4096, 4096 + 2560));
    assert!(raw.key.encoder.is_none());
}

#[test]
fn sides_of_different_codecs_share_a_page() {
    let cache = &mut ConstantCache::default();
    let key = CodecSpec::turboquant(2.5).build(&context(Side::Key, 64, None), cache).unwrap();
    let value = CodecSpec::raw16().build(&context(Side::Value, 64, Some(vec![1.0; 64])), cache).unwrap();
    assert!(value.codec.mean.is_none(), "raw rows keep their mean");
    let codec = assemble(key, value, 1).unwrap();
    assert_eq!(codec.desc.value.runs[0].width, 16);
    assert_eq!((codec.desc.value.scales, codec.desc.slots), (0, 64));
}

#[test]
fn layers_share_their_constants() {
    let cache = &mut ConstantCache::default();
    let spec = CodecSpec::turboquant(4.0);
    spec.build(&context(Side::Key, 128, None), cache).unwrap();
    let bytes = cache.bytes();
    assert_eq!(bytes, 3 * 128 * 4 + 16);
    let again = SideContext { layer: 5, ..context(Side::Key, 128, None) };
    spec.build(&again, cache).unwrap();
    assert_eq!(cache.bytes(), bytes);
}

fn refused(spec: &CodecSpec, d: usize, expected: &str) {
    let message =
        spec.build(&context(Side::Key, d, None), &mut ConstantCache::default()).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
}

#[test]
fn wrong_settings_are_refused_by_name() {
    refused(&spec(json!({})), 64, "keys[0].bits is missing; allowed: a number in 1..=8");
    refused(&spec(json!({ "bits": 9 })), 64, "keys[0].bits is 9; allowed: a number in 1..=8");
    refused(&spec(json!({ "bits": 0.5 })), 64, "keys[0].bits is 0.5");
    refused(&spec(json!({ "bits": "4" })), 64, "keys[0].bits is \"4\"");
    refused(&spec(json!({ "bits": 2.05 })), 64, "plus the nearest of .25, .5, .75");
    refused(&spec(json!({ "bits": 4, "variant": "max" })), 64, "keys[0].variant is max; allowed: mse, prod");
    let prod =
        |bits: f64, name: &str, value: &str| spec(json!({ "bits": bits, "variant": "prod", name: value }));
    refused(
        &prod(2.5, "sketch", "gaussian"),
        64,
        "bits is 2.5; allowed: an integer in 1..=8 for the variant prod",
    );
    refused(&prod(3.0, "scale", "lsq"), 64, "scale is lsq; allowed: None or raw for the variant prod");
    refused(&prod(3.0, "sketch", "sparse"), 64, "sketch is sparse; allowed: gaussian, orthogonal");
    refused(&prod(3.0, "scale", "raw"), 528, "variant is prod; allowed: mse for more than 512 channels");
    refused(&spec(json!({ "bits": 4, "sketch": "orthogonal" })), 64, "allowed: gaussian for the variant mse");
    refused(&spec(json!({ "bits": 4, "scale": "rms" })), 64, "keys[0].scale is rms; allowed: None (unbiased");
    refused(
        &spec(json!({ "bits": 4, "rotation": 3 })),
        64,
        "keys[0].rotation is 3; allowed: hadamard, dense",
    );
    refused(&spec(json!({ "bit": 4 })), 64, "is bit; allowed: bits, variant, scale, rotation");
    let unknown = CodecSpec { name: "turbo".into(), params: Map::new() };
    refused(&unknown, 64, "keys[0].name is turbo; allowed: raw16, turboquant");
    let constant = SideContext { constant: Some([1.0; 3].into()), ..context(Side::Key, 64, None) };
    let error = CodecSpec::turboquant(4.0).build(&constant, &mut ConstantCache::default()).unwrap_err();
    assert!(error.to_string().contains("keys offset of layer 0 is 3 numbers; allowed: 64"), "{error}");
}

#[test]
fn settings_are_checked_and_shown_without_a_layer() {
    check(&spec(json!({ "bits": 2.5, "scale": null, "rotation": "dense" }))).unwrap();
    assert!(check(&CodecSpec::turboquant(f64::NAN)).is_err());
    assert_eq!(spec(json!({ "bits": 2.5, "scale": null })).to_string(), "turboquant(bits=2.5)");
    assert_eq!(spec(json!({ "bits": 4, "scale": "lsq" })).to_string(), "turboquant(bits=4, scale=lsq)");
    assert_eq!(CodecSpec::raw16().to_string(), "raw16");
}

#[test]
fn every_default_is_json_that_its_codec_accepts() {
    for entry in entries() {
        let defaults = entry
            .parameters
            .iter()
            .filter_map(|p| p.default.map(|text| (p.name.to_owned(), serde_json::from_str(text).unwrap())));
        let mut params: Map<String, Value> = defaults.collect();
        let required = entry.parameters.iter().filter(|p| p.default.is_none());
        params.extend(required.map(|p| (p.name.to_owned(), json!(1))));
        if entry.parameters.iter().any(|p| p.name == "bits") {
            params.insert("bits".into(), json!(4));
        }
        check(&CodecSpec { name: entry.name.into(), params }).unwrap();
    }
}
