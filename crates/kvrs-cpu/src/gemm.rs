//! The matrix product behind a safe door.

/// A matrix inside a slice: element (i, j) stands at `i * row + j * column`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) column: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `row` elements, one after the other.
    pub(crate) fn rows(data: &'a [f32], row: usize) -> Self {
        Self { data, row, column: 1 }
    }

    /// The transpose.
    pub(crate) fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }
}

fn end(rows: usize, columns: usize, row: usize, column: usize) -> usize {
    if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row + (columns - 1) * column + 1 }
}

/// `c = a b + beta c` with `a` `[m, k]`, `b` `[k, n]` and `c` `[m, n]` in rows of `c_row` elements.
///
/// # Panics
/// If an element would lie outside its slice, or rows of `c` overlap.
pub(crate) fn product(
    [m, k, n]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    beta: f32,
    c: &mut [f32],
    c_row: usize,
) {
    assert!(end(m, k, a.row, a.column) <= a.data.len(), "a inside its slice");
    assert!(end(k, n, b.row, b.column) <= b.data.len(), "b inside its slice");
    assert!(end(m, n, c_row, 1) <= c.len() && n <= c_row, "c inside its slice");
    let stride = |s: usize| isize::try_from(s).expect("strides are bounded by slices");
    // SAFETY: all elements of a, b and c lie inside their slices (checked above), c's rows do not overlap, and c
    // is borrowed exclusively.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.data.as_ptr(),
            stride(a.row),
            stride(a.column),
            b.data.as_ptr(),
            stride(b.row),
            stride(b.column),
            beta,
            c.as_mut_ptr(),
            stride(c_row),
            1,
        );
    }
}
