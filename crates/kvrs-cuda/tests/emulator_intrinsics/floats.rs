//! Formats and rounding: every half, floats on both sides of every tie, and arithmetic that is rounded once.

use super::{Array, Random, launch, launchers, words};

/// The value of `code` in a format with a sign, an exponent that `bias` is taken from, and `fraction` bits.
fn value(code: u16, bias: i32, fraction: i32) -> f64 {
    let magnitude = i32::from(code & 0x7fff);
    let (power, rest) = (magnitude >> fraction, magnitude & ((1 << fraction) - 1));
    let part = f64::from(rest) * 2f64.powi(-fraction);
    let size = match power {
        0 => part * 2f64.powi(1 - bias),
        _ if power > 2 * bias && rest == 0 => f64::INFINITY,
        _ if power > 2 * bias => f64::NAN,
        _ => (1.0 + part) * 2f64.powi(power - bias),
    };
    if code >> 15 == 1 { -size } else { size }
}

fn half(bits: u16) -> f64 {
    value(bits, 15, 10)
}

fn brain(bits: u16) -> f64 {
    value(bits, 127, 7)
}

#[test]
fn every_half_and_every_bfloat16_widens_to_its_value() {
    words("try_widen", 256, [256, 1, 1], &[0], 0, 2 << 16, |out| {
        for (bits, got) in out.chunks(2).enumerate() {
            for (&got, expected) in got.iter().zip([half(bits as u16), brain(bits as u16)]) {
                let got = f32::from_bits(got);
                let same = f64::from(got).to_bits() == expected.to_bits();
                assert!(same || got.is_nan() && expected.is_nan(), "{bits:#06x}: {got}, {expected}");
            }
        }
    });
}

/// Floats with the bits that they must become: each number of a format, the middle between it and the next, which goes
/// to the even one, and the floats beside the middle. The number after the largest stands for infinity.
fn roundings(of: fn(u16) -> f64, infinity: u16, beyond: f64) -> Vec<(f32, u16)> {
    let number = |bits: u16| if bits == infinity { beyond } else { of(bits) };
    let mut cases = Vec::new();
    for bits in 0..infinity {
        let (low, high) = (number(bits), number(bits + 1));
        let middle = f64::midpoint(low, high) as f32;
        cases.push((low as f32, bits));
        if f64::from(middle) != f64::midpoint(low, high) {
            continue; // below the floats
        }
        cases.push((middle, bits + (bits & 1)));
        cases.push((middle.next_down(), bits));
        cases.push((middle.next_up(), bits + 1));
    }
    cases.extend([(f32::INFINITY, infinity), (f32::MAX, infinity)]);
    let negative: Vec<_> = cases.iter().map(|&(x, bits)| (-x, bits | 0x8000)).collect();
    cases.extend(negative);
    cases
}

fn narrow(cases: &[(f32, u16)], column: usize) {
    let input: Vec<u32> = cases.iter().map(|(x, _)| x.to_bits()).collect();
    let blocks = input.len().div_ceil(256) as u32;
    words("try_narrow", 256, [blocks, 1, 1], &input, input.len(), 2 * input.len(), |out| {
        for (&(x, expected), got) in cases.iter().zip(out.chunks(2)) {
            assert_eq!(got[column], u32::from(expected), "{x:e}");
        }
    });
}

#[test]
fn floats_become_the_nearest_half_and_ties_the_even_one() {
    let mut cases = roundings(half, 0x7c00, 65536.0);
    cases.extend([
        (1e-45, 0),
        (-1e-45, 0x8000),
        (f32::MIN_POSITIVE, 0),
        (f32::NAN, 0x7fff),
        (-f32::NAN, 0x7fff),
    ]);
    narrow(&cases, 0);
}

#[test]
fn floats_become_the_nearest_bfloat16_and_ties_the_even_one() {
    let mut cases = roundings(brain, 0x7f80, 2f64.powi(128));
    cases.retain(|&(x, _)| x.abs() != f32::MAX);
    cases.extend([(f32::MAX, 0x7f80), (-f32::MAX, 0xff80), (f32::NAN, 0x7fff), (-f32::NAN, 0x7fff)]);
    narrow(&cases, 1);
}

