//! Scores against the key offset, `q . R(position) k0`, added exactly to the scores on packed codes.
//!
//! On a page of consecutive positions the products of query and constant are turned to the page's start once and
//! meet a table of cosines and sines per slot that never changes ([`KeyOffset`]): no memory traffic.

use crate::gemm::{Matrix, product};
use crate::kernels::Kernels;
use crate::lanes::{Lanes, add_sums};
use kvrs_codec::offset::KeyOffset;

/// Query rows against the offset of one class.
pub(crate) struct BaseScores<'a> {
    kernels: Option<Kernels>,
    offset: &'a KeyOffset,
    slots: usize,
    /// Queries `[rows][key_dim]`.
    q: Vec<f32>,
    /// Phasors of one position `[pairs]`.
    turns: Vec<[f64; 2]>,
    /// Products of query and constant, turned to one position `[rows][2 pairs]`.
    ab: Vec<f32>,
    table: Table,
}

/// Scores of a page inside rows of scores.
pub(crate) struct Scores<'a> {
    pub(crate) all: &'a mut [f32],
    /// Scores of a row.
    pub(crate) row: usize,
    /// The page's first in its row.
    pub(crate) at: usize,
}

/// Cosines and sines of the slots, counted from the page's start.
enum Table {
    /// `[tile][2 pairs][16]`.
    Lanes(Vec<Lanes>),
    /// `[2 pairs][slots]`.
    Wide(Vec<f32>),
}

impl<'a> BaseScores<'a> {
    /// `q` holds the queries `[rows][key_dim]`; `wide`: there are so many that a matrix product pays.
    pub(crate) fn new(
        kernels: Option<Kernels>,
        offset: &'a KeyOffset,
        q: Vec<f32>,
        (rows, slots): (usize, usize),
        wide: bool,
    ) -> Self {
        let pairs = offset.base_pairs();
        let (turns, ab) = (vec![[0.0; 2]; pairs], vec![0.0; rows * 2 * pairs]);
        Self {
            kernels,
            offset,
            slots,
            q,
            turns,
            ab,
            table: Table::new(offset.table(), 2 * pairs, slots, wide),
        }
    }

    /// Adds the offset's scores of the live slots to the scores; `run`: positions are consecutive.
    pub(crate) fn add(&mut self, live: u64, run: bool, position: impl Fn(usize) -> i64, scores: Scores<'_>) {
        let mut scores = scores;
        if run {
            self.add_run(position(0), scores);
        } else {
            (0..self.slots)
                .filter(|s| live >> s & 1 == 1)
                .for_each(|s| self.add_slot(s, position(s), &mut scores));
        }
    }

    fn turn_to(&mut self, position: i64) {
        self.offset.page_turns(position, &mut self.turns);
        let rows = self.ab.len() / (2 * self.turns.len());
        let q = self.q.chunks_exact(self.q.len() / rows);
        for (q, ab) in q.zip(self.ab.chunks_exact_mut(2 * self.turns.len())) {
            self.offset.turn_query(q, &self.turns, ab);
        }
    }

    fn add_run(&mut self, start: i64, scores: Scores<'_>) {
        self.turn_to(start);
        let (len, slots, Scores { all, row, at }) = (2 * self.turns.len(), self.slots, scores);
        match &self.table {
            Table::Lanes(table) => {
                for (tile, table) in table.chunks_exact(len).enumerate() {
                    add_sums(self.kernels, &self.ab, (len, 0), table, all, (row, at + 16 * tile));
                }
            }
            Table::Wide(table) => {
                let (a, b) = (Matrix::rows(&self.ab, len), Matrix::rows(table, slots));
                product([self.ab.len() / len, len, slots], a, b, 1.0, &mut all[at..], row);
            }
        }
    }

    fn add_slot(&mut self, slot: usize, position: i64, scores: &mut Scores<'_>) {
        self.turn_to(position);
        let rows = self.ab.chunks_exact(2 * self.turns.len()).zip(scores.all.chunks_exact_mut(scores.row));
        rows.for_each(|(ab, all)| all[scores.at + slot] += self.offset.score(ab, 0));
    }
}

impl Table {
    /// From `[slot][len]`.
    fn new(table: &[f32], len: usize, slots: usize, wide: bool) -> Self {
        let value = |slot: usize, i: usize| table[slot * len + i];
        if wide {
            Self::Wide((0..len * slots).map(|k| value(k % slots, k / slots)).collect())
        } else {
            let lanes = |k: usize| std::array::from_fn(|lane| value(k / len * 16 + lane, k % len));
            Self::Lanes((0..slots / 16 * len).map(lanes).collect())
        }
    }
}
