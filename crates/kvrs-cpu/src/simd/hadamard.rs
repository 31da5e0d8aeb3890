//! Rounds of signs and Walsh-Hadamard: of one vector with its channels in lanes (queries, outputs), and of 16 tokens
//! side by side (encoding).
//!
//! Every element takes the additions of `kvrs_codec::transform` in their order, h = 1, 2, 4 .. d/2, and multiplications
//! only by signs and powers of two, so the results are equal bit for bit. The factor that follows a round is
//! multiplied with the signs of the next one, which changes no bit.

use super::Simd;
use kvrs_codec::transform::ROUNDS;

/// Sums of lanes of one vector.
pub(crate) trait Butterfly: Simd {
    /// `x[i] + x[i ^ H]` in lanes `i` whose bit `H` is clear, `x[i ^ H] - x[i]` in the others; `H` is a power of two
    /// below [`Simd::LANES`].
    fn butterfly<const H: usize>(self, x: Self::F) -> Self::F;
}

/// Factor between rounds: `2^-floor(log2 d / 2)`.
fn between_rounds(d: usize) -> f32 {
    1.0 / (1u32 << (d.ilog2() / 2)) as f32
}

/// The signs `[rounds][chunk]` of `x`, whole vectors of `d` channels.
fn rounds<'a>(signs: &'a [f32], d: usize, x: &[[f32; 16]]) -> &'a [[f32; 16]] {
    assert!(d.is_power_of_two() && d >= 16, "the rotation is for powers of two from 16 on");
    assert!(signs.len() == ROUNDS * d && x.len().is_multiple_of(d / 16), "signs and vectors of {d} channels");
    signs.as_chunks().0
}

/// Rotates each vector of `d` channels in `x` `[vectors][d / 16]`: signs, then an unnormalised transform, three times,
/// with `2^-floor(log2 d / 2)` in between.
#[inline(always)]
pub(crate) fn hadamard<S: Butterfly>(s: S, signs: &[f32], d: usize, x: &mut [[f32; 16]]) {
    let (signs, between) = (rounds(signs, d, x), between_rounds(d));
    for x in x.chunks_exact_mut(d / 16) {
        for (r, signs) in signs.chunks_exact(d / 16).enumerate() {
            multiply(s, signs, if r > 0 { between } else { 1.0 }, x);
            for chunk in &mut *x {
                within(s, chunk);
            }
            across(s, x);
        }
    }
}

/// The transpose of [`hadamard`].
#[inline(always)]
pub(crate) fn hadamard_transposed<S: Butterfly>(s: S, signs: &[f32], d: usize, x: &mut [[f32; 16]]) {
    let (signs, between) = (rounds(signs, d, x), between_rounds(d));
    for x in x.chunks_exact_mut(d / 16) {
        for (r, signs) in signs.chunks_exact(d / 16).enumerate().rev() {
            for chunk in &mut *x {
                within(s, chunk);
            }
            across(s, x);
            multiply(s, signs, if r > 0 { between } else { 1.0 }, x);
        }
    }
}

/// Multiplies `x` by signs times `factor`.
#[inline(always)]
fn multiply<S: Simd>(s: S, signs: &[[f32; 16]], factor: f32, x: &mut [[f32; 16]]) {
    let factor = s.splat_f(factor);
    for (x, signs) in x.iter_mut().zip(signs) {
        for half in 0..S::HALVES {
            let signs = s.mul(s.load_f(signs, half), factor);
            s.store_f(s.mul(s.load_f(x, half), signs), x, half);
        }
    }
}

/// Stages h = 1, 2, 4, 8 of a chunk.
#[inline(always)]
fn within<S: Butterfly>(s: S, chunk: &mut [f32; 16]) {
    let mut v = [s.splat_f(0.0); 2];
    for half in 0..S::HALVES {
        let x = s.butterfly::<2>(s.butterfly::<1>(s.load_f(chunk, half)));
        v[half] = s.butterfly::<4>(x);
    }
    if S::HALVES == 2 {
        v = [s.add(v[0], v[1]), s.sub(v[0], v[1])];
    } else {
        v[0] = s.butterfly::<8>(v[0]);
    }
    for half in 0..S::HALVES {
        s.store_f(v[half], chunk, half);
    }
}

