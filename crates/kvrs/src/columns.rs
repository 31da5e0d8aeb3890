//! Which columns of a call hold tokens.

/// Per row, the columns that are not padding, ascending.
pub(crate) fn of_mask(mask: Option<&[bool]>, rows: usize, columns: usize) -> Vec<Vec<usize>> {
    match mask {
        None => vec![(0..columns).collect(); rows],
        Some(mask) => (0..rows).map(|b| (0..columns).filter(|t| mask[b * columns + t]).collect()).collect(),
    }
}
