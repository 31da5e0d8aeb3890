//! Policies worked by hand, and what must hold for every choice.

use super::*;
use crate::budget::PyramidKv;
use proptest::prelude::*;

/// What a head keeps of a prompt whose tokens have the sums `attention`.
fn kept(spec: &PolicySpec, attention: &[f32], sinks: usize, recent: usize) -> Vec<usize> {
    let Some(Budget::Tokens(budget)) = spec.budget() else { panic!("a budget in tokens") };
    let tokens: Vec<usize> = (0..attention.len()).collect();
    let inside = droppable(&tokens, tokens.len(), sinks, spec.recent(budget, recent));
    let facts = Facts { tokens: &tokens, prefix: inside.end, attention, ..Facts::default() };
    select(&spec.scores(&facts), inside, budget - spec.protected(budget, sinks, recent))
}

#[test]
fn snapkv_worked_by_hand() {
    let sums = [9.0, 0.0, 0.0, 1.0, 0.0, 0.0, 4.0, 0.0, 0.0, 2.0, 5.0, 5.0];
    let snapkv = |budget, pooling| {
        let budget = Some(Budget::Tokens(budget));
        PolicySpec::SnapKv(SnapKv { budget, window: 2, kernel: 3, pooling, ..SnapKv::default() })
    };
    // Pooled prefix: 9 9 1 1 1 4 4 4 2 2. One sink, two of the window; of the three 4s the lower two are kept.
    assert_eq!(kept(&snapkv(6, Pooling::Max), &sums, 1, 0), [0, 1, 5, 6, 10, 11]);
    assert_eq!(kept(&snapkv(8, Pooling::Max), &sums, 1, 0), [0, 1, 5, 6, 7, 8, 10, 11]);
    // The mean at the right edge is (0 + 2) / 2 = 1, above the 2/3 of its neighbour; zeros would make it 2/3.
    assert_eq!(kept(&snapkv(8, Pooling::Avg), &sums, 1, 0), [0, 1, 5, 6, 7, 9, 10, 11]);
    // The plan's longer window is protected, and the prefix ends before it.
    assert_eq!(kept(&snapkv(6, Pooling::Max), &sums, 0, 4), [0, 1, 8, 9, 10, 11]);
    // A budget above the prompt keeps all of it.
    assert_eq!(kept(&snapkv(99, Pooling::Max), &sums, 1, 0), (0..12).collect::<Vec<_>>());
}

#[test]
fn other_policies_worked_by_hand() {
    let sums = [0.0, 5.0, 1.0, 4.0, 4.0, 0.5, 0.2, 0.1];
    assert_eq!(kept(&policy("streamingllm", vec![budget(4)]), &sums, 1, 2), [0, 5, 6, 7]);
    assert_eq!(
        kept(&policy("h2o", vec![budget(6)]), &sums, 1, 0),
        [0, 1, 3, 5, 6, 7],
        "half is for the newest"
    );
    assert_eq!(kept(&policy("tova", vec![budget(4)]), &sums, 0, 1), [1, 3, 4, 7]);
    let norms = [1.0, 9.0, 2.0, 8.0, 3.0];
    let facts = Facts { tokens: &[0, 1, 2, 3, 4], prefix: 4, key_norms: &norms, ..Facts::default() };
    let scores = policy("knorm", vec![budget(3)]).scores(&facts);
    assert_eq!(select(&scores, 0..4, 2), [0, 2, 4]);
}

#[test]
fn a_short_prompt_is_kept_whole() {
    for n in 0..3 {
        let sums = vec![1.0; n];
        for name in ["streamingllm", "h2o", "scissorhands", "snapkv", "tova", "pyramidkv"] {
            assert_eq!(kept(&policy(name, vec![budget(100)]), &sums, 4, 16).len(), n, "{name}");
        }
    }
}

#[test]
#[should_panic(expected = "3 numbers of attention for 4 tokens")]
fn arrays_of_another_length_are_a_mistake() {
    let facts = Facts { tokens: &[0, 1, 2, 3], attention: &[1.0; 3], ..Facts::default() };
    let _ = policy("h2o", vec![budget(9)]).scores(&facts);
}

#[test]
fn a_random_choice_is_the_same_at_once_and_in_steps() {
    let spec = policy("random", vec![budget(30), ("seed", Int(7))]);
    let scores = |tokens: &[usize]| spec.scores(&Facts { layer: 1, head: 2, tokens, ..Facts::default() });
    let all: Vec<usize> = (0..400).collect();
    let at_once: Vec<usize> = select(&scores(&all), 0..400, 30);
    let mut kept: Vec<usize> = Vec::new();
    for chunk in all.chunks(16) {
        kept.extend(chunk);
        let n = kept.len();
        kept = select(&scores(&kept), 0..n, 30).into_iter().map(|i| kept[i]).collect();
    }
    assert_eq!(kept, at_once);
}

proptest! {
    #[test]
    fn pooling_is_what_its_definition_says(
        x in prop::collection::vec((0u8..50).prop_map(f32::from), 0..60), half in 0usize..12,
    ) {
        let near = |i: usize| &x[i.saturating_sub(half)..x.len().min(i + half + 1)];
        for (i, (max, avg)) in pool(&x, 2 * half + 1, Pooling::Max)
            .into_iter()
            .zip(pool(&x, 2 * half + 1, Pooling::Avg))
            .enumerate()
        {
            prop_assert_eq!(max, near(i).iter().copied().fold(0.0, f32::max));
            prop_assert!((avg - near(i).iter().sum::<f32>() / near(i).len() as f32).abs() < 1e-4);
        }
        prop_assert_eq!(pool(&x, 2 * half + 1, Pooling::Max).len(), x.len());
    }

    #[test]
    fn budgets_are_met_and_sinks_and_the_newest_stay(
        sums in prop::collection::vec(0.0f32..1.0, 1..300), budget in 60i64..120,
        sinks in 0usize..5, recent in 0usize..20,
        name in prop::sample::select(vec!["streamingllm", "h2o", "scissorhands", "snapkv", "tova", "pyramidkv"]),
    ) {
        let spec = policy(name, vec![("budget", Int(budget))]);
        spec.validate(sinks, recent).unwrap();
        let kept = kept(&spec, &sums, sinks, recent);
        prop_assert_eq!(kept.len(), sums.len().min(budget as usize));
        prop_assert!(kept.is_sorted_by(|a, b| a < b));
        let newest = sums.len().saturating_sub(spec.recent(budget as usize, recent));
        for i in (0..sinks.min(sums.len())).chain(newest..sums.len()) {
            prop_assert!(kept.contains(&i));
        }
    }
}

#[test]
fn a_pyramid_has_the_scores_and_the_window_of_its_inner_policy() {
    let inner = PolicySpec::SnapKv(SnapKv { window: 2, kernel: 1, ..SnapKv::default() });
    let budget = Some(Budget::Tokens(9));
    let spec = PolicySpec::PyramidKv(PyramidKv { budget, scores: Box::new(inner), ..PyramidKv::default() });
    assert_eq!((spec.recent(9, 0), spec.protected(9, 1, 0)), (2, 3));
    assert_eq!(spec.sharing(), Sharing::Pyramid { beta: 20.0 });
    assert_eq!(spec.sharing().layers(9 - 3, 3, 100).unwrap(), [11, 6, 1]);
    let facts = Facts { tokens: &[0, 1, 2], prefix: 1, attention: &[3.0, 1.0, 2.0], ..Facts::default() };
    assert_eq!(spec.scores(&facts), [3.0, 1.0, 2.0]);
}
