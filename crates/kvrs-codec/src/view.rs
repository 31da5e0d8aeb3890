//! Borrowed strided tensors `[batch, heads, tokens, channels]`, read and written one row at a time.

use half::{bf16, f16};
use kvrs_core::{Error, Result};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Bytes of an element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name that Python uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// The dtype of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|d| d.name() == name)
    }
}

/// Where the elements of a strided tensor lie inside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Element type.
    pub dtype: Dtype,
    /// Extents `[batch, heads, tokens, channels]`.
    pub shape: [usize; 4],
    /// Strides in elements; may be negative or zero.
    pub strides: [isize; 4],
    /// Byte offset of element `[0, 0, 0, 0]`.
    pub start: usize,
}

impl Geometry {
    /// Row-major contiguous elements from the first byte on.
    #[must_use]
    pub fn contiguous(dtype: Dtype, shape: [usize; 4]) -> Self {
        let [_, h, t, d] = shape;
        let strides = [h * t * d, t * d, d, 1].map(|s| s as isize);
        Self { dtype, shape, strides, start: 0 }
    }

    fn check(&self, what: &str, len: usize) -> Result<()> {
        if self.shape.contains(&0) {
            return Ok(());
        }
        let (mut low, mut high) = (self.start as i128, (self.start + self.dtype.size()) as i128);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (extent as i128 - 1) * stride as i128 * self.dtype.size() as i128;
            if reach < 0 { low += reach } else { high += reach }
        }
        if low < 0 || high > len as i128 {
            let got = format!("{:?} with strides {:?}, bytes {low}..{high}", self.shape, self.strides);
            return Err(Error::shape(what, got, format!("a tensor inside its {len} bytes")));
        }
        Ok(())
    }

    fn at(&self, index: [usize; 4]) -> usize {
        let steps: isize = index.iter().zip(self.strides).map(|(&i, s)| i as isize * s).sum();
        self.start.wrapping_add_signed(steps * self.dtype.size() as isize)
    }
}

/// A tensor to read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    bytes: &'a [u8],
    geometry: Geometry,
}

impl<'a> View<'a> {
    /// A tensor inside `bytes`; `what` names it in the error.
    ///
    /// # Errors
    /// [`Error::Shape`] if an element would lie outside `bytes`.
    pub fn new(what: &str, bytes: &'a [u8], geometry: Geometry) -> Result<Self> {
        geometry.check(what, bytes.len())?;
        Ok(Self { bytes, geometry })
    }

    /// Extents `[batch, heads, tokens, channels]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.geometry.shape
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype
    }

    /// Copies the channels of `[batch, head, token]` into `out` as f32, exactly.
    ///
    /// # Panics
    /// If an index is outside the shape or `out` is not one row long.
    pub fn read_row(&self, [b, h, t]: [usize; 3], out: &mut [f32]) {
        let g = &self.geometry;
        let [batch, heads, tokens, channels] = g.shape;
        assert!(b < batch && h < heads && t < tokens && out.len() == channels, "row inside the view");
        if g.strides[3] == 1 {
            let at = g.at([b, h, t, 0]);
            read_contiguous(g.dtype, &self.bytes[at..at + channels * g.dtype.size()], out);
        } else {
            for (c, x) in out.iter_mut().enumerate() {
                let at = g.at([b, h, t, c]);
                read_contiguous(g.dtype, &self.bytes[at..at + g.dtype.size()], std::slice::from_mut(x));
            }
        }
    }
}

/// A tensor to fill.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: &'a mut [u8],
    geometry: Geometry,
}

impl<'a> ViewMut<'a> {
    /// A tensor inside `bytes`; `what` names it in the error.
    ///
    /// # Errors
    /// [`Error::Shape`] if an element would lie outside `bytes` or two elements would share bytes.
    pub fn new(what: &str, bytes: &'a mut [u8], geometry: Geometry) -> Result<Self> {
        geometry.check(what, bytes.len())?;
        if geometry.shape.contains(&0) {
            return Ok(Self { bytes, geometry });
        }
        let mut axes: Vec<_> = geometry.shape.iter().zip(geometry.strides).filter(|(n, _)| **n > 1).collect();
        axes.sort_by_key(|(_, s)| s.unsigned_abs());
        let mut reach = 1;
        for (&extent, stride) in axes {
            if stride.unsigned_abs() < reach {
                let got = format!("{:?} with strides {:?}", geometry.shape, geometry.strides);
                return Err(Error::shape(what, got, "a tensor whose elements do not overlap"));
            }
            reach += stride.unsigned_abs() * (extent - 1);
        }
        Ok(Self { bytes, geometry })
    }

    /// Extents `[batch, heads, tokens, channels]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.geometry.shape
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype
    }

    /// Writes the channels of `[batch, head, token]`, rounded to nearest even.
    ///
    /// # Panics
    /// If an index is outside the shape or `row` is not one row long.
    pub fn write_row(&mut self, [b, h, t]: [usize; 3], row: &[f32]) {
        let g = self.geometry;
        let [batch, heads, tokens, channels] = g.shape;
        assert!(b < batch && h < heads && t < tokens && row.len() == channels, "row inside the view");
        for (c, &x) in row.iter().enumerate() {
            let at = g.at([b, h, t, c]);
            let to = &mut self.bytes[at..at + g.dtype.size()];
            match g.dtype {
                Dtype::F32 => to.copy_from_slice(&x.to_le_bytes()),
                Dtype::F16 => to.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                Dtype::Bf16 => to.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            }
        }
    }
}

fn read_contiguous(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => read_elements(bytes, out, f32::from_le_bytes),
        Dtype::F16 => read_elements(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        Dtype::Bf16 => read_elements(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
    }
}

fn read_elements<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (x, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *x = value(*b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect()
    }

    #[test]
    fn a_transposed_view_reads_the_same_elements() {
        let data = bytes(2 * 3 * 4);
        let g = Geometry { strides: [24, 4, 8, 1], ..Geometry::contiguous(Dtype::F32, [1, 2, 3, 4]) };
        let mut row = [0.0; 4];
        View::new("k", &data, g).unwrap().read_row([0, 1, 2], &mut row);
        assert_eq!(row, [20.0, 21.0, 22.0, 23.0]);
    }

    #[test]
    fn negative_strides_read_backwards() {
        let data = bytes(4);
        let g =
            Geometry { strides: [4, 4, 4, -1], start: 12, ..Geometry::contiguous(Dtype::F32, [1, 1, 1, 4]) };
        let mut row = [0.0; 4];
        View::new("k", &data, g).unwrap().read_row([0, 0, 0], &mut row);
        assert_eq!(row, [3.0, 2.0, 1.0, 0.0]);
    }

    #[test]
    fn a_view_outside_its_bytes_is_refused() {
        let data = bytes(4);
        let g = Geometry::contiguous(Dtype::F32, [1, 1, 2, 4]);
        assert!(View::new("k", &data, g).unwrap_err().to_string().starts_with("k has shape"));
    }

    #[test]
    fn overlapping_output_is_refused() {
        let mut data = bytes(8);
        let g = Geometry { strides: [8, 8, 0, 1], ..Geometry::contiguous(Dtype::F32, [1, 1, 2, 4]) };
        assert!(ViewMut::new("out", &mut data, g).is_err());
    }

    #[test]
    fn output_without_elements_overlaps_nowhere() {
        let g = Geometry::contiguous(Dtype::F32, [1, 4, 0, 32]);
        assert!(ViewMut::new("out", &mut [], g).is_ok());
    }
}
