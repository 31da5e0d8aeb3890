//! Budgets by hand, and what must hold for every budget.

use super::*;
use proptest::prelude::*;

fn sum(counts: &[usize]) -> usize {
    counts.iter().sum()
}

#[test]
fn pyramids_worked_by_hand() {
    let of = |mean, layers, prompt, beta| pyramid(mean, layers, prompt, beta).unwrap();
    // From 2 * 10 - 2 to 10 / 5: 18, 12 2/3, 7 1/3, 2; one token is left for the largest remainder.
    assert_eq!(of(10, 4, 100, 5.0), [18, 13, 7, 2]);
    // 10 / 20 is less than one token: from 19 to 1.
    assert_eq!(of(10, 4, 100, 20.0), [19, 13, 7, 1]);
    // The first layer cannot have more than the prompt: from 15 to 5.
    assert_eq!(of(10, 4, 15, 20.0), [15, 12, 8, 5]);
    // 19, 14.5, 10, 5.5, 1: the lower layer wins the tie.
    assert_eq!(of(10, 5, 100, 20.0), [19, 15, 10, 5, 1]);
    // 7 - 2 l / 3 for l = 0..=6: two remainders of 1/3 and 2/3 each, equal only if taken exactly.
    assert_eq!(of(5, 7, 100, 5.0 / 3.0), [7, 6, 6, 5, 4, 4, 3]);
    assert_eq!(of(10, 1, 100, 20.0), [10]);
    assert_eq!(of(10, 3, 10, 20.0), [10, 10, 10]);
    assert_eq!(of(10, 3, 7, 20.0), [7, 7, 7]);
    assert_eq!(of(0, 3, 0, 20.0), [0, 0, 0]);
    assert_eq!(of(10, 3, 100, 1.0), [10, 10, 10]);
}

#[test]
fn a_steep_pyramid_never_passes_the_total() {
    for beta in [1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 1e6] {
        let counts = pyramid(128, 32, 10_000, beta).unwrap();
        assert_eq!(sum(&counts), 4096, "beta {beta}");
        assert!(counts.is_sorted_by(|a, b| a >= b) && counts[31] >= 1);
    }
}

#[test]
fn a_pyramid_of_nothing_or_upside_down_is_refused() {
    assert!(pyramid(0, 4, 10, 20.0).unwrap_err().to_string().contains("allowed: at least 1"));
    for beta in [0.5, f64::NAN, f64::INFINITY, 1e7] {
        assert!(pyramid(4, 4, 10, beta).unwrap_err().to_string().starts_with("beta is "));
    }
}

#[test]
fn heads_share_by_score_worked_by_hand() {
    let heads: [&[f32]; 3] = [&[9.0, 8.0, 7.0, 1.0], &[6.0, 1.0, 1.0, 1.0], &[0.5, 0.4, 0.3, 0.2]];
    assert_eq!(ada(&heads, 6, 1), [3, 2, 1], "9 8 7, 6 and the lower place of the ones, the floor's 0.5");
    assert_eq!(ada(&heads, 6, 2), [2, 2, 2]);
    assert_eq!(ada(&heads, 4, 0), [3, 1, 0]);
    assert_eq!(ada(&heads, 99, 1), [4, 4, 4]);
    assert_eq!(ada(&heads, 6, 5), [2, 2, 2], "a floor above the mean is the mean");
    assert_eq!(ada(&[&[1.0, 1.0], &[1.0, 1.0]], 3, 0), [2, 1], "the lower place first, then the lower head");
    assert_eq!(ada(&[&[], &[1.0, 2.0]], 2, 1), [0, 2], "an empty head's floor goes to the others");
}

#[test]
fn numbers_in_proportion_worked_by_hand() {
    let much = [100; 4];
    assert_eq!(apportion(&[1.0, 2.0, 3.0, 4.0], 20, 1, &much), [2, 4, 6, 8]);
    assert_eq!(apportion(&[1.0, 2.0, 3.0, 4.0], 20, 4, &much), [4, 4, 5, 7], "12 left for 3 : 4");
    assert_eq!(apportion(&[1.0, 2.0, 3.0, 4.0], 20, 1, &[100, 100, 3, 5]), [4, 8, 3, 5]);
    assert_eq!(apportion(&[1.0; 4], 6, 0, &much), [2, 2, 1, 1], "the lower place wins ties");
    assert_eq!(apportion(&[0.0; 4], 8, 0, &much), [2; 4]);
    assert_eq!(apportion(&[f64::NAN, 1.0], 8, 0, &[100; 2]), [4; 2]);
    assert_eq!(apportion(&[0.0, 1.0], 8, 1, &[100, 5]), [3, 5], "what the others cannot take");
    assert_eq!(apportion(&[1e-300, 1e300], 8, 1, &[100; 2]), [1, 7]);
    assert!(apportion(&[], 8, 1, &[]).is_empty());
}

