//! AVX-512 with VNNI and VBMI: 16 lanes, products of bytes summed in 32 bits.

use crate::simd::Simd;
use core::arch::asm;
use core::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, VL, DQ, VBMI and VNNI, and AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// The proof, if this CPU has them all.
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vnni");
        super::avx2::Avx2::detect().filter(|_| all).map(|_| Self(()))
    }

    /// The proof, inside a function that may only run where the features are.
    ///
    /// # Safety
    /// The CPU has all features that [`Self::detect`] asks for.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

/// Calls intrinsics whose features the token proves.
macro_rules! with_avx512 {
    ($($body:tt)*) => {
        // SAFETY: a value of `Avx512` exists, so the CPU has the features; pointers come from references to arrays
        // of exactly the bytes that are read or written.
        unsafe { $($body)* }
    };
}

/// Bits of a shift, where the intrinsic takes them from a register: compiled to the immediate form.
macro_rules! bits {
    ($n:expr) => {
        _mm_cvtsi32_si128($n)
    };
}

/// `x`, computed by now: the compiler would otherwise put products off until a row's sum is stored, with digits that it
/// may not load after the store of another row waiting on the stack.
#[target_feature(enable = "avx512f")]
#[inline]
fn settled(mut x: __m512i) -> __m512i {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(zmm_reg) x, options(nomem, nostack, preserves_flags)) }
    x
}

/// Lanes 0..8 plus lanes 8..16.
#[inline(always)]
fn fold_to_8(_: Avx512, x: __m512) -> __m256 {
    with_avx512! { _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)) }
}

/// The sums of lanes 0, 4, 8, 12, of lanes 1, 5, 9, 13, and so on.
#[inline(always)]
fn fold_to_4(token: Avx512, x: __m512) -> __m128 {
    let x = fold_to_8(token, x);
    with_avx512! { _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)) }
}

impl Simd for Avx512 {
    type I = __m512i;
    type F = __m512;
    const LANES: usize = 16;
    const NARROW_LIMIT: i32 = i32::MAX;

