use super::*;
use proptest::prelude::*;

const CURVE: Curve = Curve::GAUSSIAN;

fn runs(weights: &[f64]) -> (Vec<u32>, Vec<u8>) {
    (vec![16; weights.len()], vec![0; weights.len()])
}

/// The least distortion of all allocations within a budget.
fn brute_force(items: &Items<'_>, budget: u64, curve: &Curve) -> f64 {
    let mut least = f64::INFINITY;
    let mut widths = items.floors.to_vec();
    loop {
        if items.bits(&widths) <= budget {
            least = least.min(items.distortion(&widths, curve));
        }
        let Some(item) = (0..widths.len()).find(|&i| widths[i] < MOST_BITS) else { return least };
        widths[item] += 1;
        widths[..item].copy_from_slice(&items.floors[..item]);
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * (a.abs() + b.abs())
}

proptest! {
    #[test]
    fn exact_equals_brute_force(
        items in prop::collection::vec((0.0..10.0f64, 1..4u32, 0..3u8), 1..5),
        spare in 0..60u64,
        curve in prop::collection::vec(0.0..1.0f64, 9),
    ) {
        let (weights, (channels, floors)): (Vec<_>, (Vec<_>, Vec<_>)) =
            items.into_iter().map(|(w, n, f)| (w, (n * 8, f))).unzip();
        let mut curve = curve;
        curve.sort_by(|a, b| b.total_cmp(a));
        let curve = Curve::new(&curve).unwrap();
        let items = Items::new(&weights, &channels, &floors).unwrap();
        let budget = items.bits(&floors) + 4 * spare;
        let widths = exact(&items, budget, &curve).unwrap();
        prop_assert!(items.bits(&widths) <= budget);
        prop_assert!(widths.iter().zip(&floors).all(|(b, floor)| b >= floor));
        prop_assert!(close(items.distortion(&widths, &curve), brute_force(&items, budget, &curve)));
    }

    #[test]
    fn greedy_is_never_worse_than_bisection_and_equals_the_optimum(
        logs in prop::collection::vec((-12.0..6.0f64, 0..3u8), 1..40),
        share in 0.0..1.0f64,
    ) {
        let weights: Vec<f64> = logs.iter().map(|(log, _)| log.exp2()).collect();
        let (channels, _) = runs(&weights);
        let floors: Vec<u8> = logs.iter().map(|&(_, floor)| floor).collect();
        let items = Items::new(&weights, &channels, &floors).unwrap();
        let least = items.bits(&floors);
        let budget = least + (share * (128 * weights.len() as u64 - least) as f64) as u64;
        let [ours, water, best] = [
            greedy(&items, budget, &CURVE).unwrap(),
            waterfill(&items, budget).unwrap(),
            exact(&items, budget, &CURVE).unwrap(),
        ];
        for widths in [&ours, &water, &best] {
            prop_assert!(items.bits(widths) <= budget);
            prop_assert!(widths.iter().zip(&floors).all(|(b, floor)| b >= floor));
        }
        let [ours, water, best] = [ours, water, best].map(|widths| items.distortion(&widths, &CURVE));
        prop_assert!(ours <= water * (1.0 + 1e-12), "greedy {ours}, bisection {water}");
        prop_assert!(close(ours, best), "greedy {ours}, optimum {best}");
    }

    #[test]
    fn budgets_are_met_to_within_one_run(
        logs in prop::collection::vec(-12.0..6.0f64, 1..60),
        budget in 0..10_000u64,
    ) {
        let weights: Vec<f64> = logs.iter().map(|log| log.exp2()).collect();
        let (channels, floors) = runs(&weights);
        let items = Items::new(&weights, &channels, &floors).unwrap();
        let reachable = budget.min(128 * weights.len() as u64);
        for widths in [greedy(&items, budget, &CURVE).unwrap(), exact(&items, budget, &CURVE).unwrap()] {
            let bits = items.bits(&widths);
            prop_assert!(bits <= budget && bits + 16 > reachable, "{bits} of {budget}");
        }
        let bits = items.bits(&waterfill(&items, budget).unwrap());
        prop_assert!(bits <= budget && bits + 16 > reachable, "bisection: {bits} of {budget}");
    }

    #[test]
    fn a_fitted_model_gives_back_the_line_that_made_the_numbers(alpha in 0.1..3.0f64, beta in 1.5..5.0f64) {
        let bits: Vec<f64> = (1..=5).map(f64::from).collect();
        let distortion: Vec<f64> = bits.iter().map(|b| alpha * beta.powf(-b)).collect();
        let model = RateModel::fit(&bits, &distortion).unwrap();
        prop_assert!((model.alpha - alpha).abs() < 1e-9 && (model.beta - beta).abs() < 1e-9);
        prop_assert!(model.curve().is_ok());
    }
}

#[test]
fn equal_gains_go_to_the_lower_item() {
    let weights = [1.0; 4];
    let (channels, floors) = runs(&weights);
    let items = Items::new(&weights, &channels, &floors).unwrap();
    assert_eq!(greedy(&items, 16 * 6, &CURVE).unwrap(), [2, 2, 1, 1]);
    assert_eq!(waterfill(&items, 16 * 6).unwrap(), [2, 2, 1, 1]);
}

#[test]
fn greedy_fills_a_small_case_as_by_hand() {
    // Gains in thousandths: 4 * (637, 246, 83) and 1 * (637, 246, 83): 2546, 984, 637, 332, ..
    let items = Items::new(&[4.0, 1.0], &[16, 16], &[0, 0]).unwrap();
    assert_eq!(greedy(&items, 16 * 2, &CURVE).unwrap(), [2, 0]);
    assert_eq!(greedy(&items, 16 * 4, &CURVE).unwrap(), [3, 1]);
}

#[test]
fn floors_are_kept_and_weights_of_zero_get_no_more() {
    let items = Items::new(&[0.0, 8.0, 1.0], &[16, 16, 16], &[1, 0, 0]).unwrap();
    for widths in [greedy(&items, 48, &CURVE).unwrap(), exact(&items, 48, &CURVE).unwrap()] {
        assert_eq!(widths, [1, 2, 0]);
    }
    assert_eq!(waterfill(&items, 48).unwrap()[0], 1);
    let zeros = Items::new(&[0.0, 0.0], &[16, 16], &[0, 1]).unwrap();
    assert_eq!(waterfill(&zeros, 64).unwrap(), [0, 1]);
}

#[test]
fn a_fitted_model_allocates_as_its_curve_says() {
    let model = RateModel { alpha: 1.2, beta: 3.6 };
    let curve = model.curve().unwrap();
    let items = Items::new(&[4.0, 1.0, 0.2], &[16; 3], &[0; 3]).unwrap();
    let best = brute_force(&items, 96, &curve);
    assert!(close(items.distortion(&greedy(&items, 96, &curve).unwrap(), &curve), best));
    assert!(close(items.distortion(&exact(&items, 96, &curve).unwrap(), &curve), best));
}

#[test]
fn messages_name_the_argument_its_value_and_what_is_allowed() {
    let of = |error: Error| error.to_string();
    let items = Items::new(&[1.0, 1.0], &[16, 16], &[1, 2]).unwrap();
    let below = "budget is 40 bits a token; allowed: 48 bits a token or more, which the floors take";
    assert_eq!(of(greedy(&items, 40, &CURVE).unwrap_err()), below);
    assert_eq!(of(waterfill(&items, 40).unwrap_err()), below);
    assert_eq!(of(exact(&items, 40, &CURVE).unwrap_err()), below);
    assert_eq!(of(Items::new(&[], &[], &[]).unwrap_err()), "weights is empty; allowed: one number or more");
    let negative = Items::new(&[1.0, -2.0], &[16, 16], &[0, 0]).unwrap_err();
    assert_eq!(of(negative), "weights[1] is -2; allowed: a finite number from 0 on");
    let nan = Items::new(&[f64::NAN], &[16], &[0]).unwrap_err();
    assert_eq!(of(nan), "weights[0] is NaN; allowed: a finite number from 0 on");
    let short = Items::new(&[1.0], &[16, 16], &[0]).unwrap_err();
    assert_eq!(of(short), "channels has shape [2]; allowed: [1], as weights");
    assert_eq!(of(Items::new(&[1.0], &[16], &[9]).unwrap_err()), "floors[0] is 9; allowed: 0 to 8");
    let rising = Curve::new(&[1.0, 0.5, 0.6, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]).unwrap_err();
    assert_eq!(of(rising), "curve[2] is 0.6; allowed: at most curve[1], 0.5");
    let flat = RateModel::fit(&[1.0, 2.0], &[0.5, 0.5]).unwrap_err();
    assert_eq!(of(flat), "distortion is not falling with bits; allowed: less distortion for more bits");
}
