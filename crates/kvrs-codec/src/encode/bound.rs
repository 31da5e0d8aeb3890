//! One scale a token beside a second number: how far inner products may be off.

use super::{Encode, EncodeContext, ScaledEncoder, Scratch};
use crate::scale::{self, red16_products};

/// Index of the per-token number that an error bound is taken from.
pub const BOUND_SCALE: u32 = 1;

/// [`ScaledEncoder`] with unbiased scales, and a bound per token in the scales that no run reads.
///
/// With `o` the direction of a vector and `o'` that of its codes, the number is
/// `length * sqrt((1 - <o', o>^2) / <o', o>^2) / sqrt(d - 1)` (`RaBitQ`, Gao et al., 2024, arXiv:2405.12497, theorem 3.2).
#[derive(Debug, Clone)]
pub struct BoundEncoder(pub ScaledEncoder);

impl Encode for BoundEncoder {
    fn encode(
        &self,
        context: &EncodeContext<'_>,
        rows: &[f32],
        positions: &[i64],
        page: &mut [u8],
        slot: usize,
    ) {
        let (mut scratch, live) = (Scratch::new(context), context.codec.transform.live());
        context.by_rows(rows, positions, page, slot, |x, codes, page, slot| {
            let scale = self.0.row(context, x, &mut scratch, codes);
            context.write_scale(page, 0, slot, scale);
            let bound = bound(x, &scratch.u[..live], &mut scratch.v[..live]);
            context.write_scale(page, BOUND_SCALE, slot, bound);
        });
    }
}

/// The bound of `x`, whose channels of unit variance are `u` and their codes' values `v`; overwrites `v`.
///
/// The ratio is the length of what the unbiased codes `v (u.u) / (u.v)` miss, over that of `u`: no difference of large
/// numbers is taken.
fn bound(x: &[f32], u: &[f32], v: &mut [f32]) -> f32 {
    let length = scale::norm(x).length;
    if length == 0.0 {
        return 0.0;
    }
    let (square, along) = (red16_products(u, u), red16_products(u, v));
    if along <= 0.0 {
        return f32::INFINITY;
    }
    let factor = square / along;
    v.iter_mut().zip(u).for_each(|(v, u)| *v = *v * factor - u);
    let missed = red16_products(v, v);
    let inverse_root = (1.0 / ((x.len() - 1) as f64).sqrt()) as f32;
    (length * (missed / square).sqrt()) * inverse_root
}
