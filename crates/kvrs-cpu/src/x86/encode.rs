//! What encoding and rotations need beyond the common operations, and their entry points.

use super::avx2::Avx2;
use super::avx512::Avx512;
use crate::simd::encode::SimdEncode;
use crate::simd::hadamard::Butterfly;
use core::arch::x86_64::*;

/// Calls intrinsics whose features a value of [`Avx2`] or [`Avx512`] proves.
macro_rules! with_features {
    ($($body:tt)*) => {
        // SAFETY: a value of the token type exists, so the CPU has the features; pointers come from references to
        // arrays that hold the bytes read or written, as the argument types and the asserts say.
        unsafe { $($body)* }
    };
}

impl Butterfly for Avx2 {
    #[inline(always)]
    fn butterfly<const H: usize>(self, x: __m256) -> __m256 {
        assert!(H < 8);
        with_features! {
            let (swapped, lanes) = match H {
                1 => (_mm256_shuffle_ps(x, x, 0b10_11_00_01), 0b1010_1010),
                2 => (_mm256_shuffle_ps(x, x, 0b01_00_11_10), 0b1100_1100),
                _ => (_mm256_permute2f128_ps(x, x, 1), 0b1111_0000),
            };
            _mm256_add_ps(swapped, _mm256_xor_ps(x, signs8(lanes)))
        }
    }
}

/// A minus sign in each lane whose bit is set.
#[inline(always)]
fn signs8(lanes: u8) -> __m256 {
    let sign = |lane: u8| if lanes >> lane & 1 == 1 { -0.0 } else { 0.0 };
    with_features! { _mm256_setr_ps(sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7)) }
}

impl Butterfly for Avx512 {
    #[inline(always)]
    fn butterfly<const H: usize>(self, x: __m512) -> __m512 {
        assert!(H < 16);
        with_features! {
            let (swapped, lanes) = match H {
                1 => (_mm512_permute_ps(x, 0b10_11_00_01), 0b1010_1010_1010_1010),
                2 => (_mm512_permute_ps(x, 0b01_00_11_10), 0b1100_1100_1100_1100),
                4 => (_mm512_shuffle_f32x4(x, x, 0b10_11_00_01), 0b1111_0000_1111_0000),
                _ => (_mm512_shuffle_f32x4(x, x, 0b01_00_11_10), 0b1111_1111_0000_0000),
            };
            let sum = _mm512_add_ps(swapped, x);
            _mm512_mask_sub_ps(sum, lanes, swapped, x)
        }
    }
}

/// Reverses the order of 4 x 4 bytes: byte 4 i + j goes to 4 j + i.
const TURN: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

