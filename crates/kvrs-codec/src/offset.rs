//! The constant of keys: taken out before encoding, added to scores without touching memory.
//!
//! Models with a key bias have keys `R(pos) (k0 + delta)` whose energy is mostly `k0`; only
//! `R(pos) delta` is encoded. With `a, b` the products of query and constant turned to the first position of a
//! page, slot i adds `sum_j a_j cos(theta_j i) + b_j sin(theta_j i)`: one dot product with a fixed table.

use crate::phasor::{Pair, Phasors, turned, turned_16};
use crate::transform::dot;
use std::sync::Arc;

/// Slots that the table covers.
pub const TABLE_SLOTS: usize = 64;

/// The constant of one head's keys.
#[derive(Debug, Clone)]
pub struct KeyOffset {
    /// Before the rotary embedding `[dim]`, with the attention factor on its turning channels.
    k0: Arc<[f32]>,
    /// Pairs with a part of `k0`; the others are neither subtracted nor added.
    kept: Arc<[Pair]>,
    /// `[64][kept pairs][2]`: cosine and sine of `theta_j i`.
    table: Arc<[f32]>,
}

impl KeyOffset {
    /// The offset `k0` `[dim]` (before the rotary embedding, without attention factor) under the layer's rotary embedding.
    ///
    /// Pairs whose part of `k0` is exactly zero are left out.
    ///
    /// # Panics
    /// If `k0` is not `[dim]`.
    #[must_use]
    pub fn new(k0: &[f32], phasors: &Phasors) -> Self {
        let mut table = |turns: &[u64]| phase_table(turns).into();
        Self::with_table(k0, phasors, &mut table)
    }

    /// As [`Self::new`], with the table for the kept phases from `table`, so that heads can share one.
    ///
    /// # Panics
    /// If `k0` is not `[dim]`.
    pub fn with_table(k0: &[f32], phasors: &Phasors, table: &mut dyn FnMut(&[u64]) -> Arc<[f32]>) -> Self {
        assert_eq!(k0.len(), phasors.dim(), "one constant per key channel");
        let mut k0 = k0.to_vec();
        phasors.apply_factor(&mut k0);
        let carries = |p: &Pair| k0[p.a] != 0.0 || p.b.is_some_and(|b| k0[b] != 0.0);
        let kept: Vec<Pair> = phasors.pairs().iter().copied().filter(carries).collect();
        let turns: Vec<u64> = kept.iter().map(|p| p.turn).collect();
        Self { k0: k0.into(), kept: kept.into(), table: table(&turns) }
    }

    /// Pairs that take part: half the length of a page query.
    #[must_use]
    pub fn base_pairs(&self) -> usize {
        self.kept.len()
    }

    /// The constant `[dim]`, with the attention factor on its turning channels.
    #[must_use]
    pub fn constant(&self) -> &[f32] {
        &self.k0
    }

    /// The pairs that take part.
    #[must_use]
    pub fn pairs(&self) -> &[Pair] {
        &self.kept
    }