fn float_triples() -> Vec<[f32; 3]> {
    let step = 2f32.powi(-12);
    let mut triples = vec![
        // One rounding of x y + z; two would lose the result, or round a tie the wrong way.
        [1.0 + step, 1.0 - step, -1.0],
        [1.0 + step, 1.0 + step, 2f32.powi(-60)],
        [1.0 + step, 1.0 + step, -2f32.powi(-60)],
        [f32::MAX, 2.0, -f32::MAX],
        [2f32.powi(-100), 2f32.powi(-49), f32::from_bits(1)],
    ];
    let ties = (-9..9).map(|i| i as f32 + 0.5).chain([
        8_388_607.5,
        -8_388_607.5,
        2.147_483_5e9,
        -2.147_483_6e9,
        3e9,
    ]);
    triples.extend(ties.map(|x| [x, 3.0, 0.0]));
    triples.extend([
        [-0.0, 1.0, 0.0],
        [f32::NAN, 1.0, 2.0],
        [1.0, f32::NAN, 2.0],
        [f32::INFINITY, -1.0, 1.0],
        [-4.0, 0.0, 1.0],
    ]);
    let mut random = Random(21);
    triples.extend((0..2000).map(|_| [random.word(), random.word(), random.word()].map(f32::from_bits)));
    let near = |random: &mut Random| (random.word() as i32) as f32 / 2f32.powi(29);
    triples.extend((0..2000).map(|_| [near(&mut random), near(&mut random), near(&mut random)]));
    triples
}

#[test]
fn float_arithmetic_is_rounded_once() {
    let triples = float_triples();
    let input: Vec<u32> = triples.iter().flatten().map(|x| x.to_bits()).collect();
    let blocks = triples.len().div_ceil(128) as u32;
    words("try_floats", 128, [blocks, 1, 1], &input, triples.len(), 12 * triples.len(), |out| {
        for (&[x, y, z], got) in triples.iter().zip(out.chunks(12)) {
            let whole = x.round_ties_even();
            let expected = [
                x + y,
                x - y,
                x * y,
                x / y,
                x.mul_add(y, z),
                x.sqrt(),
                whole,
                x.max(y),
                x.min(y),
                f32::from_bits(whole as i32 as u32),
                x.to_bits() as i32 as f32,
                1.0 / x,
            ];
            for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
                let both_nan = i != 9 && f32::from_bits(got).is_nan() && expected.is_nan();
                // The sign of a zero among two is left open for max and min.
                let both_zero = (i == 7 || i == 8) && f32::from_bits(got) == expected;
                let same = got == expected.to_bits() || both_nan || both_zero;
                assert!(same, "operation {i} of {x:e}, {y:e}, {z:e}: {got:#x}, {:#x}", expected.to_bits());
            }
        }
    });
}

#[repr(C)]
struct Doubles {
    input: u64,
    out: u64,
    narrow: u64,
    count: u32,
}

#[test]
fn double_arithmetic_is_rounded_once() {
    let mut random = Random(31);
    let mut element = || (random.next() as i64) as f64 / 2f64.powi(40 + (random.word() % 60) as i32);
    let mut triples: Vec<[f64; 3]> = (0..3000).map(|_| [element(), element(), element()]).collect();
    let step = 2f64.powi(-27);
    triples.extend([
        [1.0 + step, 1.0 - step, -1.0],
        [1.0 + 2f64.powi(-24), 3.0, 0.0],
        [1.0 + 3.0 * 2f64.powi(-24), 3.0, 0.0],
    ]);
    for launcher in launchers() {
        let launcher = launcher.as_ref();
        let count = triples.len();
        let input = Array::of(launcher, triples.as_flattened());
        let (out, narrow) = (Array::<[f64; 5]>::new(launcher, count), Array::<u32>::new(launcher, count));
        let (address, narrowed) = (out.address, narrow.address);
        let args = Doubles { input: input.address, out: address, narrow: narrowed, count: count as u32 };
        launch(launcher, "try_doubles", 128, [count.div_ceil(128) as u32, 1, 1], &args).unwrap();
        for ((&[x, y, z], got), narrow) in triples.iter().zip(out.read()).zip(narrow.read()) {
            assert_eq!(got, [x + y, x - y, x * y, x / y, x.mul_add(y, z)], "{x:e} {y:e} {z:e}");
            assert_eq!(f32::from_bits(narrow), x as f32);
        }
    }
}

#[test]
fn functions_are_within_the_documented_error() {
    let mut random = Random(41);
    let mut xs: Vec<f32> = (0..3000).map(|_| (random.word() as i32) as f32 / 2f32.powi(24)).collect();
    xs.retain(|x| x.abs() < 120.0);
    xs.extend((-126..128).map(|i| i as f32));
    xs.extend([0.0, f32::NEG_INFINITY, 1e-6, -1e-6, 0.5, 9.0]);
    let input: Vec<u32> = xs.iter().map(|x| x.to_bits()).collect();
    let blocks = input.len().div_ceil(128) as u32;
    words("try_functions", 128, [blocks, 1, 1], &input, input.len(), 4 * input.len(), |out| {
        for (&x, got) in xs.iter().zip(out.chunks(4)) {
            let wide = f64::from(x);
            let expected = [wide.exp2(), wide.exp2(), wide.tanh(), 1.0 / wide.sqrt()];
            for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
                let got = f64::from(f32::from_bits(got));
                let close = (got - expected).abs() <= expected.abs() * 2f64.powi(-21);
                assert!(
                    close || got == expected || got.is_nan() && expected.is_nan(),
                    "function {i} of {x}: {got}, {expected}"
                );
            }
        }
    });
}
