//! One algorithm for every instruction set: kernels written once over the few vector operations they use.
//!
//! A tile is always 16 tokens (keys) or 16 channels (values) wide, so every array of floats comes in chunks of 16 and
//! every unit of codes in 64 bytes. A vector covers the whole of it (AVX-512) or a half (AVX2): kernels loop over
//! [`Simd::HALVES`]. Each kernel is inlined into a function that owns the feature attribute (`x86`); closures over vectors
//! (`array::map`, iterator adapters) are not, and would call every operation as a function of its own.

#![allow(clippy::inline_always, reason = "kernels must end up inside the function that owns the features")]
#![allow(clippy::needless_range_loop, reason = "iterators with closures are not inlined there")]

#[cfg(test)]
mod bounds_tests;
pub(crate) mod codes;
pub(crate) mod encode;
pub(crate) mod hadamard;
pub(crate) mod keys;
pub(crate) mod lanes;
pub(crate) mod lines;
pub(crate) mod matrix;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod pack;
pub(crate) mod prepare;
pub(crate) mod quantise;
pub(crate) mod raw;
pub(crate) mod received;
pub(crate) mod search;
pub(crate) mod softmax;
#[cfg(test)]
mod tests;
pub(crate) mod unpack;
pub(crate) mod values;

/// The operations of one instruction set. A value of an implementing type proves that the CPU has it, so the
/// operations are safe to call; they must be inlined into a function that enables the features.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// 32-bit lanes, also seen as four bytes or two 16-bit words each.
    type I: Copy;
    /// f32 lanes.
    type F: Copy;
    /// Lanes of a vector: 8 or 16.
    const LANES: usize;
    /// Vectors of a 16-lane chunk.
    const HALVES: usize = 16 / Self::LANES;
    /// Largest sum of |digit| that may meet in a lane of [`Self::narrow_dot`] before [`Self::narrow_total`], for
    /// levels up to 63; `i32::MAX` where lanes are wide enough for any.
    const NARROW_LIMIT: i32;

    /// Lanes of a 64-byte unit: bytes `4 * LANES * half` on.
    fn load(self, unit: &[u8; 64], half: usize) -> Self::I;
    /// The nibbles of a 32-byte unit of a lone block's plane 1: half 0 of a tile in the low nibbles, half 1 in the
    /// high ones; they land in the low nibbles, whatever stands in the high ones.
    fn load_lone(self, unit: &[u8; 32], half: usize) -> Self::I;
    /// A table of 16 bytes for [`Self::lookup16`].
    fn table16(self, table: &[u8; 16]) -> Self::I;
    /// `x` in every byte.
    fn splat_bytes(self, x: u8) -> Self::I;
    /// `x` in every lane.
    fn splat_i(self, x: i32) -> Self::I;
    /// Bitwise and.
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Shifts right by `N` bits in 16-bit words: bits cross bytes, callers mask.
    fn shift_right<const N: i32>(self, x: Self::I) -> Self::I;
    /// Shifts left by `N` bits in 16-bit words.
    fn shift_left<const N: i32>(self, x: Self::I) -> Self::I;
    /// Byte-wise difference.
    fn sub_bytes(self, a: Self::I, b: Self::I) -> Self::I;
    /// Byte-wise `table[index]`, index < 16.
    fn lookup16(self, table: Self::I, index: Self::I) -> Self::I;
    /// Byte-wise `table[index]`, index < 64.
    fn lookup64(self, table: &[u8; 64], index: Self::I) -> Self::I;
    /// Copies of a narrow digit in memory: 1 where an instruction can read one into every lane.
    const SPREAD: usize = 1;
    /// A narrow digit, spread over the first [`Self::SPREAD`] elements, in every lane.
    #[inline(always)]
    fn digit(self, spread: &[i32]) -> Self::I {
        self.splat_i(spread[0])
    }
    /// Lane-wise sum.
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;

    /// Adds the products of unsigned and signed bytes of each lane to its sums.
    fn narrow_dot(self, sums: Self::I, unsigned: Self::I, signed: Self::I) -> Self::I;
    /// A lane of sums that stands at `low` for the first two bytes of a lane and `high` for the others.
    fn narrow_start(self, low: i32, high: i32) -> i32;
    /// The sums as one i32 a lane.
    fn narrow_total(self, sums: Self::I) -> Self::I;
    /// Bytes 0 and 2 of every lane, sign-extended to words.
    fn even_words(self, bytes: Self::I) -> Self::I;
    /// Bytes 1 and 3 of every lane, sign-extended to words.
    fn odd_words(self, bytes: Self::I) -> Self::I;
    /// Adds the two products of words of each lane to its i32.
    fn wide_dot(self, sum: Self::I, a: Self::I, b: Self::I) -> Self::I;

    /// Half `half` of a chunk.
    fn load_f(self, chunk: &[f32; 16], half: usize) -> Self::F;
    /// Writes half `half` of a chunk.
    fn store_f(self, x: Self::F, chunk: &mut [f32; 16], half: usize);
    /// Half `half` of 16 little-endian f16.
    fn load_f16(self, chunk: &[u8; 32], half: usize) -> Self::F;
    /// Half `half` of 16 little-endian bfloat16.
    fn load_bf16(self, chunk: &[u8; 32], half: usize) -> Self::F;
    /// `x` in every lane.
    fn splat_f(self, x: f32) -> Self::F;
    /// `a + b`.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a - b`.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b`.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a / b`.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger; `b` where one is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The smaller; `b` where one is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Without the sign.
    fn abs(self, x: Self::F) -> Self::F;
    /// The nearest integer, ties to even.
    fn round(self, x: Self::F) -> Self::F;
    /// i32 lanes as f32.
    fn to_f(self, x: Self::I) -> Self::F;
    /// `x * 2^n` for integers `n` in -126..=127 and `x` in 0.5..2 whose product is a normal number.
    fn scale_by_power(self, x: Self::F, n: Self::F) -> Self::F;
    /// `a` where bit `LANES * half + lane` of `bits` is set, `b` elsewhere.
    fn select(self, bits: u16, half: usize, a: Self::F, b: Self::F) -> Self::F;
    /// The largest lanes of four vectors.
    fn reduce_max4(self, x: [Self::F; 4]) -> [f32; 4];
    /// The sum of all lanes.
    fn reduce_add(self, x: Self::F) -> f32;
    /// The sums of four vectors.
    fn reduce_add4(self, x: [Self::F; 4]) -> [f32; 4];
    /// Of two vectors: the sum of lanes 0, 1 of every four, and of lanes 2, 3.
    fn reduce_pairs(self, x: [Self::F; 2]) -> [[f32; 2]; 2];
    /// Rounds half `half` of a chunk to integers in -128..=255 and writes their low bytes.
    fn store_bytes(self, x: Self::F, out: &mut [u8; 16], half: usize);
    /// Rounds a whole chunk to integers in -128..=127 and writes their bytes; the second vector is not used where one
    /// is a chunk.
    #[inline(always)]
    fn store_digits(self, x: [Self::F; 2], out: &mut [u8; 16]) {
        for half in 0..Self::HALVES {
            self.store_bytes(x[half], out, half);
        }
    }
    /// Asks for the cache line at `at`, which need not be readable.
    fn prefetch(self, at: *const u8);
}