    /// Bytes of the constants apart from the table.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.k0) + size_of_val(&*self.kept)
    }

    /// Takes `R(position) k0` out of `x` `[dim]`, bit for bit as every backend.
    ///
    /// # Panics
    /// If `x` is shorter than the constant.
    pub fn subtract(&self, position: i64, x: &mut [f32]) {
        self.each(position, |channel, o| x[channel] -= o);
    }

    /// [`Self::subtract`] from 16 vectors side by side, `[dim][vector]`, each at its position.
    ///
    /// # Panics
    /// If `x` is shorter than the constant.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "to be compiled for the caller's instruction set")]
    pub fn subtract_16(&self, positions: &[i64; 16], x: &mut [[f32; 16]]) {
        for pair in &*self.kept {
            let ka = self.k0[pair.a];
            let Some(b) = pair.b else {
                x[pair.a].iter_mut().for_each(|x| *x -= ka);
                continue;
            };
            let [c, s] = turned_16(positions, pair.turn);
            let kb = self.k0[b];
            for lane in 0..16 {
                x[pair.a][lane] -= ka * c[lane] - kb * s[lane];
            }
            for lane in 0..16 {
                x[b][lane] -= kb * c[lane] + ka * s[lane];
            }
        }
    }

    /// Adds `R(position) k0` to `x` `[dim]`.
    ///
    /// # Panics
    /// If `x` is shorter than the constant.
    pub fn add(&self, position: i64, x: &mut [f32]) {
        self.each(position, |channel, o| x[channel] += o);
    }

    fn each(&self, position: i64, mut with: impl FnMut(usize, f32)) {
        for pair in &*self.kept {
            let ka = self.k0[pair.a];
            let Some(b) = pair.b else {
                with(pair.a, ka);
                continue;
            };
            let (c, s) = turned(position, pair.turn);
            let (c, s, kb) = (c as f32, s as f32, self.k0[b]);
            with(pair.a, ka * c - kb * s);
            with(b, kb * c + ka * s);
        }
    }

    /// Cosine and sine of the kept pairs at `position` `[base_pairs]`, for [`Self::turn_query`]: the part of
    /// [`Self::page_query`] that all queries of a page share.
    ///
    /// # Panics
    /// If `turns` is not one entry per kept pair.
    pub fn page_turns(&self, position: i64, turns: &mut [[f64; 2]]) {
        assert_eq!(turns.len(), self.kept.len(), "one phasor per kept pair");
        for (turn, pair) in turns.iter_mut().zip(&*self.kept) {
            let (c, s) = turned(position, pair.turn);
            *turn = [c, s];
        }
    }

    /// The products of `q` `[dim]` with the constant, turned to the position of `turns`: `[2 * base_pairs]`.
    ///
    /// # Panics
    /// If `ab` or `turns` has not that length, or `q` is shorter than the constant.
    pub fn turn_query(&self, q: &[f32], turns: &[[f64; 2]], ab: &mut [f32]) {
        assert!(turns.len() == self.kept.len() && ab.len() == 2 * turns.len(), "two products per kept pair");
        for ((pair, &[c, s]), ab) in self.kept.iter().zip(turns).zip(ab.as_chunks_mut::<2>().0) {
            let at = |x: &[f32], channel: Option<usize>| channel.map_or(0.0, |i| f64::from(x[i]));
            let (qa, qb) = (f64::from(q[pair.a]), at(q, pair.b));
            let (ka, kb) = (f64::from(self.k0[pair.a]), at(&self.k0, pair.b));
            let (along, across) = (qa * ka + qb * kb, qb * ka - qa * kb);
            *ab = [(along * c + across * s) as f32, (across * c - along * s) as f32];
        }
    }

    /// Prepares `q` `[dim]` for the 64 positions from `first_position` on: `ab` `[2 * base_pairs]`.
    ///
    /// # Panics
    /// If `ab` has another length or `q` is shorter than the constant.
    pub fn page_query(&self, q: &[f32], first_position: i64, ab: &mut [f32]) {
        assert_eq!(ab.len(), 2 * self.kept.len(), "two products per kept pair");
        let mut turns = vec![[0.0; 2]; self.kept.len()];
        self.page_turns(first_position, &mut turns);
        self.turn_query(q, &turns, ab);
    }

    /// `q . R(first_position + slot) k0` of a prepared query; error at most 8e-5 at logits of 611.
    ///
    /// # Panics
    /// If `slot` is not below 64 or `ab` is not a prepared query.
    #[must_use]
    pub fn score(&self, ab: &[f32], slot: usize) -> f32 {
        assert_eq!(ab.len(), 2 * self.kept.len(), "two products per kept pair");
        dot(ab, &self.table[slot * ab.len()..][..ab.len()])
    }

    /// The table `[64][base_pairs][2]` of cosines and sines, for kernels.
    #[must_use]
    pub fn table(&self) -> &[f32] {
        &self.table
    }
}

