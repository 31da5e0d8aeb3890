//! AVX2 with FMA and F16C: 8 lanes, products of bytes summed in 16 bits.

use crate::simd::Simd;
use core::arch::asm;
use core::arch::x86_64::*;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The proof, if this CPU has them.
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }

    /// The proof, inside a function that may only run where the features are.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

/// Calls intrinsics whose features the token proves.
macro_rules! with_avx2 {
    ($($body:tt)*) => {
        // SAFETY: a value of `Avx2` exists, so the CPU has the features; pointers come from references to arrays
        // that hold the bytes read or written, as the argument types and the asserts on `half` say.
        unsafe { $($body)* }
    };
}

/// `x`, of which the compiler knows nothing more: it would otherwise take sums apart to start them early, and run out
/// of registers.
#[target_feature(enable = "avx2")]
#[inline]
fn pin(mut x: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags)) }
    x
}

/// Byte-wise `table[at + index % 16]`.
///
/// # Safety
/// The CPU has AVX2, and `at` is at most 48.
#[inline(always)]
unsafe fn lookup_part(table: &[u8; 64], at: usize, index: __m256i) -> __m256i {
    // SAFETY: by the function's contract 16 bytes are readable, and AVX2 is there.
    unsafe {
        let part = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().add(at).cast()));
        _mm256_shuffle_epi8(part, index)
    }
}

impl Simd for Avx2 {
    type I = __m256i;
    type F = __m256;
    const LANES: usize = 8;
    /// 63 * 520 = 32760 < 2^15.
    const NARROW_LIMIT: i32 = 520;

    #[inline(always)]
    fn load(self, unit: &[u8; 64], half: usize) -> __m256i {
        assert!(half < 2);
        with_avx2! { _mm256_loadu_si256(unit.as_ptr().add(32 * half).cast()) }
    }

    #[inline(always)]
    fn load_lone(self, unit: &[u8; 32], half: usize) -> __m256i {
        with_avx2! {
            let x = _mm256_loadu_si256(unit.as_ptr().cast());
            if half == 0 { x } else { _mm256_srli_epi16(x, 4) }
        }
    }