impl SimdEncode for Avx2 {
    #[inline(always)]
    fn refine(self, index: __m256i, u: __m256, t: __m256) -> __m256i {
        with_features! {
            let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GE_OQ>(u, t));
            _mm256_sub_epi32(_mm256_add_epi32(index, index), above)
        }
    }

    #[inline(always)]
    fn pick4(self, table: &[f32; 4], index: __m256i) -> __m256 {
        with_features! { _mm256_permutevar_ps(_mm256_broadcast_ps(&_mm_loadu_ps(table.as_ptr())), index) }
    }

    #[inline(always)]
    fn pick8(self, table: &[f32; 8], index: __m256i) -> __m256 {
        with_features! { _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), index) }
    }

    #[inline(always)]
    fn choose<const BIT: u32>(self, index: __m256i, a: __m256, b: __m256) -> __m256 {
        // The blend looks at the sign.
        with_features! {
            let sign = _mm256_sll_epi32(index, _mm_cvtsi32_si128((31 - BIT).cast_signed()));
            _mm256_blendv_ps(b, a, _mm256_castsi256_ps(sign))
        }
    }

    #[inline(always)]
    fn choose_i<const BIT: u32>(self, index: __m256i, a: __m256i, b: __m256i) -> __m256i {
        with_features! {
            let chosen = self.choose::<BIT>(index, _mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
            _mm256_castps_si256(chosen)
        }
    }

    #[inline(always)]
    fn bits(self, x: __m256) -> __m256i {
        with_features! { _mm256_castps_si256(x) }
    }

    #[inline(always)]
    fn store_f16(self, x: __m256, out: &mut [u8; 32], half: usize) {
        assert!(half < 2);
        with_features! {
            _mm_storeu_si128(out.as_mut_ptr().add(16 * half).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        }
    }

    #[inline(always)]
    fn store(self, x: __m256i, unit: &mut [u8; 64], half: usize) {
        assert!(half < 2);
        with_features! { _mm256_storeu_si256(unit.as_mut_ptr().add(32 * half).cast(), x) }
    }

    #[inline(always)]
    fn store_across(self, codes: [__m256i; 4], unit: &mut [u8; 64], half: usize) {
        with_features! {
            let turn = _mm256_broadcastsi128_si256(_mm_loadu_si128(TURN.as_ptr().cast()));
            self.store(_mm256_shuffle_epi8(narrow(self, codes), turn), unit, half);
        }
    }

    #[inline(always)]
    fn store_along(self, codes: [__m256i; 4], units: &mut [[u8; 64]; 4], quad: usize, half: usize) {
        assert!(quad < 4 && half < 2);
        with_features! {
            let x = narrow(self, codes);
            let at = |units: &mut [[u8; 64]; 4], z: usize| units[z].as_mut_ptr().add(16 * quad).cast();
            _mm_storeu_si128(at(units, 2 * half), _mm256_castsi256_si128(x));
            _mm_storeu_si128(at(units, 2 * half + 1), _mm256_extracti128_si256(x, 1));
        }
    }

    #[inline(always)]
    fn transpose(self, bf16: bool, rows: &[&[u8; 32]; 16], out: &mut [[f32; 16]; 16]) {
        transpose_8(self, bf16, rows, 0, out);
        transpose_8(self, bf16, rows, 1, out);
    }
}

/// The low bytes of four vectors; in each 128 bits those of four lanes of the first, of the second, ...
#[inline(always)]
fn narrow(_: Avx2, [a, b, c, d]: [__m256i; 4]) -> __m256i {
    with_features! { _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d)) }
}

/// Rows `8 half ..` of [`SimdEncode::transpose`].
#[inline(always)]
fn transpose_8(_: Avx2, bf16: bool, rows: &[&[u8; 32]; 16], half: usize, out: &mut [[f32; 16]; 16]) {
    with_features! {
        let mut r = [_mm256_setzero_si256(); 8];
        for t in 0..8 {
            r[t] = _mm256_loadu_si256(rows[8 * half + t].as_ptr().cast());
        }
        // Three rounds of interleaving put 8 tokens of channel k and of channel 8 + k into vector k.
        let mut a = r;
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
        }
        let mut b = a;
        for i in [0, 4] {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 2]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 2]);
            b[i + 2] = _mm256_unpacklo_epi32(a[i + 1], a[i + 3]);
            b[i + 3] = _mm256_unpackhi_epi32(a[i + 1], a[i + 3]);
        }
        for i in 0..4 {
            let (low, high) = (_mm256_unpacklo_epi64(b[i], b[i + 4]), _mm256_unpackhi_epi64(b[i], b[i + 4]));
            for (k, x) in [(2 * i, low), (2 * i + 1, high)] {
                for (k, words) in [(k, _mm256_castsi256_si128(x)), (k + 8, _mm256_extracti128_si256(x, 1))] {
                    let f = if bf16 {
                        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16))
                    } else {
                        _mm256_cvtph_ps(words)
                    };
                    _mm256_storeu_ps(out[k].as_mut_ptr().add(8 * half), f);
                }
            }
        }
    }
}

impl SimdEncode for Avx512 {
    #[inline(always)]
    fn refine(self, index: __m512i, u: __m512, t: __m512) -> __m512i {
        with_features! {
            let twice = _mm512_add_epi32(index, index);
            _mm512_mask_add_epi32(twice, _mm512_cmp_ps_mask::<_CMP_GE_OQ>(u, t), twice, _mm512_set1_epi32(1))
        }
    }

