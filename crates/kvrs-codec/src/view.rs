//! Borrowed strided tensors `[batch, heads, tokens, channels]`, read and written one row at a time.

mod elements;
mod place;

pub use place::{DeviceBytes, Place};

use elements::PART;
use kvrs_core::{Error, Result};
use place::{Memory, MemoryMut};

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

    /// Largest magnitude of an element that a window of this type holds: finite, and small enough to be squared and
    /// summed in f32 by encoding.
    #[must_use]
    pub fn largest_stored(self) -> f32 {
        match self {
            Self::F16 => 65504.0,
            Self::F32 | Self::Bf16 => 2.9e17, // 2^58
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
    memory: Memory<'a>,
    geometry: Geometry,
}

impl<'a> View<'a> {
    /// A tensor inside `bytes`; `what` names it in the error.
    ///
    /// # Errors
    /// [`Error::Shape`] if an element would lie outside `bytes`.
    pub fn new(what: &str, bytes: &'a [u8], geometry: Geometry) -> Result<Self> {
        geometry.check(what, bytes.len())?;
        Ok(Self { memory: Memory::Host(bytes), geometry })
    }

    /// A tensor inside device memory, which only kernels read.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn on_device(what: &str, bytes: DeviceBytes<'a>, geometry: Geometry) -> Result<Self> {
        geometry.check(what, bytes.len())?;
        Ok(Self { memory: Memory::Device(bytes), geometry })
    }

    /// Extents `[batch, heads, tokens, channels]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.geometry.shape
    }

    /// Strides in elements.
    #[must_use]
    pub fn strides(&self) -> [isize; 4] {
        self.geometry.strides
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype
    }

    /// Where its memory is.
    #[must_use]
    pub fn place(&self) -> Place {
        self.memory.place()
    }

    /// Address of element `[0, 0, 0, 0]` where its memory is.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address() + self.geometry.start as u64
    }

    /// The bytes; kernels alone reach those of a device.
    fn bytes(&self) -> &'a [u8] {
        self.memory.host()
    }

    /// Copies the channels of `[batch, head, token]` into `out` as f32, exactly.
    ///
    /// # Panics
    /// If an index is outside the shape or `out` is not one row long.
    pub fn read_row(&self, [b, h, t]: [usize; 3], out: &mut [f32]) {
        let g = &self.geometry;
        let [batch, heads, tokens, channels] = g.shape;
        assert!(b < batch && h < heads && t < tokens && out.len() == channels, "row inside the view");
        self.read_channels([b, h, t], 0, out);
    }

    /// Copies `out.len()` channels from `first` on.
    fn read_channels(&self, [b, h, t]: [usize; 3], first: usize, out: &mut [f32]) {
        let g = &self.geometry;
        if g.strides[3] == 1 {
            let at = g.at([b, h, t, first]);
            elements::read(g.dtype, &self.bytes()[at..at + out.len() * g.dtype.size()], out);
        } else {
            for (c, x) in out.iter_mut().enumerate() {
                let at = g.at([b, h, t, first + c]);
                elements::read(g.dtype, &self.bytes()[at..at + g.dtype.size()], std::slice::from_mut(x));
            }
        }
    }

    /// Writes the channels of `[batch, head, token]` into `out` as little-endian `dtype`, rounded to nearest even.
    ///
    /// # Panics
    /// If an index is outside the shape or `out` is not one row of `dtype` long.
    pub fn copy_row(&self, index: [usize; 3], dtype: Dtype, out: &mut [u8]) {
        let g = &self.geometry;
        let ([b, h, t], [batch, heads, tokens, channels]) = (index, g.shape);
        assert!(b < batch && h < heads && t < tokens, "row inside the view");
        assert!(out.len() == channels * dtype.size(), "one row of bytes");
        if g.strides[3] == 1 && g.dtype == dtype {
            let at = g.at([b, h, t, 0]);
            out.copy_from_slice(&self.bytes()[at..at + out.len()]);
            return;
        }
        let mut values = [0.0; PART];
        for (i, out) in out.chunks_mut(PART * dtype.size()).enumerate() {
            let values = &mut values[..out.len() / dtype.size()];
            self.read_channels(index, i * PART, values);
            elements::write(dtype, values, out);
        }
    }

    /// [`View::copy_row`] of neighbouring tokens from `[batch, head, token]` on, as many as rows of `dtype` fill `out`.
    ///
    /// # Panics
    /// If an index is outside the shape or `out` is no whole number of rows of `dtype` long.
    pub fn copy_rows(&self, [b, h, t]: [usize; 3], dtype: Dtype, out: &mut [u8]) {
        let g = &self.geometry;
        let ([batch, heads, tokens, channels], row) = (g.shape, g.shape[3] * dtype.size());
        let rows = out.len() / row.max(1);
        assert!(
            b < batch && h < heads && t + rows <= tokens && out.len() == rows * row,
            "rows inside the view"
        );
        if g.strides[2..] == [channels as isize, 1] && g.dtype == dtype {
            let at = g.at([b, h, t, 0]);
            out.copy_from_slice(&self.bytes()[at..at + out.len()]);
        } else {
            for (token, out) in (t..).zip(out.chunks_exact_mut(row.max(1))) {
                self.copy_row([b, h, token], dtype, out);
            }
        }
    }

    /// Whether the magnitude of every channel of `[batch, head, token]` is at most `limit`; a NaN's is not.
    ///
    /// # Panics
    /// If an index is outside the shape.
    #[must_use]
    pub fn row_within(&self, [b, h, t]: [usize; 3], limit: f32) -> bool {
        let g = &self.geometry;
        let [batch, heads, tokens, channels] = g.shape;
        assert!(b < batch && h < heads && t < tokens, "row inside the view");
        let within = |first: usize, count: usize| {
            let at = g.at([b, h, t, first]);
            elements::within(g.dtype, &self.bytes()[at..at + count * g.dtype.size()], limit)
        };
        if g.strides[3] == 1 { within(0, channels) } else { (0..channels).all(|c| within(c, 1)) }
    }
}

