//! The matrix product behind a safe door.

use kvrs_codec::transform::dot;

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

/// Products below which the packing of a matrix product costs more than it saves.
const SMALL: usize = 1 << 11;

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
    if m * k * n <= SMALL && a.column == 1 && (b.row == 1 || b.column == 1) {
        return small_product([m, k, n], a, b, beta, c, c_row);
    }
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

/// [`product`] by plain loops along whichever axis of `b` is contiguous.
fn small_product(
    [m, k, n]: [usize; 3],
    a: Matrix<'_>,
    b: Matrix<'_>,
    beta: f32,
    c: &mut [f32],
    c_row: usize,
) {
    for i in 0..m {
        let (row, c) = (&a.data[i * a.row..][..k], &mut c[i * c_row..][..n]);
        for c in &mut *c {
            *c = if beta == 0.0 { 0.0 } else { *c * beta };
        }
        if b.row == 1 {
            c.iter_mut().enumerate().for_each(|(j, c)| *c += dot(row, &b.data[j * b.column..][..k]));
        } else {
            for (p, &x) in row.iter().enumerate() {
                c.iter_mut().zip(&b.data[p * b.row..]).for_each(|(c, y)| *c += x * y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_products_equal_the_plain_sum() {
        for [m, k, n] in [[1, 1, 1], [4, 128, 1], [3, 5, 7], [2, 1, 128], [16, 40, 33]] {
            let value = |i: usize| ((i * 7 + 3) % 11) as f32 - 5.0;
            let (a, b): (Vec<_>, Vec<_>) = ((0..m * k).map(value).collect(), (0..k * n).map(value).collect());
            for transposed in [false, true] {
                let matrix = if transposed { Matrix::rows(&b, k).transposed() } else { Matrix::rows(&b, n) };
                let mut c = vec![2.0; m * n];
                product([m, k, n], Matrix::rows(&a, k), matrix, 1.0, &mut c, n);
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let at = |p: usize| if transposed { j * k + p } else { p * n + j };
                    let sum: f32 = (0..k).map(|p| a[i * k + p] * b[at(p)]).sum();
                    assert_eq!(c[i * n + j], 2.0 + sum, "{m} {k} {n} at {i} {j}");
                }
            }
        }
    }
}