    #[inline(always)]
    fn load(self, unit: &[u8; 64], half: usize) -> __m512i {
        assert!(half == 0);
        with_avx512! { _mm512_loadu_si512(unit.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_lone(self, unit: &[u8; 32], half: usize) -> __m512i {
        assert!(half == 0);
        with_avx512! {
            let x = _mm256_loadu_si256(unit.as_ptr().cast());
            _mm512_inserti64x4(_mm512_castsi256_si512(x), _mm256_srli_epi16(x, 4), 1)
        }
    }

    #[inline(always)]
    fn table16(self, table: &[u8; 16]) -> __m512i {
        with_avx512! { _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())) }
    }

    #[inline(always)]
    fn splat_bytes(self, x: u8) -> __m512i {
        with_avx512! { _mm512_set1_epi8(x.cast_signed()) }
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        with_avx512! { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        with_avx512! { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        with_avx512! { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn shift_right<const N: i32>(self, x: __m512i) -> __m512i {
        with_avx512! { _mm512_srl_epi16(x, bits!(N)) }
    }

    #[inline(always)]
    fn shift_left<const N: i32>(self, x: __m512i) -> __m512i {
        with_avx512! { _mm512_sll_epi16(x, bits!(N)) }
    }

    #[inline(always)]
    fn sub_bytes(self, a: __m512i, b: __m512i) -> __m512i {
        with_avx512! { _mm512_sub_epi8(a, b) }
    }

    #[inline(always)]
    fn lookup16(self, table: __m512i, index: __m512i) -> __m512i {
        with_avx512! { _mm512_shuffle_epi8(table, index) }
    }

    #[inline(always)]
    fn lookup64(self, table: &[u8; 64], index: __m512i) -> __m512i {
        with_avx512! { _mm512_permutexvar_epi8(index, _mm512_loadu_si512(table.as_ptr().cast())) }
    }

    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        with_avx512! { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn narrow_dot(self, sums: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
        with_avx512! { _mm512_dpbusd_epi32(sums, unsigned, signed) }
    }

    #[inline(always)]
    fn narrow_start(self, low: i32, high: i32) -> i32 {
        low + high
    }

    #[inline(always)]
    fn narrow_total(self, sums: __m512i) -> __m512i {
        with_avx512! { settled(sums) }
    }

    #[inline(always)]
    fn even_words(self, bytes: __m512i) -> __m512i {
        with_avx512! { _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8) }
    }

    #[inline(always)]
    fn odd_words(self, bytes: __m512i) -> __m512i {
        with_avx512! { _mm512_srai_epi16(bytes, 8) }
    }

    #[inline(always)]
    fn wide_dot(self, sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        with_avx512! { _mm512_dpwssd_epi32(sum, a, b) }
    }

    #[inline(always)]
    fn load_f(self, chunk: &[f32; 16], half: usize) -> __m512 {
        assert!(half == 0);
        with_avx512! { _mm512_loadu_ps(chunk.as_ptr()) }
    }

    #[inline(always)]
    fn store_f(self, x: __m512, chunk: &mut [f32; 16], half: usize) {
        assert!(half == 0);
        with_avx512! { _mm512_storeu_ps(chunk.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_f16(self, chunk: &[u8; 32], half: usize) -> __m512 {
        assert!(half == 0);
        with_avx512! { _mm512_cvtph_ps(_mm256_loadu_si256(chunk.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, chunk: &[u8; 32], half: usize) -> __m512 {
        assert!(half == 0);
        with_avx512! {
            let words = _mm256_loadu_si256(chunk.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))
        }
    }

    #[inline(always)]
    fn splat_f(self, x: f32) -> __m512 {
        with_avx512! { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        with_avx512! { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        with_avx512! { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        with_avx512! { _mm512_andnot_ps(_mm512_set1_ps(-0.0), x) }
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        // The upper half of the immediate is the number of binary places that stay: none.
        with_avx512! { _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }
    }

    #[inline(always)]
    fn to_f(self, x: __m512i) -> __m512 {
        with_avx512! { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn scale_by_power(self, x: __m512, n: __m512) -> __m512 {
        with_avx512! { _mm512_scalef_ps(x, n) }
    }

    #[inline(always)]
    fn select(self, bits: u16, half: usize, a: __m512, b: __m512) -> __m512 {
        assert!(half == 0);
        // Takes its last operand where a bit is set.
        with_avx512! { _mm512_mask_blend_ps(bits, b, a) }
    }

    #[inline(always)]
    fn reduce_max4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        with_avx512! {
            // Of every four lanes: a0 a2, b0 b2, a1 a3, b1 b3.
            let ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let x = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0b01_00_01_00), _mm512_shuffle_ps(ab, cd, 0b11_10_11_10));
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
            core::mem::transmute::<__m128, [f32; 4]>(x)
        }
    }

    #[inline(always)]
    fn reduce_add(self, x: __m512) -> f32 {
        let x = fold_to_4(self, x);
        with_avx512! {
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)))
        }
    }

    #[inline(always)]
    fn reduce_add4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        with_avx512! {
            // Of every four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0b01_00_01_00), _mm512_shuffle_ps(ab, cd, 0b11_10_11_10));
            core::mem::transmute::<__m128, [f32; 4]>(fold_to_4(self, x))
        }
    }

    #[inline(always)]
    fn reduce_pairs(self, [a, b]: [__m512; 2]) -> [[f32; 2]; 2] {
        let (a, b) = (fold_to_4(self, a), fold_to_4(self, b));
        with_avx512! { core::mem::transmute::<__m128, [[f32; 2]; 2]>(_mm_hadd_ps(a, b)) }
    }

    #[inline(always)]
    fn store_bytes(self, x: __m512, out: &mut [u8; 16], half: usize) {
        assert!(half == 0);
        with_avx512! {
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        with_avx512! { _mm_prefetch(at.cast(), _MM_HINT_T0) }
    }
}
