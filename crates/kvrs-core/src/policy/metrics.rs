//! How good a choice was: hit rate, overlap and recall of kept sets.

use std::collections::BTreeSet;

/// Tokens that mattered to later queries, and those of them that were kept.
///
/// Adds up over heads, layers and queries; the rate is taken of the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hits {
    /// Places with attention above the threshold.
    pub important: u64,
    /// Those of them that were kept.
    pub kept: u64,
}

impl Hits {
    /// The share of important places that were kept, in 0..=1; `None` if none was important.
    #[must_use]
    pub fn rate(self) -> Option<f64> {
        (self.important > 0).then(|| self.kept as f64 / self.important as f64)
    }
}

impl std::ops::AddAssign for Hits {
    fn add_assign(&mut self, other: Self) {
        self.important += other.important;
        self.kept += other.kept;
    }
}

/// The hits of one query: of the places of the prompt whose `attention` is above `threshold`, how many are among the
/// ascending places `kept` (hit rate of `SnapKV`, Li et al., 2024, arXiv:2404.14469, section 3).
#[must_use]
pub fn hits(attention: &[f32], kept: &[usize], threshold: f32) -> Hits {
    let mut kept = kept.iter().copied().peekable();
    let mut hits = Hits::default();
    for (place, _) in attention.iter().enumerate().filter(|&(_, &a)| a > threshold) {
        while kept.next_if(|&k| k < place).is_some() {}
        hits.important += 1;
        hits.kept += u64::from(kept.peek() == Some(&place));
    }
    hits
}

/// The size of the intersection of two sets over that of their union; 1 for two empty sets.
#[must_use]
pub fn overlap(a: &[usize], b: &[usize]) -> f64 {
    let (common, a, b) = common(a, b);
    if a + b == 0 { 1.0 } else { common as f64 / (a + b - common) as f64 }
}

/// The share of the set `wanted` that is in `kept`; 1 if nothing is wanted.
#[must_use]
pub fn recall(kept: &[usize], wanted: &[usize]) -> f64 {
    let (common, _, wanted) = common(kept, wanted);
    if wanted == 0 { 1.0 } else { common as f64 / wanted as f64 }
}

/// Sizes of the intersection, of the first and of the second set.
fn common(a: &[usize], b: &[usize]) -> (usize, usize, usize) {
    let (a, b): (BTreeSet<_>, BTreeSet<_>) = (a.iter().collect(), b.iter().collect());
    (a.intersection(&b).count(), a.len(), b.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hit_rate_is_the_kept_share_of_what_later_mattered() {
        let attention = [0.5, 0.01, 0.2, 0.2, 0.09];
        let mut sum = hits(&attention, &[0, 1, 3], 0.1);
        assert_eq!((sum, sum.rate()), (Hits { important: 3, kept: 2 }, Some(2.0 / 3.0)));
        assert_eq!(hits(&attention, &[0], 0.5), Hits::default(), "above means strictly above");
        assert_eq!(Hits::default().rate(), None);
        sum += hits(&attention, &[], 0.05);
        assert_eq!(sum.rate(), Some(2.0 / 7.0), "places count alike, not queries");
    }

    #[test]
    fn overlap_and_recall_of_sets() {
        assert_eq!(overlap(&[1, 2, 3], &[2, 3, 4]), 0.5);
        assert_eq!(recall(&[1, 2, 3], &[2, 3, 4, 5]), 0.5);
        assert_eq!((overlap(&[], &[]), recall(&[1], &[])), (1.0, 1.0));
    }
}
