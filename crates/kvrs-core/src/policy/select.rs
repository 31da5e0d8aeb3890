//! The best tokens by score, with what is protected.

use std::ops::Range;

/// Places of the kept tokens `tokens` (indices, ascending) that may go: neither sinks nor the newest `recent` of a
/// sequence of `length` tokens.
#[must_use]
pub fn droppable(tokens: &[usize], length: usize, sinks: usize, recent: usize) -> Range<usize> {
    let start = tokens.partition_point(|&index| index < sinks);
    let end = tokens.partition_point(|&index| index < length.saturating_sub(recent));
    start..end.max(start)
}

/// Ascending places that stay: all outside `droppable`, and of those inside the `picks` with the highest scores.
///
/// At equal scores the lower place wins, NaN is below every number, and at least one place stays.
/// Takes time linear in the number of scores.
///
/// # Panics
/// If `droppable` reaches beyond the scores.
#[must_use]
pub fn select(scores: &[f32], droppable: Range<usize>, picks: usize) -> Vec<usize> {
    let outside = scores.len() - droppable.len();
    let picks = picks.max(usize::from(outside == 0)).min(droppable.len());
    if picks == droppable.len() {
        return (0..scores.len()).collect();
    }
    let mut ranks: Vec<u64> = droppable.clone().map(|i| rank(scores[i], i)).collect();
    let (_, &mut best_gone, _) = ranks.select_nth_unstable_by(picks, |a, b| b.cmp(a));
    let stays = |i: &usize| !droppable.contains(i) || rank(scores[*i], *i) > best_gone;
    (0..scores.len()).filter(stays).collect()
}

/// A number that is larger for what is better kept; the place is in its lower half, inverted.
pub(crate) fn rank(score: f32, place: usize) -> u64 {
    u64::from(ordered(score)) << 32 | u64::from(!(place as u32))
}

/// Bits whose order as integers is that of numbers; both zeros are equal, NaN is lowest.
fn ordered(x: f32) -> u32 {
    if x.is_nan() {
        return 0;
    }
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sinks_and_the_newest_are_not_droppable() {
        let tokens = [0, 1, 5, 9, 10, 11];
        assert_eq!(droppable(&tokens, 12, 2, 3), 2..3);
        assert_eq!(droppable(&tokens, 12, 0, 0), 0..6);
        assert_eq!(
            droppable(&tokens, 12, 4, 64),
            2..2,
            "recent tokens of a short sequence reach over the sinks"
        );
        assert_eq!(droppable(&[], 0, 4, 4), 0..0);
    }

    #[test]
    fn the_best_stay_in_ascending_order_and_the_lower_place_wins_ties() {
        let scores = [0.0, 5.0, 7.0, 5.0, 5.0, 1.0, 0.0];
        assert_eq!(select(&scores, 1..6, 2), [0, 1, 2, 6]);
        assert_eq!(select(&scores, 1..6, 3), [0, 1, 2, 3, 6]);
        assert_eq!(select(&scores, 1..6, 0), [0, 6]);
        assert_eq!(select(&scores, 1..6, 9), [0, 1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn at_least_one_token_stays() {
        assert_eq!(select(&[1.0, 3.0, 3.0], 0..3, 0), [1]);
        assert!(select(&[], 0..0, 5).is_empty());
    }

    #[test]
    fn zeros_are_equal_and_nan_goes_first() {
        assert_eq!(select(&[-0.0, 0.0, 0.0], 0..3, 1), [0]);
        assert_eq!(select(&[0.0, -0.0, 0.0], 0..3, 2), [0, 1]);
        let strange = [f32::NAN, f32::NEG_INFINITY, -1.0, f32::INFINITY, -f32::NAN];
        assert_eq!(select(&strange, 0..5, 3), [1, 2, 3]);
        assert_eq!(select(&strange, 0..5, 4), [0, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn what_stays_is_the_head_of_a_stable_sort(
            scores in prop::collection::vec((-4i8..4).prop_map(f32::from), 1..200),
            sinks in 0usize..8, recent in 0usize..8, picks in 0usize..200,
        ) {
            let tokens: Vec<usize> = (0..scores.len()).collect();
            let inside = droppable(&tokens, scores.len(), sinks, recent);
            let kept = select(&scores, inside.clone(), picks);
            let mut order: Vec<usize> = inside.clone().collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            let least = usize::from(inside.len() == scores.len());
            order.truncate(picks.max(least));
            let mut expected: Vec<usize> =
                tokens.iter().copied().filter(|i| !inside.contains(i) || order.contains(i)).collect();
            expected.sort_unstable();
            prop_assert_eq!(kept, expected);
        }

        #[test]
        fn the_order_of_ranks_is_that_of_numbers(a in any::<f32>(), b in any::<f32>()) {
            prop_assume!(!a.is_nan() && !b.is_nan());
            prop_assert_eq!(ordered(a).cmp(&ordered(b)), a.partial_cmp(&b).unwrap());
        }
    }
}
