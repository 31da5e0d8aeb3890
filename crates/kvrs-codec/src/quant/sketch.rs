//! Sketches: random projections of which only signs are kept (QJL, Zandieh et al., 2024, arXiv:2406.03482).
//!
//! For rows `s` of a random matrix whose law no rotation changes, `E[s sign(s.r)]` is a multiple of `r / |r|`. So the
//! sum of rows, each with its sign, times `|r|` and a constant is an unbiased estimate of `r`.

use super::{ConstantCache, SideContext};
use crate::desc::{Arith, Elem, RunDesc};
use crate::rng;
use crate::transform::Transform;

/// Levels of the two signs.
pub(super) const LEVELS: [i8; 2] = [-1, 1];
/// In keys of cached constants: behind every purpose of a random stream.
const BEHIND_ROTATION: u64 = 1 << 32;

/// The law of a sketch's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Independent gaussian numbers.
    Gaussian = 0,
    /// The rows of an orthogonal matrix: less variance (one bit: .565 of the squared length instead of 1.565).
    Orthogonal = 1,
}

impl Kind {
    /// What makes the signed sum of `rows` rows of `d` numbers an unbiased estimate of a unit vector: the inverse of
    /// their number and of the mean magnitude of one coordinate.
    pub(super) fn step(self, rows: usize, d: usize) -> f32 {
        let magnitude = match self {
            Self::Gaussian => (2.0 / std::f64::consts::PI).sqrt(),
            Self::Orthogonal => coordinate_magnitude(d),
        };
        (1.0 / (rows as f64 * magnitude)) as f32
    }
}

/// `E|u_1|` of a unit vector in `d` dimensions: `G(d/2) / (sqrt(pi) G((d + 1)/2))`, by the product of neighbours.
fn coordinate_magnitude(d: usize) -> f64 {
    let first = std::f64::consts::PI.sqrt();
    let ratio = (1..d).fold(first, |ratio, d| 2.0 / (d as f64 * ratio));
    ratio / first
}

/// A gaussian sketch of `rows` rows, a multiple of 16 with the zero rows behind them.
pub(super) fn gaussian(rows: usize, context: &SideContext<'_>, cache: &mut ConstantCache) -> Transform {
    let (d, n) = (context.d, rows.next_multiple_of(16));
    let matrix = cache.floats(rng::SKETCH + 256 * rows as u64, context, |key| {
        let mut matrix: Vec<f32> = rng::gaussian(key, rows * d).iter().map(|&x| x as f32).collect();
        matrix.resize(n * d, 0.0);
        matrix
    });
    Transform::Dense { matrix, d, n }
}

/// A sketch of as many rows as channels.
pub(super) fn square(kind: Kind, context: &SideContext<'_>, cache: &mut ConstantCache) -> Transform {
    let (d, n) = (context.d, context.d.next_multiple_of(16));
    if kind == Kind::Gaussian {
        return gaussian(d, context, cache);
    }
    let matrix = cache.floats(rng::ORTHOGONAL_SKETCH, context, |key| {
        let mut matrix = rng::dense_rotation(key, d);
        matrix.resize(n * d, 0.0);
        matrix
    });
    Transform::Dense { matrix, d, n }
}

/// The rotation, then the sketch of rotated channels, as one matrix for queries and outputs.
pub(super) fn behind(
    rotation: &Transform,
    sketch: &Transform,
    (kind, dense): (Kind, bool),
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
) -> Transform {
    let key = BEHIND_ROTATION + 2 * u64::from(dense) + kind as u64;
    let matrix = cache.floats(key, context, |_| product(rotation, sketch));
    Transform::Dense { matrix, d: context.d, n: rotation.n() + sketch.n() }
}

/// `[P; S P]`, with sums in f64.
fn product(rotation: &Transform, sketch: &Transform) -> Vec<f32> {
    let (d, mut all) = (rotation.d(), rows(rotation));
    let (live, s) = (all[..d * d].to_vec(), rows(sketch));
    for row in s.chunks_exact(d) {
        let mut sums = vec![0.0; d];
        for (&s, p) in row.iter().zip(live.chunks_exact(d)) {
            sums.iter_mut().zip(p).for_each(|(sum, &p)| *sum += f64::from(s) * f64::from(p));
        }
        all.extend(sums.iter().map(|&x| x as f32));
    }
    all
}

/// A transform as a matrix `[n][d]`.
fn rows(transform: &Transform) -> Vec<f32> {
    let (d, n) = (transform.d(), transform.n());
    let (mut matrix, mut column) = (vec![0.0; n * d], vec![0.0; n]);
    for c in 0..d {
        let axis: Vec<f32> = (0..d).map(|i| f32::from(u8::from(i == c))).collect();
        transform.prepare(&axis, &mut column);
        column.iter().enumerate().for_each(|(r, x)| matrix[r * d + c] = *x);
    }
    matrix
}

/// The run of a sketch of `channels` stored rows that is alone in its tile.
pub(super) fn run(channels: usize, vec_at: usize, step: f32) -> RunDesc {
    RunDesc {
        width: 1,
        elem: Elem::Lut8,
        arith: Arith::I8,
        scale: 0,
        channels: channels as u32,
        vec_at: vec_at as u32,
        at: 0,
        lut_at: 0,
        step,
        zero: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_magnitude_of_a_coordinate_is_that_of_the_sphere() {
        // On the circle 2 / pi, on the sphere 1 / 2, and sqrt(2 / (pi d)) in the limit.
        assert!((coordinate_magnitude(2) - 2.0 / std::f64::consts::PI).abs() < 1e-15);
        assert!((coordinate_magnitude(3) - 0.5).abs() < 1e-15);
        let limit = (2.0 / std::f64::consts::PI / 4096.0).sqrt();
        assert!((coordinate_magnitude(4096) / limit - 1.0 - 0.25 / 4096.0).abs() < 1e-7);
    }
}
