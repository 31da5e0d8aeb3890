//! Sums of f32 lanes: what every codec can do, also those that no integer kernel serves.

use super::Simd;

/// Rows of weights against rows of 16 lanes.
pub(crate) struct LaneArgs<'a> {
    /// Row q starts at `q * stride`.
    pub(crate) weights: &'a [f32],
    pub(crate) stride: usize,
    /// One per weight.
    pub(crate) lanes: &'a [[f32; 16]],
    /// Row q of the sums lies at `q * to_stride`.
    pub(crate) to: &'a mut [f32],
    pub(crate) to_stride: usize,
    pub(crate) rows: usize,
}

/// `to[q][lane] += sum over i of weights[q][i] * lanes[i][lane]`.
#[inline(always)]
pub(crate) fn add_sums<S: Simd>(s: S, args: &mut LaneArgs<'_>) {
    let mut row = 0;
    while row + 4 <= args.rows {
        block::<S, 4>(s, args, row);
        row += 4;
    }
    while row < args.rows {
        block::<S, 1>(s, args, row);
        row += 1;
    }
}

#[inline(always)]
fn block<S: Simd, const R: usize>(s: S, args: &mut LaneArgs<'_>, row: usize) {
    let weights: [&[f32]; R] =
        core::array::from_fn(|r| &args.weights[(row + r) * args.stride..][..args.lanes.len()]);
    let mut sums = [[s.splat_f(0.0); R]; 2];
    for (i, lanes) in args.lanes.iter().enumerate() {
        for half in 0..S::HALVES {
            let x = s.load_f(lanes, half);
            for r in 0..R {
                sums[half][r] = s.mul_add(x, s.splat_f(weights[r][i]), sums[half][r]);
            }
        }
    }
    for r in 0..R {
        let to = args.to[(row + r) * args.to_stride..].first_chunk_mut::<16>().expect("16 lanes per row");
        for half in 0..S::HALVES {
            s.store_f(s.add(s.load_f(to, half), sums[half][r]), to, half);
        }
    }
}