    #[inline(always)]
    fn pick4(self, table: &[f32; 4], index: __m512i) -> __m512 {
        with_features! { _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(table.as_ptr())), index) }
    }

    #[inline(always)]
    fn pick8(self, table: &[f32; 8], index: __m512i) -> __m512 {
        with_features! {
            let table = _mm512_broadcast_f32x8(_mm256_loadu_ps(table.as_ptr()));
            // The table is there twice, so bit 3 of the index makes no difference.
            _mm512_permutexvar_ps(index, table)
        }
    }

    #[inline(always)]
    fn pick16(self, table: &[[f32; 8]; 2], index: __m512i) -> __m512 {
        with_features! { _mm512_permutexvar_ps(index, _mm512_loadu_ps(table.as_flattened().as_ptr())) }
    }

    #[inline(always)]
    fn choose<const BIT: u32>(self, index: __m512i, a: __m512, b: __m512) -> __m512 {
        with_features! {
            _mm512_mask_blend_ps(_mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << BIT)), b, a)
        }
    }

    #[inline(always)]
    fn choose_i<const BIT: u32>(self, index: __m512i, a: __m512i, b: __m512i) -> __m512i {
        with_features! {
            _mm512_mask_blend_epi32(_mm512_test_epi32_mask(index, _mm512_set1_epi32(1 << BIT)), b, a)
        }
    }

    #[inline(always)]
    fn bits(self, x: __m512) -> __m512i {
        with_features! { _mm512_castps_si512(x) }
    }

    #[inline(always)]
    fn store_f16(self, x: __m512, out: &mut [u8; 32], half: usize) {
        assert!(half == 0);
        with_features! {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        }
    }

    #[inline(always)]
    fn store(self, x: __m512i, unit: &mut [u8; 64], half: usize) {
        assert!(half == 0);
        with_features! { _mm512_storeu_si512(unit.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn store_across(self, codes: [__m512i; 4], unit: &mut [u8; 64], half: usize) {
        with_features! {
            let turn = _mm512_broadcast_i32x4(_mm_loadu_si128(TURN.as_ptr().cast()));
            self.store(_mm512_shuffle_epi8(narrow_16(self, codes), turn), unit, half);
        }
    }

    #[inline(always)]
    fn store_along(self, codes: [__m512i; 4], units: &mut [[u8; 64]; 4], quad: usize, half: usize) {
        assert!(quad < 4 && half == 0);
        with_features! {
            let x = narrow_16(self, codes);
            let at = |units: &mut [[u8; 64]; 4], z: usize| units[z].as_mut_ptr().add(16 * quad).cast();
            _mm_storeu_si128(at(units, 0), _mm512_castsi512_si128(x));
            _mm_storeu_si128(at(units, 1), _mm512_extracti32x4_epi32(x, 1));
            _mm_storeu_si128(at(units, 2), _mm512_extracti32x4_epi32(x, 2));
            _mm_storeu_si128(at(units, 3), _mm512_extracti32x4_epi32(x, 3));
        }
    }

    #[inline(always)]
    fn transpose(self, bf16: bool, rows: &[&[u8; 32]; 16], out: &mut [[f32; 16]; 16]) {
        // SAFETY: AVX-512 comes with AVX2, FMA and F16C (`Avx512::detect`).
        unsafe { Avx2::assume() }.transpose(bf16, rows, out);
    }
}

/// As [`narrow`].
#[inline(always)]
fn narrow_16(_: Avx512, [a, b, c, d]: [__m512i; 4]) -> __m512i {
    with_features! { _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d)) }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::{Avx2, Avx512};
    use crate::simd::encode::tests::codes_of;
    use crate::simd::hadamard::tests::rotate;
    use crate::simd::search::Search;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn codes_avx2(book: (u32, &Search), u: &[f32; 16]) -> [u8; 64] {
        // SAFETY: this function may only run where the features are.
        codes_of(unsafe { Avx2::assume() }, book, u)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
    pub(crate) fn codes_avx512(book: (u32, &Search), u: &[f32; 16]) -> [u8; 64] {
        // SAFETY: this function may only run where the features are.
        codes_of(unsafe { Avx512::assume() }, book, u)
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn rotate_avx2(signs: &[f32], d: usize, x: &mut [[f32; 16]], back: bool) {
        // SAFETY: this function may only run where the features are.
        rotate(unsafe { Avx2::assume() }, signs, d, x, back);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c")]
    pub(crate) fn rotate_avx512(signs: &[f32], d: usize, x: &mut [[f32; 16]], back: bool) {
        // SAFETY: this function may only run where the features are.
        rotate(unsafe { Avx512::assume() }, signs, d, x, back);
    }
}
