//! The vector operations in plain Rust, so that kernels run in tests as they would on a CPU that is not there.
//!
//! `Model<16>` computes as AVX-512 does, `Model<8>` as AVX2: the same lanes, the same width of integer sums, the same
//! order of additions.

use super::Simd;
use half::{bf16, f16};
use std::array::from_fn;

/// The model of the instruction set with `LANES` lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model<const LANES: usize>;

/// A 32-bit lane as bytes, first the lowest.
type Lane = [u8; 4];

fn bytes<const N: usize>(a: [Lane; N], b: [Lane; N], with: impl Fn(u8, u8) -> u8) -> [Lane; N] {
    from_fn(|lane| from_fn(|i| with(a[lane][i], b[lane][i])))
}

fn words(lane: Lane) -> [i16; 2] {
    from_fn(|i| i16::from_le_bytes([lane[2 * i], lane[2 * i + 1]]))
}

fn of_words(words: [i16; 2]) -> Lane {
    let [[a, b], [c, d]] = words.map(i16::to_le_bytes);
    [a, b, c, d]
}

fn map_words<const N: usize>(x: [Lane; N], with: impl Fn(i16) -> i16) -> [Lane; N] {
    x.map(|lane| of_words(words(lane).map(&with)))
}

fn map_i32<const N: usize>(x: [Lane; N], with: impl Fn(usize, i32) -> i32) -> [Lane; N] {
    from_fn(|lane| with(lane, i32::from_le_bytes(x[lane])).to_le_bytes())
}

fn map2<const N: usize>(a: [f32; N], b: [f32; N], with: impl Fn(f32, f32) -> f32) -> [f32; N] {
    from_fn(|lane| with(a[lane], b[lane]))
}

fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The four lanes that are left when the upper half is joined to the lower one until then.
fn fold<const N: usize>(x: [f32; N], with: impl Fn(f32, f32) -> f32) -> [f32; 4] {
    let (mut x, mut left) = (x.to_vec(), N);
    while left > 4 {
        left /= 2;
        (0..left).for_each(|lane| x[lane] = with(x[lane], x[lane + left]));
    }
    from_fn(|lane| x[lane])
}

impl<const LANES: usize> Model<LANES> {
    /// Whether products of bytes are summed in 16-bit words.
    const WORDS: bool = LANES == 8;

    fn elements<const N: usize>(chunk: &[u8; 32], half: usize, of: impl Fn([u8; 2]) -> f32) -> [f32; N] {
        let elements: [f32; 16] = from_fn(|i| of([chunk[2 * i], chunk[2 * i + 1]]));
        Self::lanes(&elements, half)
    }

    fn lanes<T: Copy, const N: usize>(chunk: &[T; 16], half: usize) -> [T; N] {
        assert!(half < 16 / LANES);
        from_fn(|lane| chunk[LANES * half + lane])
    }
}

impl<const LANES: usize> Simd for Model<LANES> {
    type I = [Lane; LANES];
    type F = [f32; LANES];
    const LANES: usize = LANES;
    const NARROW_LIMIT: i32 = if Self::WORDS { 520 } else { i32::MAX };

    fn load(self, unit: &[u8; 64], half: usize) -> Self::I {
        Self::lanes(&from_fn(|lane| from_fn(|i| unit[4 * lane + i])), half)
    }

    fn load_lone(self, unit: &[u8; 32], half: usize) -> Self::I {
        let low: [Lane; 8] = from_fn(|lane| from_fn(|i| unit[4 * lane + i]));
        let high = map_words(low, |w| (w.cast_unsigned() >> 4).cast_signed());
        Self::lanes(&from_fn(|lane| if lane < 8 { low[lane] } else { high[lane - 8] }), half)
    }

    fn table16(self, table: &[u8; 16]) -> Self::I {
        from_fn(|lane| from_fn(|i| table[4 * (lane % 4) + i]))
    }

    fn splat_bytes(self, x: u8) -> Self::I {
        [[x; 4]; LANES]
    }

