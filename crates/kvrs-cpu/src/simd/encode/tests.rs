use super::*;
use crate::encode::{Kernel, seal_with};
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::simd::model::Model;
use crate::simd::search::Search;
use crate::testing::require;
use half::bf16;
use kvrs_codec::Side;
use kvrs_codec::codebook::Book;
use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::{Dtype, HeadCodec, SideCodec, rng};
use kvrs_core::{LayerShape, Rope};
use proptest::prelude::*;
use std::array::from_fn;
use std::sync::Arc;

impl<const LANES: usize> SimdEncode for Model<LANES> {
    fn refine(self, index: Self::I, u: Self::F, t: Self::F) -> Self::I {
        from_fn(|lane| (2 * u32::from_le_bytes(index[lane]) + u32::from(u[lane] >= t[lane])).to_le_bytes())
    }

    fn pick4(self, table: &[f32; 4], index: Self::I) -> Self::F {
        index.map(|lane| table[u32::from_le_bytes(lane) as usize])
    }

    fn pick8(self, table: &[f32; 8], index: Self::I) -> Self::F {
        index.map(|lane| table[u32::from_le_bytes(lane) as usize % 8])
    }

    fn choose<const BIT: u32>(self, index: Self::I, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|lane| if u32::from_le_bytes(index[lane]) >> BIT & 1 == 1 { a[lane] } else { b[lane] })
    }

    fn choose_i<const BIT: u32>(self, index: Self::I, a: Self::I, b: Self::I) -> Self::I {
        from_fn(|lane| if u32::from_le_bytes(index[lane]) >> BIT & 1 == 1 { a[lane] } else { b[lane] })
    }

    fn bits(self, x: Self::F) -> Self::I {
        x.map(|x| x.to_bits().to_le_bytes())
    }

    fn store_f16(self, x: Self::F, out: &mut [u8; 32], half: usize) {
        let out = out.as_chunks_mut::<2>().0[LANES * half..].iter_mut();
        out.zip(x).for_each(|(out, x)| *out = f16::from_f32(x).to_le_bytes());
    }

    fn store(self, x: Self::I, unit: &mut [u8; 64], half: usize) {
        unit[4 * LANES * half..][..4 * LANES].copy_from_slice(x.as_flattened());
    }

    fn store_across(self, codes: [Self::I; 4], unit: &mut [u8; 64], half: usize) {
        self.store(from_fn(|lane| from_fn(|i| codes[i][lane][0])), unit, half);
    }

    fn store_along(self, codes: [Self::I; 4], units: &mut [[u8; 64]; 4], quad: usize, half: usize) {
        for (i, codes) in codes.iter().enumerate() {
            for (lane, code) in codes.iter().enumerate() {
                let token = LANES * half + lane;
                units[token / 4][16 * quad + 4 * i + token % 4] = code[0];
            }
        }
    }

    fn transpose(self, bf16: bool, rows: &[&[u8; 32]; 16], out: &mut [[f32; 16]; 16]) {
        for (t, row) in rows.iter().enumerate() {
            let elem = if bf16 { Elem::Bf16 } else { Elem::F16 };
            let row = kvrs_codec::layout::read_16(elem, row);
            out.iter_mut().zip(row).for_each(|(out, x)| out[t] = x);
        }
    }
}

