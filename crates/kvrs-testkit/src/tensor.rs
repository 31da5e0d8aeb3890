//! Owned tensors `[batch, heads, tokens, channels]` and the random numbers to fill them with.

use half::{bf16, f16};
use kvrs::{Dtype, Geometry, View, ViewMut};

/// Random numbers that no rotation is made of: a Weyl sequence, hashed.
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// A stream of its own for each seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5bf0_3635_dcb6_1f27)
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0xa076_1d64_78bd_642f);
        let x = (self.0 ^ (self.0 >> 32)).wrapping_mul(0xe703_7ed1_a0b4_28db);
        (x ^ (x >> 29)).wrapping_mul(0x8ebc_6af0_9c88_c6e3) ^ (x >> 32)
    }

    /// A number in 0..1.
    pub fn uniform(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A whole number in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    /// A standard gaussian number (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }
}

/// A contiguous tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    dtype: Dtype,
    shape: [usize; 4],
    bytes: Vec<u8>,
}

impl Tensor {
    /// The numbers `values`, row-major, rounded to `dtype`.
    ///
    /// # Panics
    /// If there are more or fewer numbers than `shape` has elements.
    #[must_use]
    pub fn new(dtype: Dtype, shape: [usize; 4], values: &[f32]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "one number per element of {shape:?}");
        let mut bytes = Vec::with_capacity(values.len() * dtype.size());
        for &x in values {
            match dtype {
                Dtype::F32 => bytes.extend(x.to_le_bytes()),
                Dtype::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
                Dtype::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
            }
        }
        Self { dtype, shape, bytes }
    }

    /// Zeros.
    #[must_use]
    pub fn zeros(dtype: Dtype, shape: [usize; 4]) -> Self {
        Self { dtype, shape, bytes: vec![0; shape.iter().product::<usize>() * dtype.size()] }
    }

    /// Standard gaussian numbers.
    #[must_use]
    pub fn normal(dtype: Dtype, shape: [usize; 4], noise: &mut Noise) -> Self {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| noise.normal()).collect();
        Self::new(dtype, shape, &values)
    }

    /// Extents `[batch, heads, tokens, channels]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The tensor to read.
    ///
    /// # Panics
    /// Never: a tensor lies inside its own bytes.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        let geometry = Geometry::contiguous(self.dtype, self.shape);
        View::new("tensor", &self.bytes, geometry).expect("a tensor lies inside its own bytes")
    }

    /// The tensor to fill.
    ///
    /// # Panics
    /// Never: a tensor lies inside its own bytes.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let geometry = Geometry::contiguous(self.dtype, self.shape);
        ViewMut::new("tensor", &mut self.bytes, geometry).expect("a tensor lies inside its own bytes")
    }

    /// The channels of `[batch, head, token]`.
    #[must_use]
    pub fn row(&self, at: [usize; 3]) -> Vec<f32> {
        let mut row = vec![0.0; self.shape[3]];
        self.view().read_row(at, &mut row);
        row
    }

    /// Overwrites the channels of `[batch, head, token]`.
    pub fn set_row(&mut self, at: [usize; 3], row: &[f32]) {
        self.view_mut().write_row(at, row);
    }

    /// Columns `from..to` of the tokens.
    #[must_use]
    pub fn columns(&self, from: usize, to: usize) -> Self {
        let [b, h, _, d] = self.shape;
        self.gather([b, h, to - from, d], |[b, h, t]| [b, h, from + t])
    }

    /// One row of the batch.
    #[must_use]
    pub fn batch_row(&self, row: usize) -> Self {
        let [_, h, t, d] = self.shape;
        self.gather([1, h, t, d], |[_, h, t]| [row, h, t])
    }

    /// A tensor whose `[batch, head, token]` is this one's `from` of it.
    fn gather(&self, shape: [usize; 4], from: impl Fn([usize; 3]) -> [usize; 3]) -> Self {
        let mut out = Self::zeros(self.dtype, shape);
        for (b, h, t) in
            (0..shape[0]).flat_map(|b| (0..shape[1]).flat_map(move |h| (0..shape[2]).map(move |t| (b, h, t))))
        {
            out.set_row([b, h, t], &self.row(from([b, h, t])));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let mut noise = Noise::new(3);
        let x: Vec<f64> = (0..20_000).map(|_| f64::from(noise.normal())).collect();
        let mean = x.iter().sum::<f64>() / 20_000.0;
        let variance = x.iter().map(|x| x * x).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn columns_and_rows_of_a_batch_are_cut_out() {
        let values: Vec<f32> = (0..2 * 3 * 4 * 5).map(|i| i as f32).collect();
        let x = Tensor::new(Dtype::F16, [2, 3, 4, 5], &values);
        assert_eq!(x.columns(1, 3).row([1, 2, 0]), x.row([1, 2, 1]));
        assert_eq!(x.batch_row(1).row([0, 1, 3]), x.row([1, 1, 3]));
    }
}
