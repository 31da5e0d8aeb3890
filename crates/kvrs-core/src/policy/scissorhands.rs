//! Scissorhands (Liu et al., 2023, arXiv:2305.17118): what was often looked at will be looked at again.

use super::{
    Attention, BUDGET, Entry, Facts, Fold, MAX_QUERIES, Method, Needs, Parameter, Queries, Reduce, When,
    check_range,
};
use crate::Result;
use crate::budget::Budget;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Newest tokens that are not judged yet.
const RECENT: usize = 10;

pub(super) const ENTRY: Entry = Entry {
    name: "scissorhands",
    paper: "Liu et al., 2023, arXiv:2305.17118",
    parameters: &[
        BUDGET,
        Parameter { name: "history", allowed: "an even number of queries in 2..=4096", default: Some("400") },
    ],
};

/// Keeps the tokens whose attention was most often above average among the last queries, and drops half a budget at
/// once when it is full.
///
/// The paper keeps a bitmap of the last `history` queries; here two counters stand for its halves ([`History`]), so
/// that more than half and at most all of them count.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scissorhands {
    /// How many tokens are kept at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Queries that count.
    pub history: usize,
}

impl Default for Scissorhands {
    fn default() -> Self {
        Self { budget: None, history: 400 }
    }
}

impl Scissorhands {
    /// Tokens that go at once when a budget of `budget` tokens is full, if as many may go.
    #[must_use]
    pub fn batch(budget: usize) -> usize {
        budget / 2
    }
}

impl Method for Scissorhands {
    fn entry(&self) -> &'static Entry {
        &ENTRY
    }

    fn own_budget(&self) -> Option<Budget> {
        self.budget
    }

    fn needs(&self) -> Needs {
        let queries = Queries::Last(self.history);
        let attention = Attention { fold: Fold::Above, reduce: Reduce::Mean, queries };
        Needs { attention: Some(attention), ..Needs::default() }
    }

    fn when(&self) -> When {
        When::Batches
    }

    fn check(&self, field: &str) -> Result<()> {
        check_range(field, "history", self.history, 2..=MAX_QUERIES)?;
        if self.history % 2 == 1 {
            return Err(crate::Error::plan(format!("{field}.history"), self.history, "an even number"));
        }
        Ok(())
    }

    fn own_recent(&self, _: usize) -> usize {
        RECENT
    }

    /// The attention is what [`History::totals`] gives.
    fn scores(&self, facts: &Facts<'_>) -> Vec<f32> {
        facts.attention.to_vec()
    }
}

/// How often each token was above average: two counters a token, for the current and the previous half.
///
/// Queries come in blocks; a block never reaches over a turn, so that counts do not depend on their sizes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct History {
    half: usize,
    seen: usize,
    counts: Vec<[u16; 2]>,
}

impl History {
    /// Counters for `history` queries, of which the settings allow 4096: a count fits in 16 bits.
    #[must_use]
    pub fn new(history: usize) -> Self {
        Self { half: (history / 2).max(1), ..Self::default() }
    }

    /// Which queries count after `length` of them, in the previous and in the current half: halves begin at multiples
    /// of their length, so that the first queries of a long prompt need not be looked at.
    #[must_use]
    pub fn counted(history: usize, length: usize) -> [Range<usize>; 2] {
        let half = (history / 2).max(1);
        let current = length.saturating_sub(1) / half * half;
        [current.saturating_sub(half)..current, current..length]
    }

    /// The most queries that the next [`History::add`] may stand for, at least 1: as many as are left in the half.
    #[must_use]
    pub fn room(&self) -> usize {
        if self.seen == self.half { self.half } else { self.half - self.seen }
    }

    /// Queries of a half, those of the running one, and the counts of both halves for each token.
    #[must_use]
    pub fn parts(&self) -> (usize, usize, &[[u16; 2]]) {
        (self.half, self.seen, &self.counts)
    }

    /// Counters for `history` queries as [`History::parts`] gave them; `None` if a half has fewer than `seen` queries.
    #[must_use]
    pub fn restore(history: usize, seen: usize, counts: Vec<[u16; 2]>) -> Option<Self> {
        let half = Self::new(history).half;
        (seen <= half).then_some(Self { half, seen, counts })
    }