#[test]
fn the_entropy_of_equal_attention_is_the_logarithm_of_the_tokens() {
    assert!((entropy_of(&[0.5; 8]) - 8f64.ln()).abs() < 1e-12);
    assert!((entropy_of(&[3.0, 1.0]) - (0.75 * (4f64 / 3.0).ln() + 0.25 * 4f64.ln())).abs() < 1e-7);
    assert_eq!((entropy_of(&[0.0, 2.0, 0.0]), entropy_of(&[0.0; 3]), entropy_of(&[])), (0.0, 0.0, 0.0));
}

#[test]
fn heads_that_look_widely_get_more() {
    let (wide, narrow) = ([0.125f32; 8], [1.0f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let all = 0..8;
    let heads = [&wide, &narrow].map(|a| Head { scores: a, attention: a, droppable: &all });
    assert_eq!(Sharing::Entropy { floor: 0.2 }.counts(&heads, 4), [7, 1]);
    assert_eq!(
        Sharing::Ada { floor: 0.25 }.counts(&heads, 4),
        [7, 1],
        "1 and seven times 1/8 are the best eight"
    );
    assert_eq!(Sharing::Uniform.counts(&heads, 4), [4, 4]);
    assert_eq!(
        Sharing::Entropy { floor: 1.0 }.select(&heads, 2),
        [[0, 1], [0, 1]],
        "equal scores: the lower place"
    );
}

#[test]
fn budgets_become_tokens() {
    let none = |_| panic!("bytes are not asked for");
    let resolve = |budget: Budget| budget.resolve("evict.budget", 1000, 37, none).unwrap();
    assert_eq!(resolve(Budget::Tokens(64)), 64);
    assert_eq!(resolve(Budget::Tokens(5000)), 5000);
    assert_eq!(resolve(Budget::Share(0.29)), 290);
    assert_eq!(resolve(Budget::Share(1.0)), 1000);
    assert_eq!(
        resolve(Budget::Share(0.001)),
        37,
        "a short prompt's share is what is protected, and one more"
    );
}

#[test]
fn bytes_become_the_most_tokens_that_fit() {
    // Pages of 16 tokens and 8 KiB, 4 KiB of other things.
    let bytes_of = |tokens: usize| 4096 + 8192 * tokens.div_ceil(16) as u64;
    let resolve = |bytes| Budget::Bytes(bytes).resolve("evict.budget", 50, 20, bytes_of);
    assert_eq!(resolve(1 << 20).unwrap(), 127 * 16);
    assert_eq!(resolve(4096 + 8192 * 2).unwrap(), 32);
    assert_eq!(resolve(4096 + 8192 * 3 - 1).unwrap(), 32);
    let error = resolve(4096 + 8192 * 2 - 1).unwrap_err().to_string();
    assert_eq!(error, "plan: evict.budget is 20479 bytes; allowed: at least 20480 bytes: 20 tokens per head");
    assert_eq!(Budget::Bytes(9).resolve("evict.budget", 1, 1, |_| 9).unwrap(), u32::MAX as usize);
}

#[test]
fn text_with_a_unit_is_bytes() {
    let parse = |text: &str| text.parse::<Budget>();
    for (text, bytes) in [("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("4096B", 4096), ("2kib", 2048)] {
        assert_eq!(parse(text).unwrap(), Budget::Bytes(bytes), "{text}");
    }
    for text in
        ["", "512", "0.25", "MiB", "-1MiB", "0B", "3 apples", "1ib", "1e3", "NaN GiB", "99999999TiB", "1m"]
    {
        assert!(parse(text).is_err(), "{text}");
    }
}

proptest! {
    #[test]
    fn a_pyramid_has_its_sum_and_falls_and_stays_within_the_prompt(
        mean in 1usize..3000, layers in 1usize..80, prompt in 1usize..8000, beta in 1.0f64..100.0,
        whole in any::<bool>(),
    ) {
        let beta = if whole { beta.round() } else { beta };
        let counts = pyramid(mean, layers, prompt, beta).unwrap();
        prop_assert_eq!(counts.len(), layers);
        prop_assert_eq!(sum(&counts), layers * mean.min(prompt));
        prop_assert!(counts.iter().all(|&n| n >= 1 && n <= prompt));
        prop_assert!(counts.is_sorted_by(|a, b| a >= b), "{:?}", counts);
    }

    #[test]
    fn a_pyramid_rounds_each_layer_by_less_than_one_token(
        mean in 1usize..3000, layers in 2usize..80, more in 1usize..8000, beta in 1.0f64..100.0,
    ) {
        let (m, prompt) = (mean as f64, mean + more);
        let mut last = (m / beta).max(1.0);
        if 2.0 * m - last > prompt as f64 {
            last = 2.0 * m - prompt as f64;
        }
        let slope = 2.0 * (m - last) / (layers - 1) as f64;
        for (layer, &n) in pyramid(mean, layers, prompt, beta).unwrap().iter().enumerate() {
            let exact = 2.0 * m - last - slope * layer as f64;
            prop_assert!((n as f64 - exact).abs() < 1.0 + 1e-9, "layer {}: {} for {}", layer, n, exact);
        }
    }

    #[test]
    fn heads_share_a_budget_exactly_and_keep_their_floor(
        heads in prop::collection::vec(prop::collection::vec((0u8..6).prop_map(f32::from), 1..60), 1..9),
        picks in 1usize..80, floor in 0.0f64..=1.0,
    ) {
        let slices: Vec<&[f32]> = heads.iter().map(Vec::as_slice).collect();
        let least = floor_tokens(floor, picks);
        let counts = ada(&slices, picks * heads.len(), least);
        prop_assert_eq!(sum(&counts), (picks * heads.len()).min(heads.iter().map(Vec::len).sum()));
        let kept = |h: usize| select(&heads[h], 0..heads[h].len(), counts[h]);
        // What went is never better than what another head kept above its floor.
        for h in 0..heads.len() {
            let len = heads[h].len();
            prop_assert!(counts[h] <= len && counts[h] >= least.min(len) && least as f64 >= floor * picks as f64);
            let mut lost: Vec<f32> = (0..len).filter(|i| !kept(h).contains(i)).map(|i| heads[h][i]).collect();
            lost.sort_by(|a, b| b.total_cmp(a));
            for other in (0..heads.len()).filter(|&o| counts[o] > least) {
                let worst = kept(other).iter().map(|&i| heads[other][i]).fold(f32::INFINITY, f32::min);
                prop_assert!(lost.first().is_none_or(|&best| best <= worst));
            }
        }
    }

    #[test]
    fn proportions_have_their_sum_within_floor_and_caps(
        items in prop::collection::vec((0.0f64..10.0, 0usize..300), 1..60), mean in 0usize..200, floor in 0usize..50,
    ) {
        let (weights, caps): (Vec<f64>, Vec<usize>) = items.into_iter().unzip();
        let n = weights.len();
        let counts = apportion(&weights, mean * n, floor, &caps);
        prop_assert_eq!(sum(&counts), (mean * n).min(caps.iter().sum()));
        let floor = floor.min(mean).min(sum(&counts) / n);
        for i in 0..n {
            prop_assert!(counts[i] <= caps[i] && counts[i] >= floor.min(caps[i]));
            for j in (0..n).filter(|&j| weights[j] > weights[i] && caps[j] >= caps[i]) {
                prop_assert!(counts[j] + 1 >= counts[i], "a larger weight has two less: {:?}", counts);
            }
        }
    }

    #[test]
    fn the_tokens_of_a_byte_budget_fit_and_one_more_does_not(
        bytes in 1000u64..1_000_000, per in 1u64..500, page in 1usize..70, least in 1usize..3,
    ) {
        let bytes_of = |tokens: usize| per * (tokens.div_ceil(page) * page) as u64;
        prop_assume!(bytes_of(least) <= bytes);
        let tokens = Budget::Bytes(bytes).resolve("evict.budget", 10, least, bytes_of).unwrap();
        prop_assert!(tokens >= least && bytes_of(tokens) <= bytes && bytes_of(tokens + 1) > bytes);
    }
}