/// What encodes a tile.
type Encode = dyn Fn(&mut TileArgs<'_>);

/// Kernels beside the scalar encoder: models of both widths, and what this CPU has.
fn kernels() -> Vec<(&'static str, Box<Encode>)> {
    let mut kernels: Vec<(&str, Box<Encode>)> = vec![
        ("model of 16 lanes", Box::new(|args| encode_tile(Model::<16>, args))),
        ("model of 8 lanes", Box::new(|args| encode_tile(Model::<8>, args))),
    ];
    let there = [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| require(*isa));
    kernels.extend(there.map(|isa| (isa.name(), of(isa).unwrap())));
    kernels
}

/// The kernel of an instruction set; `None` for the scalar one.
fn of(isa: Isa) -> Option<Box<Encode>> {
    Kernels::of(isa).map(|kernels| -> Box<Encode> { Box::new(move |args| kernels.encode_tile(args)) })
}

/// How the rows of a case are made.
#[derive(Debug, Clone, Copy)]
enum Rows {
    Plain,
    Zeros,
    OneHot,
    OneHuge,
    /// Few different values: equal sums, exact zeros, ties.
    Coarse,
}

#[derive(Debug, Clone)]
struct Case {
    d: usize,
    bits: f64,
    rule: ScaleRule,
    dense: bool,
    window: Dtype,
    exponent: f64,
    rows: Rows,
    tiles: usize,
    slot: usize,
    constant: bool,
    position: i64,
    seed: u64,
}

const DIMS: [usize; 14] = [8, 12, 16, 32, 64, 72, 80, 90, 96, 100, 112, 128, 160, 256];

fn cases() -> impl Strategy<Value = Case> {
    let rows = [Rows::Plain, Rows::Plain, Rows::Zeros, Rows::OneHot, Rows::OneHuge, Rows::Coarse];
    let kind = (proptest::sample::select(DIMS.to_vec()), 1u32..=8, 0usize..5, any::<[bool; 4]>());
    let data =
        (-30f64..4.8, proptest::sample::select(rows.to_vec()), 1usize..=4, any::<u64>(), 0i64..1 << 40);
    (kind, data).prop_map(
        |((d, bits, rule, [dense, half, bf16, constant]), (exponent, rows, tiles, seed, position))| {
            let half = half && d >= 32 && d.is_multiple_of(32) && bits < 8;
            Case {
                d,
                bits: f64::from(bits) + if half { 0.5 } else { 0.0 },
                rule: ScaleRule::ALL[rule],
                dense,
                window: if bf16 { Dtype::Bf16 } else { Dtype::F16 },
                exponent,
                rows,
                tiles,
                slot: 16 * (seed as usize % (5 - tiles)),
                constant,
                position,
                seed,
            }
        },
    )
}

impl Case {
    fn codecs(&self) -> [HeadCodec; 2] {
        let d = self.d;
        let shape =
            LayerShape { query_heads: 1, kv_heads: 1, key_dim: d, value_dim: d, rope: None, sliding: None };
        let mut cache = ConstantCache::default();
        let rope = Rope { dim: Some(d / 8 * 4), ..Rope::new(1e4) };
        let mut side = |side| {
            let constant = || rng::gaussian(self.seed ^ 1, d).iter().map(|x| *x as f32).collect();
            let constant = self.constant.then(constant);
            let context = SideContext {
                side,
                d,
                layer: 0,
                seed: 7,
                window: self.window,
                rope: Some(&rope),
                constant,
                group: 0,
                arrays: None,
            };
            CodecSpec::turboquant(self.bits).build(&context, &mut cache).unwrap()
        };
        let (key, value) = (side(Side::Key), side(Side::Value));
        let mut codec = quant::assemble(key, value, 1).unwrap();
        self.adapt(&mut codec.key);
        self.adapt(&mut codec.value);
        [quant::raw(&shape, self.window).unwrap(), codec]
    }

    fn adapt(&self, codec: &mut SideCodec) {
        let mut scaled = codec.encoder.as_ref().unwrap().as_scaled().unwrap().clone();
        scaled.rule = self.rule;
        codec.encoder = Some(Arc::new(scaled));
        let d = self.d;
        if (self.dense || self.rule == ScaleRule::Rms) && d.is_power_of_two() {
            let (mut matrix, n) = (rng::dense_rotation(3, d), d.next_multiple_of(16));
            matrix.resize(n * d, 0.0);
            codec.transform = Transform::Dense { matrix: matrix.into(), d, n };
        }
    }

    fn row(&self, key: u64) -> Vec<f32> {
        let mut x: Vec<f64> = rng::gaussian(key, self.d);
        let at = key as usize % self.d;
        match self.rows {
            Rows::Plain => {}
            Rows::Zeros => x.fill(if key.is_multiple_of(2) { 0.0 } else { -0.0 }),
            Rows::OneHot => x.iter_mut().enumerate().for_each(|(i, x)| *x = f64::from(u8::from(i == at))),
            Rows::OneHuge => x[at] = 3000.0,
            Rows::Coarse => x.iter_mut().for_each(|x| *x = x.round()),
        }
        // Rows of zeros and others stand in one tile.
        let factor = if key.is_multiple_of(5) { 0.0 } else { 10f64.powf(self.exponent) };
        x.iter().map(|x| (x * factor).clamp(-65504.0, 65504.0) as f32).collect()
    }

    fn word(&self, x: f32) -> [u8; 2] {
        match self.window {
            Dtype::Bf16 => bf16::from_f32(x).to_le_bytes(),
            _ => f16::from_f32(x).to_le_bytes(),
        }
    }

    /// Raw pages whose padding holds garbage.
    fn raw(&self, codec: &HeadCodec) -> Vec<Vec<u8>> {
        let page = |tile: usize| {
            let mut page = vec![0xFF; codec.desc.page_bytes as usize];
            for side in [Side::Key, Side::Value] {
                let run = codec.desc.side(side).runs[0];
                let rows = &mut page[layout::run_range(&codec.desc, side, &run, 0)];
                for (token, row) in rows.chunks_exact_mut(2 * run.channels as usize).enumerate() {
                    let key = self.seed.wrapping_add((64 * side as usize + 16 * tile + token) as u64);
                    let words = row.as_chunks_mut::<2>().0;
                    words.iter_mut().zip(self.row(key)).for_each(|(w, x)| *w = self.word(x));
                }
            }
            page
        };
        (0..self.tiles).map(page).collect()
    }

    fn page(&self, kernel: Option<Kernel<'_>>) -> Vec<u8> {
        let [raw, codec] = self.codecs();
        let pages = self.raw(&raw);
        let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
        let mut page = vec![0xA5; codec.desc.page_bytes as usize];
        // Gaps, as between the tokens that eviction leaves.
        let positions: Vec<i64> =
            (0..16 * self.tiles as i64).map(|i| self.position + i + i * i % 7 * (i / 7)).collect();
        seal_with(kernel, (&raw, &codec), &pages, &positions, &mut page, self.slot);
        page
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn every_kernel_writes_the_bytes_of_the_scalar_encoder(case in cases()) {
        let expected = case.page(None);
        prop_assert!(expected.iter().any(|b| *b != 0xA5));
        for (name, kernel) in kernels() {
            prop_assert!(case.page(Some(&*kernel)) == expected, "{} differs", name);
        }
    }
}

#[test]
fn every_width_and_dimension_gives_the_bytes_of_the_scalar_encoder() {
    let plain = Case {
        d: 0,
        bits: 0.0,
        rule: ScaleRule::Unbiased,
        dense: false,
        window: Dtype::F16,
        exponent: 0.5,
        rows: Rows::Plain,
        tiles: 1,
        slot: 16,
        constant: false,
        position: 0,
        seed: 2,
    };
    for (d, bits) in DIMS.iter().flat_map(|&d| (1..=8).map(move |bits| (d, bits))) {
        let case = Case { d, bits: f64::from(bits), ..plain.clone() };
        let expected = case.page(None);
        for (name, kernel) in kernels() {
            assert!(case.page(Some(&*kernel)) == expected, "{name}: {d} channels, {bits} bits");
        }
    }
}

/// Codes of 16 channels by a book of up to 8 bits.
pub(crate) fn codes_of<S: SimdEncode>(s: S, (width, search): (u32, &Search), u: &Lanes) -> [u8; 64] {
    let mut unit = [0; 64];
    for half in 0..S::HALVES {
        let x = s.load_f(u, half);
        let codes = match width {
            1 => search.codes::<S, 1>(s, [x; 4]),
            2 => search.codes::<S, 2>(s, [x; 4]),
            3 => search.codes::<S, 3>(s, [x; 4]),
            4 => search.codes::<S, 4>(s, [x; 4]),
            5 => search.codes::<S, 5>(s, [x; 4]),
            6 => search.codes::<S, 6>(s, [x; 4]),
            7 => search.codes::<S, 7>(s, [x; 4]),
            _ => search.codes::<S, 8>(s, [x; 4]),
        };
        s.store(codes[3], &mut unit, half);
    }
    unit
}

type Codes = fn((u32, &Search), &Lanes) -> [u8; 64];

fn searches() -> Vec<Codes> {
    let mut all: Vec<Codes> = vec![|b, u| codes_of(Model::<16>, b, u), |b, u| codes_of(Model::<8>, b, u)];
    #[cfg(target_arch = "x86_64")]
    {
        use crate::x86::encode::testing::{codes_avx2, codes_avx512};
        if require(Isa::Avx2) {
            // SAFETY: the CPU has the instruction set.
            all.push(|book, u| unsafe { codes_avx2(book, u) });
        }
        if require(Isa::Avx512) {
            // SAFETY: the CPU has the instruction set.
            all.push(|book, u| unsafe { codes_avx512(book, u) });
        }
    }
    all
}

#[test]
fn exact_ties_zeros_and_endless_channels_get_the_scalar_codes() {
    let uniform: Vec<Book> = (7..=8).map(|width| Book::uniform(width, 0.25)).collect();
    for book in (1..=8).map(|width| *Book::gaussian(width)).chain(uniform) {
        let ties = (-2048..2048).map(|i| i as f32 * 0.5 * book.step);
        let mut u: Vec<f32> = book.thresholds.iter().copied().chain(ties).collect();
        u = u.iter().flat_map(|&t| [t, t.next_up(), t.next_down()]).collect();
        u.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, -1e-45, 1e30]);
        u.resize(u.len().next_multiple_of(16), f32::NAN);
        let search = Search::new(&book).unwrap();
        for u in u.as_chunks::<16>().0 {
            let expected: [u8; 64] = from_fn(|i| if i % 4 == 0 { book.code(u[i / 4]) } else { 0 });
            for codes in searches() {
                assert_eq!(codes((book.width, &search), u), expected, "{book:?} {u:?}");
            }
        }
    }
}