    fn splat_i(self, x: i32) -> Self::I {
        [x.to_le_bytes(); LANES]
    }

    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        bytes(a, b, |a, b| a & b)
    }

    fn or(self, a: Self::I, b: Self::I) -> Self::I {
        bytes(a, b, |a, b| a | b)
    }

    fn shift_right<const N: i32>(self, x: Self::I) -> Self::I {
        map_words(x, |w| (w.cast_unsigned() >> N).cast_signed())
    }

    fn shift_left<const N: i32>(self, x: Self::I) -> Self::I {
        map_words(x, |w| w << N)
    }

    fn sub_bytes(self, a: Self::I, b: Self::I) -> Self::I {
        bytes(a, b, u8::wrapping_sub)
    }

    fn lookup16(self, table: Self::I, index: Self::I) -> Self::I {
        assert!(index.as_flattened().iter().all(|&i| i < 16));
        from_fn(|lane| index[lane].map(|i| table.as_flattened()[16 * (lane / 4)..][usize::from(i)]))
    }

    fn lookup64(self, table: &[u8; 64], index: Self::I) -> Self::I {
        index.map(|lane| lane.map(|i| table[usize::from(i)]))
    }

    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        map_i32(a, |lane, x| x.wrapping_add(i32::from_le_bytes(b[lane])))
    }

    fn narrow_dot(self, sums: Self::I, unsigned: Self::I, signed: Self::I) -> Self::I {
        let product =
            |lane: usize, i: usize| i32::from(unsigned[lane][i]) * i32::from(signed[lane][i].cast_signed());
        let pair = |lane, i| product(lane, 2 * i) + product(lane, 2 * i + 1);
        if Self::WORDS {
            // The pair saturates, the sum wraps.
            let pair = |lane, i| pair(lane, i).clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16;
            from_fn(|lane| of_words(from_fn(|i| words(sums[lane])[i].wrapping_add(pair(lane, i)))))
        } else {
            map_i32(sums, |lane, sum| sum.wrapping_add(pair(lane, 0) + pair(lane, 1)))
        }
    }

    fn narrow_start(self, low: i32, high: i32) -> i32 {
        if Self::WORDS { i32::from_le_bytes(of_words([low as i16, high as i16])) } else { low + high }
    }

    fn narrow_total(self, sums: Self::I) -> Self::I {
        if !Self::WORDS {
            return sums;
        }
        sums.map(|lane| words(lane).map(i32::from).iter().sum::<i32>().to_le_bytes())
    }

    fn even_words(self, bytes: Self::I) -> Self::I {
        bytes.map(|[a, _, c, _]| of_words([a, c].map(|x| i16::from(x.cast_signed()))))
    }

    fn odd_words(self, bytes: Self::I) -> Self::I {
        bytes.map(|[_, b, _, d]| of_words([b, d].map(|x| i16::from(x.cast_signed()))))
    }

    fn wide_dot(self, sum: Self::I, a: Self::I, b: Self::I) -> Self::I {
        map_i32(sum, |lane, sum| {
            let product = |i: usize| i32::from(words(a[lane])[i]) * i32::from(words(b[lane])[i]);
            sum.wrapping_add(product(0).wrapping_add(product(1)))
        })
    }

    fn load_f(self, chunk: &[f32; 16], half: usize) -> Self::F {
        Self::lanes(chunk, half)
    }

    fn store_f(self, x: Self::F, chunk: &mut [f32; 16], half: usize) {
        chunk[LANES * half..][..LANES].copy_from_slice(&x);
    }

    fn load_f16(self, chunk: &[u8; 32], half: usize) -> Self::F {
        Self::elements(chunk, half, |x| f16::from_le_bytes(x).to_f32())
    }

    fn load_bf16(self, chunk: &[u8; 32], half: usize) -> Self::F {
        Self::elements(chunk, half, |x| bf16::from_le_bytes(x).to_f32())
    }

    fn splat_f(self, x: f32) -> Self::F {
        [x; LANES]
    }

    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }

    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }

    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }

    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }

    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, larger)
    }

    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }

    fn abs(self, x: Self::F) -> Self::F {
        x.map(f32::abs)
    }

    fn round(self, x: Self::F) -> Self::F {
        x.map(f32::round_ties_even)
    }

    fn to_f(self, x: Self::I) -> Self::F {
        x.map(|lane| i32::from_le_bytes(lane) as f32)
    }

    fn scale_by_power(self, x: Self::F, n: Self::F) -> Self::F {
        map2(x, n, |x, n| (f64::from(x) * f64::from(n).exp2()) as f32)
    }

    fn select(self, bits: u16, half: usize, a: Self::F, b: Self::F) -> Self::F {
        from_fn(|lane| if bits >> (LANES * half + lane) & 1 == 1 { a[lane] } else { b[lane] })
    }

    fn reduce_max4(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(|x| {
            let [a, b, c, d] = fold(x, larger);
            larger(larger(a, c), larger(b, d))
        })
    }

    fn reduce_add(self, x: Self::F) -> f32 {
        let [a, b, c, d] = fold(x, |a, b| a + b);
        (a + c) + (b + d)
    }

    fn reduce_add4(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(|x| {
            let fours: Vec<f32> = x
                .as_chunks()
                .0
                .iter()
                .map(|[a, b, c, d]| if Self::WORDS { (a + b) + (c + d) } else { (a + c) + (b + d) })
                .collect();
            if let [a, b, c, d] = fours[..] { (a + c) + (b + d) } else { fours[0] + fours[1] }
        })
    }

    fn reduce_pairs(self, x: [Self::F; 2]) -> [[f32; 2]; 2] {
        x.map(|x| {
            let [a, b, c, d] = fold(x, |a, b| a + b);
            [a + b, c + d]
        })
    }

    fn store_bytes(self, x: Self::F, out: &mut [u8; 16], half: usize) {
        let low = x.map(|x| (x.round_ties_even() as i32) as u8);
        out[LANES * half..][..LANES].copy_from_slice(&low);
    }

    fn prefetch(self, _: *const u8) {}
}