/// All stages between chunks: an unnormalised transform of `x.len()` elements in every lane.
#[inline(always)]
fn across<S: Simd>(s: S, x: &mut [[f32; 16]]) {
    let mut h = 1;
    while h < x.len() {
        h *= next_pass(s, x, h, None);
    }
}

/// One pass over `x` for up to four stages from distance `h` on: the product of their radices.
///
/// Eight vectors fit in registers, sixteen nearly. The distance 8 is written out since all dimensions from 64 on have
/// it: places at constant distances need no registers.
#[inline(always)]
fn next_pass<S: Simd>(s: S, x: &mut [[f32; 16]], h: usize, signs: Option<&[f32]>) -> usize {
    match (x.len() / h, h) {
        (2, _) => pass::<S, 2>(s, x, h, signs),
        (4, _) => pass::<S, 4>(s, x, h, signs),
        (16, 8) => pass::<S, 16>(s, x, 8, signs),
        (16, _) => pass::<S, 16>(s, x, h, signs),
        (_, 1) => pass::<S, 8>(s, x, 1, signs),
        (_, 8) => pass::<S, 8>(s, x, 8, signs),
        _ => pass::<S, 8>(s, x, h, signs),
    }
}

/// Stages h, 2 h .. R h / 2; with `signs` (h = 1), element i is first multiplied by sign i.
#[inline(always)]
fn pass<S: Simd, const R: usize>(s: S, x: &mut [[f32; 16]], h: usize, signs: Option<&[f32]>) -> usize {
    for (b, block) in x.chunks_exact_mut(R * h).enumerate() {
        for i in 0..h {
            for half in 0..S::HALVES {
                let mut v = [s.splat_f(0.0); R];
                for k in 0..R {
                    v[k] = s.load_f(&block[i + k * h], half);
                }
                if let Some(signs) = signs {
                    let signs = &signs[b * R..][..R];
                    for k in 0..R {
                        v[k] = s.mul(v[k], s.splat_f(signs[k]));
                    }
                }
                stages(s, &mut v);
                for k in 0..R {
                    s.store_f(v[k], &mut block[i + k * h], half);
                }
            }
        }
    }
    R
}

/// An unnormalised transform of `R` vectors.
#[inline(always)]
fn stages<S: Simd, const R: usize>(s: S, v: &mut [S::F; R]) {
    let mut h = 1;
    while h < R {
        for i in 0..R {
            if i & h == 0 {
                (v[i], v[i + h]) = (s.add(v[i], v[i + h]), s.sub(v[i], v[i + h]));
            }
        }
        h *= 2;
    }
}

