//! Codecs with sketches of signs.

use super::plain::named;
use super::*;

fn prod(bits: u32, sketch: &str) -> CodecSpec {
    spec(json!({ "bits": bits, "variant": "prod", "sketch": sketch }))
}

#[test]
fn prod_errs_as_the_paper_says_and_stays_below_its_bound() {
    let k = sphere(21, 4000, 128, 1.0);
    // At 1 bit: sqrt(pi/2 - 1/4) for cosine 1/2.
    for (bits, expected) in [(1, 1.149), (2, 0.728), (3, 0.420), (4, 0.228)] {
        let codec = codec(&prod(bits, "gaussian"), 128);
        let got = inner_product_error(&k, &decoded(&codec, Side::Key, &k), 128);
        assert!((got / expected - 1.0).abs() < 0.04, "{bits} bits: {got} instead of {expected}");
        let bound = (3f64.sqrt() * std::f64::consts::PI.powi(2) * 4f64.powi(-(bits as i32))).sqrt();
        assert!(got < bound, "{bits} bits: {got} above {bound}");
    }
}

#[test]
fn orthogonal_sketches_err_less() {
    let k = sphere(22, 2000, 128, 1.0);
    for (kind, expected) in [("gaussian", 1.565), ("orthogonal", 0.565)] {
        let codec = codec(&prod(1, kind), 128);
        let got = relative_error(&k, &decoded(&codec, Side::Value, &k));
        assert!((got / expected - 1.0).abs() < 0.03, "{kind}: {got} instead of {expected}");
    }
    for bits in [2, 4] {
        let error = |kind| {
            let codec = codec(&prod(bits, kind), 128);
            relative_error(&k, &decoded(&codec, Side::Value, &k))
        };
        let (gaussian, orthogonal) = (error("gaussian"), error("orthogonal"));
        assert!(
            (orthogonal / gaussian * 1.565 / 0.565 - 1.0).abs() < 0.1,
            "{bits}: {orthogonal}, {gaussian}"
        );
    }
}

#[test]
fn one_seed_gives_codes_and_another_gives_others() {
    let rows = sphere(23, 16, 80, 1.0);
    let bytes = |seed: u64, name: &str, params: Value| {
        let build = |side, cache: &mut _| {
            let context = SideContext { seed, ..context(side, 80, None) };
            let other = CodecSpec::raw16();
            let spec = if side == Side::Key { named(name, params.clone()) } else { other };
            spec.build(&context, cache).unwrap()
        };
        let cache = &mut ConstantCache::default();
        let codec = assemble(build(Side::Key, cache), build(Side::Value, cache), 1).unwrap();
        page(&codec, Side::Key, &rows, 0)
    };
    for (name, params) in
        [("qjl", json!({ "m": 64 })), ("turboquant", json!({ "bits": 3, "variant": "prod" }))]
    {
        assert!(bytes(1, name, params.clone()) == bytes(1, name, params.clone()), "{name}");
        assert!(bytes(1, name, params.clone()) != bytes(2, name, params), "{name}");
    }
}

#[test]
fn qjl_errs_as_independent_signs_do() {
    let (d, k) = (128, sphere(24, 2000, 128, 2.0));
    for m in [128, 256, 512] {
        let cache = &mut ConstantCache::default();
        let key = named("qjl", json!({ "m": m })).build(&context(Side::Key, d, None), cache).unwrap();
        let value = CodecSpec::raw16().build(&context(Side::Value, d, None), cache).unwrap();
        let codec = assemble(key, value, 1).unwrap();
        let got = inner_product_error(
            &k.iter().map(|x| x / 2.0).collect::<Vec<_>>(),
            &decoded(&codec, Side::Key, &k).iter().map(|x| x / 2.0).collect::<Vec<_>>(),
            d,
        );
        // Each sign's product has the variance pi/2 |q|^2 |k|^2 - <q, k>^2.
        let expected = ((std::f64::consts::FRAC_PI_2 - 0.25) * d as f64 / f64::from(m)).sqrt();
        assert!((got / expected - 1.0).abs() < 0.05, "{m} rows: {got} instead of {expected}");
    }
}