    /// Tokens that are counted.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether no token is counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Bytes of the counters.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.counts.capacity() * size_of::<[u16; 2]>()
    }

    /// Starts counting `tokens` more tokens.
    pub fn push(&mut self, tokens: usize) {
        self.counts.resize(self.counts.len() + tokens, [0; 2]);
    }

    /// Counts a block of `queries` queries, of which `above[i]` were above average at token i.
    ///
    /// # Panics
    /// If the block reaches over a turn, or `above` has more entries than tokens are counted.
    pub fn add(&mut self, queries: usize, above: &[f32]) {
        assert!(queries <= self.room(), "{queries} queries with room for {}", self.room());
        assert!(above.len() <= self.counts.len(), "{} numbers for {} tokens", above.len(), self.counts.len());
        if self.seen == self.half && queries > 0 {
            self.seen = 0;
            self.counts.iter_mut().for_each(|count| *count = [0, count[0]]);
        }
        for ([current, _], &above) in self.counts.iter_mut().zip(above) {
            *current = current.saturating_add(above as u16);
        }
        self.seen += queries;
    }

    /// Keeps the counters at the ascending places `kept`.
    pub fn keep(&mut self, kept: &[usize]) {
        self.counts = kept.iter().map(|&i| self.counts[i]).collect();
    }

    /// Keeps the counters of the first `tokens` tokens.
    pub fn truncate(&mut self, tokens: usize) {
        self.counts.truncate(tokens);
    }

    /// How often each token was above average.
    #[must_use]
    pub fn totals(&self) -> Vec<f32> {
        self.counts.iter().map(|&[current, previous]| f32::from(current) + f32::from(previous)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts bits `[queries][tokens]` in blocks of at most `block` queries.
    fn counted(history: usize, bits: &[Vec<f32>], block: usize) -> Vec<f32> {
        let mut counters = History::new(history);
        counters.push(bits[0].len());
        let mut rest = bits;
        while !rest.is_empty() {
            let n = block.min(counters.room()).min(rest.len());
            let sums: Vec<f32> =
                (0..rest[0].len()).map(|j| rest[..n].iter().map(|row| row[j]).sum()).collect();
            counters.add(n, &sums);
            rest = &rest[n..];
        }
        counters.totals()
    }

    #[test]
    fn the_current_and_the_previous_half_count_and_nothing_older() {
        // Token 0 is above average in the first four queries, token 1 in the later ones.
        let bits: Vec<Vec<f32>> =
            (0..7).map(|i| if i < 4 { vec![1.0, 0.0] } else { vec![0.0, 1.0] }).collect();
        assert_eq!(counted(6, &bits[..2], 9), [2.0, 0.0]);
        assert_eq!(counted(6, &bits[..5], 9), [4.0, 1.0]);
        assert_eq!(counted(6, &bits[..6], 9), [4.0, 2.0], "both halves are full");
        assert_eq!(counted(6, &bits, 9), [1.0, 3.0], "queries 0 to 2 are older than both halves");
    }

    #[test]
    fn counting_from_the_previous_half_on_is_counting_every_query() {
        let bits: Vec<Vec<f32>> =
            (0..50).map(|i| (0..5).map(|j| f32::from(u8::from(i * (j + 3) % 7 < 3))).collect()).collect();
        assert_eq!(History::counted(6, 7), [3..6, 6..7]);
        assert_eq!((History::counted(6, 6), History::counted(6, 2)), ([0..3, 3..6], [0..0, 0..2]));
        for length in 1..50 {
            let [previous, current] = History::counted(16, length);
            assert!(previous.end == current.start && current.end == length && length - previous.start <= 16);
            assert_eq!(counted(16, &bits[previous.start..length], 9), counted(16, &bits[..length], 9));
        }
    }

    #[test]
    fn counts_do_not_depend_on_the_blocks() {
        let bits: Vec<Vec<f32>> =
            (0..50).map(|i| (0..5).map(|j| f32::from(u8::from(i * (j + 3) % 7 < 3))).collect()).collect();
        let one = counted(16, &bits, 1);
        for block in [2, 3, 5, 8, 100] {
            assert_eq!(counted(16, &bits, block), one);
        }
    }

    #[test]
    fn kept_tokens_keep_their_counts_and_new_ones_start_at_zero() {
        let mut counters = History::new(100);
        counters.push(4);
        counters.add(3, &[3.0, 0.0, 2.0, 1.0]);
        counters.keep(&[0, 2]);
        counters.push(1);
        counters.add(1, &[1.0, 0.0, 1.0]);
        assert_eq!(counters.totals(), [4.0, 2.0, 1.0]);
        counters.truncate(2);
        assert_eq!((counters.totals(), counters.len()), (vec![4.0, 2.0], 2));
    }

    #[test]
    #[should_panic(expected = "2 queries with room for 1")]
    fn a_block_over_a_turn_is_a_mistake() {
        let mut counters = History::new(2);
        counters.push(1);
        counters.add(2, &[1.0]);
    }
}