/// Rotates 16 tokens `[d][token]` as [`hadamard`] rotates one; `scaled` is working memory.
#[inline(always)]
pub(crate) fn hadamard_tokens<S: Simd>(s: S, signs: &[f32], x: &mut [[f32; 16]], scaled: &mut Vec<f32>) {
    let (d, between) = (x.len(), between_rounds(x.len()));
    scaled.clear();
    scaled.extend_from_slice(signs);
    scaled[d..].iter_mut().for_each(|sign| *sign *= between);
    for signs in scaled.chunks_exact(d) {
        let mut h = next_pass(s, x, 1, Some(signs));
        while h < d {
            h *= next_pass(s, x, h, None);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::simd::model::Model;
    use kvrs_codec::rng;
    use kvrs_codec::transform::Transform;

    impl<const LANES: usize> Butterfly for Model<LANES> {
        fn butterfly<const H: usize>(self, x: [f32; LANES]) -> [f32; LANES] {
            assert!(H < LANES);
            std::array::from_fn(|i| if i & H == 0 { x[i] + x[i ^ H] } else { x[i ^ H] - x[i] })
        }
    }

    fn vector(key: u64, n: usize) -> Vec<[f32; 16]> {
        let x: Vec<f32> = rng::gaussian(key, n).iter().map(|&v| v as f32).collect();
        x.as_chunks().0.to_vec()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    fn signs(d: usize) -> Vec<f32> {
        rng::signs(9, ROUNDS, d)
    }

    /// Rotates, and rotates back, two vectors.
    type Rotate = fn(&[f32], usize, &mut [[f32; 16]], bool);

    pub(crate) fn rotate<S: Butterfly>(s: S, signs: &[f32], d: usize, x: &mut [[f32; 16]], back: bool) {
        if back { hadamard_transposed(s, signs, d, x) } else { hadamard(s, signs, d, x) }
    }

    fn sets() -> Vec<Rotate> {
        let mut sets: Vec<Rotate> =
            vec![|w, d, x, b| rotate(Model::<16>, w, d, x, b), |w, d, x, b| rotate(Model::<8>, w, d, x, b)];
        #[cfg(target_arch = "x86_64")]
        if crate::testing::require(crate::Isa::Avx2) {
            // SAFETY: the CPU has the instruction set.
            sets.push(|w, d, x, back| unsafe { crate::x86::encode::testing::rotate_avx2(w, d, x, back) });
        }
        #[cfg(target_arch = "x86_64")]
        if crate::testing::require(crate::Isa::Avx512) {
            // SAFETY: the CPU has the instruction set.
            sets.push(|w, d, x, back| unsafe { crate::x86::encode::testing::rotate_avx512(w, d, x, back) });
        }
        sets
    }

    #[test]
    fn every_set_rotates_as_the_scalar_code_bit_for_bit() {
        for d in [16usize, 32, 64, 128, 256, 512, 1024] {
            let transform = Transform::Hadamard { signs: signs(d).into(), d };
            let x = vector(d as u64, 2 * d);
            let mut expected = vec![0.0; 2 * d];
            for (x, y) in x.as_flattened().chunks(d).zip(expected.chunks_mut(d)) {
                transform.analyse(x, y);
            }
            for turn in sets() {
                let mut y = x.clone();
                turn(&signs(d), d, &mut y, false);
                assert_eq!(bits(y.as_flattened()), bits(&expected), "{d} channels");
            }
        }
    }

    #[test]
    fn the_transpose_finishes_outputs_as_the_scalar_code_bit_for_bit() {
        for d in [16usize, 32, 64, 128, 256, 512, 1024] {
            let transform = Transform::Hadamard { signs: signs(d).into(), d };
            let factor = transform.unit_factor() / (d as f32).sqrt();
            let x = vector(d as u64, 2 * d);
            let mut expected = vec![0.0; 2 * d];
            for (x, y) in x.as_flattened().chunks(d).zip(expected.chunks_mut(d)) {
                transform.finish(x, y);
            }
            for turn in sets() {
                let mut y = x.clone();
                turn(&signs(d), d, &mut y, true);
                let y: Vec<f32> = y.as_flattened().iter().map(|v| 0.0 + v * factor).collect();
                assert_eq!(bits(&y), bits(&expected), "{d} channels");
            }
        }
    }

    #[test]
    fn tokens_side_by_side_rotate_as_one() {
        for d in [16usize, 32, 64, 128, 256, 512, 1024] {
            let transform = Transform::Hadamard { signs: signs(d).into(), d };
            let x = vector(3, 16 * d);
            let mut y = x.clone();
            hadamard_tokens(Model::<8>, &signs(d), &mut y, &mut Vec::new());
            for token in 0..16 {
                let column = |x: &[[f32; 16]]| x.iter().map(|c| c[token]).collect::<Vec<_>>();
                let mut expected = vec![0.0; d];
                transform.analyse(&column(&x), &mut expected);
                assert_eq!(bits(&column(&y)), bits(&expected), "{d} channels, token {token}");
            }
        }
    }
}