    #[inline(always)]
    fn table16(self, table: &[u8; 16]) -> __m256i {
        with_avx2! { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
    }

    #[inline(always)]
    fn splat_bytes(self, x: u8) -> __m256i {
        with_avx2! { _mm256_set1_epi8(x.cast_signed()) }
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        with_avx2! { _mm256_set1_epi32(x) }
    }

    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        with_avx2! { _mm256_and_si256(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m256i, b: __m256i) -> __m256i {
        with_avx2! { _mm256_or_si256(a, b) }
    }

    #[inline(always)]
    fn shift_right<const N: i32>(self, x: __m256i) -> __m256i {
        with_avx2! { _mm256_srli_epi16::<N>(x) }
    }

    #[inline(always)]
    fn shift_left<const N: i32>(self, x: __m256i) -> __m256i {
        with_avx2! { _mm256_slli_epi16::<N>(x) }
    }

    #[inline(always)]
    fn sub_bytes(self, a: __m256i, b: __m256i) -> __m256i {
        with_avx2! { _mm256_sub_epi8(a, b) }
    }

    #[inline(always)]
    fn lookup16(self, table: __m256i, index: __m256i) -> __m256i {
        with_avx2! { _mm256_shuffle_epi8(table, index) }
    }

    #[inline(always)]
    fn lookup64(self, table: &[u8; 64], index: __m256i) -> __m256i {
        with_avx2! {
            // The blend looks at bit 7 of each byte: bits 4 and 5 of the index are moved there.
            let (bit4, bit5) = (_mm256_slli_epi16(index, 3), _mm256_slli_epi16(index, 2));
            let (low, high) = (
                _mm256_blendv_epi8(lookup_part(table, 0, index), lookup_part(table, 16, index), bit4),
                _mm256_blendv_epi8(lookup_part(table, 32, index), lookup_part(table, 48, index), bit4),
            );
            _mm256_blendv_epi8(low, high, bit5)
        }
    }

    /// A memory operand of a whole vector costs nothing, a broadcast an instruction.
    const SPREAD: usize = 8;

    #[inline(always)]
    fn digit(self, spread: &[i32]) -> __m256i {
        let spread = &spread[..8];
        with_avx2! { _mm256_loadu_si256(spread.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add_i(self, a: __m256i, b: __m256i) -> __m256i {
        with_avx2! { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    fn narrow_dot(self, sums: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        with_avx2! { pin(_mm256_add_epi16(sums, _mm256_maddubs_epi16(unsigned, signed))) }
    }

    #[inline(always)]
    fn narrow_start(self, low: i32, high: i32) -> i32 {
        (low & 0xffff) | (high << 16)
    }

    #[inline(always)]
    fn narrow_total(self, sums: __m256i) -> __m256i {
        with_avx2! { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
    }

    #[inline(always)]
    fn even_words(self, bytes: __m256i) -> __m256i {
        with_avx2! { _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8) }
    }

    #[inline(always)]
    fn odd_words(self, bytes: __m256i) -> __m256i {
        with_avx2! { _mm256_srai_epi16(bytes, 8) }
    }

    #[inline(always)]
    fn wide_dot(self, sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        with_avx2! { pin(_mm256_add_epi32(sum, _mm256_madd_epi16(a, b))) }
    }

    #[inline(always)]
    fn load_f(self, chunk: &[f32; 16], half: usize) -> __m256 {
        assert!(half < 2);
        with_avx2! { _mm256_loadu_ps(chunk.as_ptr().add(8 * half)) }
    }

    #[inline(always)]
    fn store_f(self, x: __m256, chunk: &mut [f32; 16], half: usize) {
        assert!(half < 2);
        with_avx2! { _mm256_storeu_ps(chunk.as_mut_ptr().add(8 * half), x) }
    }

    #[inline(always)]
    fn load_f16(self, chunk: &[u8; 32], half: usize) -> __m256 {
        assert!(half < 2);
        with_avx2! { _mm256_cvtph_ps(_mm_loadu_si128(chunk.as_ptr().add(16 * half).cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, chunk: &[u8; 32], half: usize) -> __m256 {
        assert!(half < 2);
        with_avx2! {
            let words = _mm_loadu_si128(chunk.as_ptr().add(16 * half).cast());
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16))
        }
    }

    #[inline(always)]
    fn splat_f(self, x: f32) -> __m256 {
        with_avx2! { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        with_avx2! { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        with_avx2! { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn abs(self, x: __m256) -> __m256 {
        with_avx2! { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
    }

    #[inline(always)]
    fn round(self, x: __m256) -> __m256 {
        with_avx2! { _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }
    }

    #[inline(always)]
    fn to_f(self, x: __m256i) -> __m256 {
        with_avx2! { _mm256_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn scale_by_power(self, x: __m256, n: __m256) -> __m256 {
        with_avx2! {
            let exponents = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponents))
        }
    }

    #[inline(always)]
    fn select(self, bits: u16, half: usize, a: __m256, b: __m256) -> __m256 {
        with_avx2! {
            let lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let bits = _mm256_set1_epi32(i32::from(bits >> (8 * half)));
            let mask = _mm256_cmpeq_epi32(_mm256_and_si256(bits, lane_bits), lane_bits);
            _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))
        }
    }

    #[inline(always)]
    fn reduce_max4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        with_avx2! {
            // Of every four lanes: a0 a2, b0 b2, a1 a3, b1 b3.
            let ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let x = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0b01_00_01_00), _mm256_shuffle_ps(ab, cd, 0b11_10_11_10));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
            core::mem::transmute::<__m128, [f32; 4]>(x)
        }
    }

    #[inline(always)]
    fn reduce_add(self, x: __m256) -> f32 {
        with_avx2! {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)))
        }
    }

    #[inline(always)]
    fn reduce_add4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        with_avx2! {
            let x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
            core::mem::transmute::<__m128, [f32; 4]>(x)
        }
    }

    #[inline(always)]
    fn reduce_pairs(self, [a, b]: [__m256; 2]) -> [[f32; 2]; 2] {
        with_avx2! {
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
            let b = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
            core::mem::transmute::<__m128, [[f32; 2]; 2]>(_mm_hadd_ps(a, b))
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: __m256, out: &mut [u8; 16], half: usize) {
        assert!(half < 2);
        with_avx2! {
            let lanes = _mm256_cvtps_epi32(x);
            // The low byte of each lane, then the two groups of four side by side.
            let low = _mm256_setr_epi8(
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, //
                -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1,
            );
            let x = _mm256_shuffle_epi8(lanes, low);
            let x = _mm_or_si128(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
            _mm_storel_epi64(out.as_mut_ptr().add(8 * half).cast(), x);
        }
    }

    #[inline(always)]
    fn store_digits(self, [a, b]: [__m256; 2], out: &mut [u8; 16]) {
        with_avx2! {
            // Bytes [a0-3 b0-3 .. a4-7 b4-7 ..], then fours in order.
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words, words), order);
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes));
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        with_avx2! { _mm_prefetch(at.cast(), _MM_HINT_T0) }
    }
}