#[test]
fn books_without_a_search_are_left_to_the_scalar_encoder() {
    let falling = Book { thresholds: &[0.5, 0.0, 1.0], ..*Book::gaussian(2) };
    assert!(Search::new(&falling).is_none());
    let short = Book { thresholds: &[0.0], ..*Book::gaussian(2) };
    assert!(Search::new(&short).is_none());
    assert!(Search::new(&Book::uniform(4, 0.25)).is_none());
}

/// Millions of vectors a second on one core: the best of many short runs, which other work disturbs least.
fn rate(case: &Case, kernel: Option<Kernel<'_>>) -> f64 {
    let [raw, codec] = case.codecs();
    let raws: Vec<Vec<u8>> =
        (0..4).flat_map(|i| Case { seed: 100 * i + 1, ..case.clone() }.raw(&raw)).collect();
    let mut pages = vec![vec![0; codec.desc.page_bytes as usize]; raws.len().div_ceil(4)];
    let mut best = f64::INFINITY;
    for _ in 0..1000 {
        let start = std::time::Instant::now();
        for (i, bytes) in raws.iter().enumerate() {
            let positions: [i64; 16] = std::array::from_fn(|t| (16 * i + t) as i64);
            seal_with(kernel, (&raw, &codec), &[bytes], &positions, &mut pages[i / 4], 16 * (i % 4));
        }
        best = start.elapsed().as_secs_f64().min(best);
    }
    (32 * raws.len()) as f64 / best * 1e-6
}

