//! Random layers and stores, and attention by its definition in f64.
#![allow(dead_code, clippy::unwrap_used)] // every test binary uses a part, and tests may panic

pub(crate) mod case;
pub(crate) mod exact;
pub(crate) mod layer;
pub(crate) mod pages;
pub(crate) mod specs;

use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, View};

/// `SplitMix64`.
#[derive(Debug, Clone)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    /// Uniform in -1..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 2f32.powi(23) - 1.0
    }

    pub(crate) fn vector(&mut self, n: usize, factor: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * factor).collect()
    }
}

/// A contiguous f32 tensor.
pub(crate) struct Tensor {
    pub(crate) shape: [usize; 4],
    bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn random(rng: &mut Rng, shape: [usize; 4], factor: f32) -> Self {
        Self::of(shape, &rng.vector(shape.iter().product(), factor))
    }

    pub(crate) fn of(shape: [usize; 4], values: &[f32]) -> Self {
        Self { shape, bytes: values.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View::new("x", &self.bytes, Geometry::contiguous(Dtype::F32, self.shape)).unwrap()
    }

    pub(crate) fn row(&self, at: [usize; 3]) -> Vec<f32> {
        let mut row = vec![0.0; self.shape[3]];
        self.view().read_row(at, &mut row);
        row
    }
}
