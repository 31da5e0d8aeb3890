//! Which slots of a page a query may see.

use kvrs_core::page::{Entry, Slots};
use std::ops::Range;

/// The rules of a call: causality and the sliding window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visibility {
    pub(crate) causal: bool,
    pub(crate) sliding: Option<usize>,
}

impl Visibility {
    /// Indices that query `index` sees.
    pub(crate) fn range(self, index: usize) -> Range<usize> {
        let start = self.sliding.map_or(0, |width| (index + 1).saturating_sub(width));
        start..if self.causal { index + 1 } else { usize::MAX }
    }

    /// How many of a call's own tokens its query number `query` sees.
    pub(crate) fn own(self, query: usize) -> usize {
        Self { causal: true, ..self }.range(query).len()
    }

    /// Live slots that query `index` sees, as bits.
    pub(crate) fn mask<C>(self, entry: &Entry<C>, index: usize) -> u64 {
        let range = self.range(index);
        let slot_of = |token: usize| match entry.slots() {
            _ if token == 0 => 0,
            Slots::Run { first } => token.saturating_sub(*first as usize).min(64),
            Slots::Gathered(tokens) if tokens.last().is_some_and(|&last| (last as usize) < token) => 64,
            Slots::Gathered(tokens) => tokens.partition_point(|&t| (t as usize) < token),
        };
        entry.live() & ones(slot_of(range.end)) & !ones(slot_of(range.start))
    }
}

/// The lowest `n` bits.
fn ones(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sliding_window_of_three_ends_at_the_query() {
        let visibility = Visibility { causal: true, sliding: Some(3) };
        assert_eq!(visibility.range(7), 5..8);
        assert_eq!(visibility.range(1), 0..2);
    }

    #[test]
    fn without_causality_later_tokens_are_seen() {
        let visibility = Visibility { causal: false, sliding: Some(3) };
        assert_eq!(visibility.range(7), 5..usize::MAX);
    }
}
