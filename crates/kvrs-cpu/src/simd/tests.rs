//! Every operation of every instruction set against its model, and the models against what the operations mean.

use super::Simd;
use super::model::Model;
use crate::isa::Isa;
use crate::testing::require;
use proptest::prelude::*;

/// Operands of all operations.
#[derive(Debug, Clone)]
struct Input {
    units: [[u8; 64]; 3],
    table: [u8; 64],
    floats: [[f32; 16]; 4],
    /// In 0.5..2.
    mantissas: [f32; 16],
    powers: [f32; 16],
    /// In -128..=255.
    small: [f32; 16],
    bits: u16,
    start: [i32; 2],
}

/// What an operation gives, as bytes or as floats.
#[derive(Debug, Clone)]
enum Output {
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
}

impl PartialEq for Output {
    /// Bit by bit, but any NaN is as good as another.
    fn eq(&self, other: &Self) -> bool {
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        match (self, other) {
            (Self::Bytes(a), Self::Bytes(b)) => a == b,
            (Self::Floats(a), Self::Floats(b)) => a.len() == b.len() && a.iter().zip(b).all(same),
            _ => false,
        }
    }
}

type Outputs = Vec<(&'static str, Output)>;

/// Arrays from the heap: their strategies are too large for the stack of a test.
fn array<T: std::fmt::Debug, const N: usize>(
    element: impl Strategy<Value = T>,
) -> impl Strategy<Value = [T; N]> {
    prop::collection::vec(element, N).prop_map(|x| x.try_into().expect("N elements"))
}

fn unit() -> impl Strategy<Value = [u8; 64]> {
    array(prop_oneof![4 => any::<u8>(), 1 => prop::sample::select(vec![0u8, 1, 63, 127, 128, 255])])
}

fn float() -> impl Strategy<Value = f32> {
    let special =
        vec![0.0, -0.0, 0.5, 1.5, -2.5, 65504.0, f32::MIN_POSITIVE, 1e-42, f32::MAX, f32::INFINITY, f32::NAN];
    prop_oneof![4 => -100f32..100.0, 2 => any::<u32>().prop_map(f32::from_bits), 1 => prop::sample::select(special)]
}

/// A mantissa and a power whose product is a normal number.
fn power() -> impl Strategy<Value = (f32, f32)> {
    (0.5f32..2.0, prop_oneof![-126i32..=127, Just(-126), Just(127)])
        .prop_map(|(x, n)| (if n == -126 { x.max(1.0) } else { x }, n as f32))
}

fn input() -> impl Strategy<Value = Input> {
    let floats = array::<[f32; 16], 4>(array(float()));
    let small = prop_oneof![-128f32..=255.0, (-128i32..=254).prop_map(|i| i as f32 + 0.5)];
    let whole = (array(unit()), unit(), any::<u16>(), [-20_000i32..=20_000, -20_000i32..=20_000]);
    let real = (floats, array::<_, 16>(power()), array(small));
    (whole, real).prop_map(|((units, table, bits, start), (floats, powers, small))| Input {
        units,
        table,
        floats,
        mantissas: powers.map(|(x, _)| x),
        powers: powers.map(|(_, n)| n),
        small,
        bits,
        start,
    })
}

/// The lanes of an integer vector.
#[inline(always)]
fn bytes<S: Simd>(x: S::I) -> Output {
    // SAFETY: the integers of vectors and models are plain bytes without padding.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const x).cast::<u8>(), size_of::<S::I>()) };
    assert_eq!(bytes.len(), 4 * S::LANES);
    Output::Bytes(bytes.to_vec())
}

#[inline(always)]
fn floats<S: Simd>(s: S, x: S::F) -> Output {
    let mut chunk = [0.0; 16];
    s.store_f(x, &mut chunk, 0);
    Output::Floats(chunk[..S::LANES].to_vec())
}

#[inline(always)]
fn integers<S: Simd>(s: S, input: &Input, half: usize) -> Outputs {
    let [a, b, c] = input.units.each_ref().map(|unit| s.load(unit, half));
    let [low, six] = [15, 63].map(|mask| s.and(a, s.splat_bytes(mask)));
    let table = s.table16(input.table.first_chunk().expect("64 bytes"));
    let lone = s.load_lone(input.units[0].first_chunk().expect("64 bytes"), half);
    vec![
        ("load", bytes::<S>(a)),
        ("load_lone", bytes::<S>(s.and(lone, s.splat_bytes(15)))),
        ("splat_i", bytes::<S>(s.splat_i(input.start[0]))),
        ("digit", bytes::<S>(s.digit(&vec![input.start[1]; S::SPREAD]))),
        ("and", bytes::<S>(s.and(a, b))),
        ("or", bytes::<S>(s.or(a, b))),
        ("shift_right 4", bytes::<S>(s.shift_right::<4>(a))),
        ("shift_right 1", bytes::<S>(s.shift_right::<1>(a))),
        ("shift_left 2", bytes::<S>(s.shift_left::<2>(a))),
        ("shift_left 8", bytes::<S>(s.shift_left::<8>(a))),
        ("sub_bytes", bytes::<S>(s.sub_bytes(a, b))),
        ("lookup16", bytes::<S>(s.lookup16(table, low))),
        ("lookup64", bytes::<S>(s.lookup64(&input.table, six))),
        ("add_i", bytes::<S>(s.add_i(a, b))),
        ("narrow_dot", bytes::<S>(s.narrow_dot(c, a, b))),
        ("narrow_total", bytes::<S>(s.narrow_total(c))),
        ("narrow_start", bytes::<S>(s.splat_i(s.narrow_start(input.start[0], input.start[1])))),
        ("even_words", bytes::<S>(s.even_words(a))),
        ("odd_words", bytes::<S>(s.odd_words(a))),
        ("wide_dot", bytes::<S>(s.wide_dot(c, a, b))),
        ("to_f", floats(s, s.to_f(a))),
    ]
}

#[inline(always)]
fn reals<S: Simd>(s: S, input: &Input, half: usize) -> Outputs {
    let [a, b, c, d] = input.floats.each_ref().map(|chunk| s.load_f(chunk, half));
    let [x, n] = [&input.mantissas, &input.powers].map(|chunk| s.load_f(chunk, half));
    let halves = input.units[1].first_chunk().expect("64 bytes");
    vec![
        ("load_f", floats(s, a)),
        ("load_f16", floats(s, s.load_f16(halves, half))),
        ("load_bf16", floats(s, s.load_bf16(halves, half))),
        ("splat_f", floats(s, s.splat_f(input.floats[0][0]))),
        ("add", floats(s, s.add(a, b))),
        ("sub", floats(s, s.sub(a, b))),
        ("mul", floats(s, s.mul(a, b))),
        ("div", floats(s, s.div(a, b))),
        ("mul_add", floats(s, s.mul_add(a, b, c))),
        ("max", floats(s, s.max(a, b))),
        ("min", floats(s, s.min(a, b))),
        ("abs", floats(s, s.abs(a))),
        ("round", floats(s, s.round(a))),
        ("scale_by_power", floats(s, s.scale_by_power(x, n))),
        ("select", floats(s, s.select(input.bits, half, a, b))),
        ("reduce_add4", Output::Floats(s.reduce_add4([a, b, c, d]).to_vec())),
        ("reduce_add", Output::Floats(vec![s.reduce_add(a)])),
        ("reduce_pairs", Output::Floats(s.reduce_pairs([a, b]).concat())),
    ]
}

#[inline(always)]
fn others<S: Simd>(s: S, input: &Input, half: usize) -> Outputs {
    let mut codes = [7; 16];
    s.store_bytes(s.load_f(&input.small, half), &mut codes, half);
    s.prefetch(input.units[0].as_ptr());
    let mut chunk = [7.0; 16];
    s.store_f(s.load_f(&input.floats[0], half), &mut chunk, half);
    // No NaN: which of two operands the larger is then depends on their order.
    let small = s.load_f(&input.small, half);
    let a = s.mul_add(small, small, small);
    let mut digits = [7; 16];
    let [low, high] = [0, S::HALVES - 1].map(|half| s.load_f(&input.small, half));
    s.store_digits([s.min(low, s.splat_f(127.0)), s.min(high, s.splat_f(127.0))], &mut digits);
    vec![
        ("store_digits", Output::Bytes(digits.to_vec())),
        ("store_bytes", Output::Bytes(codes.to_vec())),
        ("store_f", Output::Floats(chunk.to_vec())),
        ("reduce_max4", Output::Floats(s.reduce_max4([small, a, small, a]).map(|x| x + 0.0).to_vec())),
    ]
}

#[inline(always)]
fn run<S: Simd>(s: S, input: &Input, half: usize) -> Outputs {
    [integers(s, input, half), reals(s, input, half), others(s, input, half)].concat()
}

/// The sums of products of bytes: narrow, and by words.
#[inline(always)]
fn dots<S: Simd>(
    s: S,
    unsigned: &[[u8; 64]],
    signed: &[[u8; 64]],
    start: [i32; 2],
    half: usize,
) -> [Output; 2] {
    let mut narrow = s.splat_i(s.narrow_start(start[0], start[1]));
    let mut wide = s.splat_i(start[0] + start[1]);
    for (u, w) in unsigned.iter().zip(signed) {
        let (u, w) = (s.load(u, half), s.load(w, half));
        narrow = s.narrow_dot(narrow, u, w);
        wide = s.wide_dot(wide, s.even_words(u), s.even_words(w));
        wide = s.wide_dot(wide, s.odd_words(u), s.odd_words(w));
    }
    [bytes::<S>(s.narrow_total(narrow)), bytes::<S>(wide)]
}

/// As [`dots`], in plain integers.
fn exact(
    unsigned: &[[u8; 64]],
    signed: &[[u8; 64]],
    start: [i32; 2],
    lanes: std::ops::Range<usize>,
) -> Output {
    let sum = |lane: usize| {
        let products = unsigned.iter().zip(signed).flat_map(|(u, w)| {
            (4 * lane..4 * lane + 4).map(|i| i32::from(u[i]) * i32::from(w[i].cast_signed()))
        });
        products.sum::<i32>() + start[0] + start[1]
    };
    Output::Bytes(lanes.flat_map(|lane| sum(lane).to_le_bytes()).collect())
}

fn compare(got: Outputs, expected: Outputs) {
    assert_eq!(got.len(), expected.len());
    for ((name, got), (_, expected)) in got.into_iter().zip(expected) {
        assert_eq!(got, expected, "{name}");
    }
}

/// Units of bytes up to 63 and of digits up to 65 in magnitude: four of them stay within every narrow limit.
fn digits() -> impl Strategy<Value = (Vec<[u8; 64]>, Vec<[u8; 64]>, [i32; 2])> {
    let below = |range: std::ops::RangeInclusive<i8>| {
        let [low, high] = [*range.start(), *range.end()];
        let byte = prop_oneof![2 => range, 1 => Just(low), 1 => Just(high)];
        prop::collection::vec(array(byte.prop_map(i8::cast_unsigned)), 4)
    };
    (below(0..=63), below(-65..=65), prop::array::uniform2(-7i32..=7))
}

fn sums_are_exact(lanes: usize, dots: impl Fn(&[[u8; 64]], &[[u8; 64]], [i32; 2], usize) -> [Output; 2]) {
    proptest!(|((unsigned, signed, start) in digits())| {
        for half in 0..16 / lanes {
            let expected = exact(&unsigned, &signed, start, lanes * half..lanes * (half + 1));
            prop_assert_eq!(dots(&unsigned, &signed, start, half), [expected.clone(), expected]);
        }
    });
}

/// Stamps the tests of one instruction set.
macro_rules! hardware {
    ($module:ident, $token:ty, $isa:expr, $lanes:literal, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        mod $module {
            use super::*;

            #[target_feature(enable = $features)]
            fn run(input: &Input, half: usize) -> Outputs {
                // SAFETY: the features of this function are the ones that the token stands for.
                super::run(unsafe { <$token>::assume() }, input, half)
            }

            #[target_feature(enable = $features)]
            fn dots(unsigned: &[[u8; 64]], signed: &[[u8; 64]], start: [i32; 2], half: usize) -> [Output; 2] {
                // SAFETY: the features of this function are the ones that the token stands for.
                super::dots(unsafe { <$token>::assume() }, unsigned, signed, start, half)
            }

            #[test]
            fn every_operation_equals_its_model() {
                if !require($isa) {
                    return;
                }
                proptest!(ProptestConfig::with_cases(2000), |(input in input())| {
                    for half in 0..16 / $lanes {
                        // SAFETY: `require` saw the features.
                        compare(unsafe { run(&input, half) }, super::run(Model::<$lanes>, &input, half));
                    }
                });
            }

            #[test]
            fn sums_of_products_are_exact_within_the_limit() {
                if require($isa) {
                    // SAFETY: `require` saw the features.
                    sums_are_exact($lanes, |u, w, start, half| unsafe { dots(u, w, start, half) });
                }
            }

            #[test]
            fn the_token_is_there_when_the_instruction_set_is() {
                assert_eq!(<$token>::detect().is_some(), $isa <= Isa::detected());
            }
        }
    };
}
hardware!(avx2, crate::x86::avx2::Avx2, Isa::Avx2, 8, "avx2,fma,f16c");
hardware!(
    avx512,
    crate::x86::avx512::Avx512,
    Isa::Avx512,
    16,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c"
);

#[test]
fn sums_of_products_of_the_models_are_exact_within_the_limit() {
    sums_are_exact(8, |u, w, start, half| dots(Model::<8>, u, w, start, half));
    sums_are_exact(16, |u, w, start, half| dots(Model::<16>, u, w, start, half));
}

#[test]
fn sixteen_lanes_are_the_two_halves_of_eight() {
    proptest!(|(input in input())| {
        let [a, b] = [0, 1].map(|half| [integers(Model::<8>, &input, half), reals(Model::<8>, &input, half)].concat());
        let whole = [integers(Model::<16>, &input, 0), reals(Model::<16>, &input, 0)].concat();
        for (((name, a), (_, b)), (_, whole)) in a.into_iter().zip(b).zip(whole) {
            let joined = match (a, b) {
                (Output::Bytes(a), Output::Bytes(b)) => Output::Bytes([a, b].concat()),
                (Output::Floats(a), Output::Floats(b)) => Output::Floats([a, b].concat()),
                _ => panic!("{name} has one type"),
            };
            // Sums depend on how many lanes there are.
            if !name.starts_with("narrow") && !name.starts_with("reduce") {
                assert_eq!(joined, whole, "{name}");
            }
        }
    });
}

#[test]
fn reductions_of_whole_numbers_are_plain_sums() {
    fn check<const N: usize>(chunks: [[f32; 16]; 4]) {
        let s = Model::<N>;
        let x = chunks.map(|chunk| s.load_f(&chunk, 0));
        assert_eq!(s.reduce_add4(x), x.map(|x| x.iter().sum::<f32>()));
        assert_eq!(s.reduce_add(x[0]), x[0].iter().sum::<f32>());
        assert_eq!(s.reduce_max4(x), x.map(|x| x.iter().copied().fold(f32::MIN, f32::max)));
        let pair =
            |first: usize| (0..N).filter(|lane| lane % 4 / 2 == first).map(|lane| x[0][lane]).sum::<f32>();
        assert_eq!(s.reduce_pairs([x[0], x[0]]), [[pair(0), pair(1)]; 2]);
    }
    let whole = array((-1000i32..=1000).prop_map(|i| i as f32));
    proptest!(|(chunks in array(whole))| {
        check::<8>(chunks);
        check::<16>(chunks);
    });
}