/// A tensor to fill.
#[derive(Debug)]
pub struct ViewMut<'a> {
    memory: MemoryMut<'a>,
    geometry: Geometry,
}

impl<'a> ViewMut<'a> {
    /// A tensor inside `bytes`; `what` names it in the error.
    ///
    /// # Errors
    /// [`Error::Shape`] if an element would lie outside `bytes` or two elements would share bytes.
    pub fn new(what: &str, bytes: &'a mut [u8], geometry: Geometry) -> Result<Self> {
        Self::checked(what, bytes.len(), MemoryMut::Host(bytes), geometry)
    }

    /// A tensor inside device memory, which only kernels fill.
    ///
    /// # Errors
    /// As [`ViewMut::new`].
    pub fn on_device(what: &str, bytes: DeviceBytes<'a>, geometry: Geometry) -> Result<Self> {
        Self::checked(what, bytes.len(), MemoryMut::Device(bytes), geometry)
    }

    fn checked(what: &str, len: usize, memory: MemoryMut<'a>, geometry: Geometry) -> Result<Self> {
        geometry.check(what, len)?;
        if geometry.shape.contains(&0) {
            return Ok(Self { memory, geometry });
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
        Ok(Self { memory, geometry })
    }

    /// Extents `[batch, heads, tokens, channels]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 4] {
        self.geometry.shape
    }

    /// Strides in elements.
    #[must_use]
    pub fn strides(&self) -> [isize; 4] {
        self.geometry.strides
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.geometry.dtype
    }

    /// Where its memory is.
    #[must_use]
    pub fn place(&self) -> Place {
        self.memory.place()
    }

    /// Address of element `[0, 0, 0, 0]` where its memory is, for a kernel that fills it.
    #[must_use]
    pub fn address(&mut self) -> u64 {
        self.memory.address() + self.geometry.start as u64
    }

    /// Writes the channels of `[batch, head, token]`, rounded to nearest even.
    ///
    /// # Panics
    /// If an index is outside the shape or `row` is not one row long.
    pub fn write_row(&mut self, [b, h, t]: [usize; 3], row: &[f32]) {
        let g = self.geometry;
        let [batch, heads, tokens, channels] = g.shape;
        assert!(b < batch && h < heads && t < tokens && row.len() == channels, "row inside the view");
        if g.strides[3] == 1 {
            let at = g.at([b, h, t, 0]);
            elements::write(g.dtype, row, &mut self.memory.host()[at..at + row.len() * g.dtype.size()]);
        } else {
            for (c, x) in row.iter().enumerate() {
                let at = g.at([b, h, t, c]);
                let to = &mut self.memory.host()[at..at + g.dtype.size()];
                elements::write(g.dtype, std::slice::from_ref(x), to);
            }
        }
    }
}

#[cfg(test)]
mod tests;
