//! Whole numbers in proportion to weights, with a floor and caps.

/// Whole numbers in proportion to `weights`, at least `floor`, at most `caps[i]`, of sum `min(total, sum of caps)`.
///
/// Fractions are rounded by largest remainder, ties to the lower place. The floor gives way where a cap or an equal
/// share of `total` is lower. Weights that are all zero, or not finite, count as equal.
///
/// # Panics
/// If there are not as many caps as weights.
#[must_use]
pub fn apportion(weights: &[f64], total: usize, floor: usize, caps: &[usize]) -> Vec<usize> {
    assert_eq!(weights.len(), caps.len(), "one cap per weight");
    let total = total.min(caps.iter().sum());
    let floor = floor.min(total.checked_div(weights.len()).unwrap_or(0));
    let exact = shares(weights, total, floor, caps);
    let mut counts: Vec<usize> = exact.iter().map(|&x| x as usize).collect();
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let mut missing = total - counts.iter().sum::<usize>();
    // A second round is needed only where the sum of the shares fell short of the total by rounding.
    while missing > 0 {
        for &i in &order {
            if missing > 0 && counts[i] < caps[i] {
                counts[i] += 1;
                missing -= 1;
            }
        }
    }
    counts
}

/// Real numbers `clamp(slope * weight, floor, cap)` of sum `total`, or just below.
fn shares(weights: &[f64], total: usize, floor: usize, caps: &[usize]) -> Vec<f64> {
    let usable = weights.iter().all(|w| w.is_finite() && *w >= 0.0) && weights.iter().any(|&w| w > 0.0);
    let weight = |i: usize| if usable { weights[i] } else { 1.0 };
    let share = |slope: f64, i: usize| (slope * weight(i)).max(floor.min(caps[i]) as f64).min(caps[i] as f64);
    let at = |slope: f64| (0..caps.len()).map(|i| share(slope, i)).collect::<Vec<f64>>();
    // Positive doubles are ordered as their bits: the largest slope that does not pass the total, to the last bit.
    let (mut low, mut high) = (0, f64::MAX.to_bits());
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if at(f64::from_bits(middle)).iter().sum::<f64>() <= total as f64 {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    at(f64::from_bits(low))
}