#[test]
#[ignore = "a measurement"]
fn rates() {
    let base = Case {
        d: 128,
        bits: 4.0,
        rule: ScaleRule::Unbiased,
        dense: false,
        window: Dtype::F16,
        exponent: 0.0,
        rows: Rows::Plain,
        tiles: 4,
        slot: 0,
        constant: false,
        position: 0,
        seed: 1,
    };
    let bits = [1.0, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0].map(|bits| Case { bits, ..base.clone() });
    let others = [
        Case { d: 80, ..base.clone() },
        Case { d: 64, ..base.clone() },
        Case { d: 256, ..base.clone() },
        Case { dense: true, ..base.clone() },
        Case { rule: ScaleRule::Norm, ..base.clone() },
        Case { rule: ScaleRule::Raw, ..base.clone() },
        Case { window: Dtype::Bf16, ..base.clone() },
        Case { constant: true, ..base.clone() },
    ];
    for case in bits.iter().chain(&others) {
        let what = format!("d {}, {} bits, {}, {:?}", case.d, case.bits, case.rule.name(), case.window);
        let more =
            [(case.dense, ", dense"), (case.constant, ", constant")].map(|(is, s)| if is { s } else { "" });
        for isa in Isa::available() {
            let rate = rate(case, of(isa).as_deref());
            eprintln!("{}: {what}{}: {rate:.2} million vectors/s", isa.name(), more.concat());
        }
    }
}
