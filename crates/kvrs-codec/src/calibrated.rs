//! Arrays that calibration measured and codecs are built from.

use kvrs_core::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Numbers with their shape.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Extents, row-major.
    pub shape: Vec<usize>,
    /// The numbers.
    pub values: Arc<[f32]>,
}

/// Arrays by name, `SIDE.LAYER.GROUP.ARRAY` with SIDE `keys` or `values` and GROUP a group of key-value heads.
pub type Arrays = BTreeMap<String, Array>;

impl Array {
    /// Numbers of that shape.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the array, if the shape is of another size or a number is not finite.
    pub fn new(name: &str, shape: Vec<usize>, values: Arc<[f32]>) -> Result<Self> {
        let size = shape.iter().try_fold(1usize, |size, extent| size.checked_mul(*extent));
        if size != Some(values.len()) {
            let got = format!("{} numbers of shape {shape:?}", values.len());
            return Err(Error::plan(name, got, "one number for each place"));
        }
        match values.iter().find(|x| !x.is_finite()) {
            Some(bad) => Err(Error::plan(name, bad, "finite numbers")),
            None => Ok(Self { shape, values }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_hold_what_their_shape_says() {
        let array = |shape: &[usize], values: &[f32]| Array::new("a", shape.to_vec(), values.into());
        assert_eq!(array(&[2, 2], &[1.0; 4]).unwrap().values.len(), 4);
        assert!(
            array(&[2, 3], &[1.0; 4]).unwrap_err().to_string().contains("a is 4 numbers of shape [2, 3]")
        );
        assert!(array(&[usize::MAX, 3], &[1.0; 4]).is_err());
        assert!(array(&[1], &[f32::INFINITY]).unwrap_err().to_string().contains("a is inf"));
    }
}