/// Cosine and sine of `i` positions of each phase, `[64][turns][2]`.
#[must_use]
pub fn phase_table(turns: &[u64]) -> Vec<f32> {
    let slots = 0..TABLE_SLOTS as i64;
    slots
        .flat_map(|i| turns.iter().map(move |&t| turned(i, t)))
        .flat_map(|(c, s)| [c as f32, s as f32])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use kvrs_core::{Pairing, Rope};

    fn vector(key: u64, n: usize, factor: f64) -> Vec<f32> {
        rng::gaussian(key, n).iter().map(|x| (x * factor) as f32).collect()
    }

    /// `q . R(position) k0` in f64, by the definition.
    fn exact(phasors: &Phasors, q: &[f32], k0: &[f32], position: i64) -> f64 {
        let at = |x: &[f32], c: Option<usize>| c.map_or(0.0, |c| f64::from(x[c]));
        let pairs = phasors.pairs().iter().enumerate();
        pairs
            .map(|(j, p)| {
                let (c, s) = if p.b.is_some() { phasors.cos_sin64(position, j) } else { (1.0, 0.0) };
                let (ka, kb) = (at(k0, Some(p.a)), at(k0, p.b));
                at(q, Some(p.a)) * (ka * c - kb * s) + at(q, p.b) * (kb * c + ka * s)
            })
            .sum()
    }

    #[test]
    fn scores_of_a_page_are_those_of_the_turned_constant() {
        let phasors = Phasors::new(&Rope::new(1e6), 128).unwrap();
        let mut largest = (0f64, 0f64);
        for (trial, first) in [0, 64, 4096, 131_008, 1_048_512].into_iter().enumerate() {
            let mut k0 = vector(90 + trial as u64, 128, 5.0);
            // Slow pairs of the query point along the constant: logits of several hundred.
            let mut q = vector(70 + trial as u64, 128, 2.0);
            for j in 40..64 {
                (k0[j], q[j]) = (5.0, 2.5);
            }
            let offset = KeyOffset::new(&k0, &phasors);
            let mut ab = vec![0.0; 2 * offset.base_pairs()];
            offset.page_query(&q, first, &mut ab);
            for slot in 0..64 {
                let expected = exact(&phasors, &q, &k0, first + slot as i64);
                let error = (f64::from(offset.score(&ab, slot)) - expected).abs();
                largest = (largest.0.max(expected.abs()), largest.1.max(error));
            }
        }
        assert!((500.0..=700.0).contains(&largest.0), "logits of {}", largest.0);
        assert!(largest.1 <= 8e-5, "error {} at logits of {}", largest.1, largest.0);
    }

    #[test]
    fn what_is_subtracted_is_what_is_added() {
        let rope =
            Rope { dim: Some(4), attention_factor: 1.25, pairing: Pairing::Interleaved, ..Rope::new(1e4) };
        let phasors = Phasors::new(&rope, 7).unwrap();
        let k0 = [1.0, -2.0, 0.0, 0.0, 3.0, 0.5, -4.0];
        let offset = KeyOffset::new(&k0, &phasors);
        assert_eq!(offset.base_pairs(), 3, "the pair without a constant is left out");
        let x = vector(1, 7, 1.0);
        let mut y = x.clone();
        offset.subtract(1000, &mut y);
        assert_eq!(y[2..4], x[2..4]);
        assert_eq!(y[6], x[6] + 4.0, "a lone channel does not turn");
        let q = vector(2, 7, 1.0);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let mut ab = vec![0.0; 6];
        offset.page_query(&q, 990, &mut ab);
        assert!((dot(&q, &x) - dot(&q, &y) - offset.score(&ab, 10)).abs() < 1e-5);
        offset.add(1000, &mut y);
        assert!(y.iter().zip(&x).all(|(y, x)| (y - x).abs() < 1e-6));
    }

    #[test]
    fn the_attention_factor_is_on_the_turning_channels_only() {
        let rope = Rope { dim: Some(2), attention_factor: 2.0, ..Rope::new(1e4) };
        let offset = KeyOffset::new(&[1.0; 4], &Phasors::new(&rope, 4).unwrap());
        let mut x = [0.0; 4];
        offset.add(0, &mut x);
        assert_eq!(x, [2.0, 2.0, 1.0, 1.0]);
    }
}
