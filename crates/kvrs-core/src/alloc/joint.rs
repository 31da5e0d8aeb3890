//! One optimum over tokens and rates: which tokens go, and at how many bits the others are stored.
//!
//! Each token has a distortion for every way to store it, and for going; a Lagrangian weighs them against bytes. Its
//! solutions are the steps of the tokens' lower convex hulls in the order of their gain per byte.

use super::Curve;

/// A way to store a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Bytes of one token.
    pub bytes: u32,
    /// Squared error of keys, as a share of their own square.
    pub key: f64,
    /// The same of values.
    pub value: f64,
}

impl Rate {
    /// The mean distortion of runs `(width, channels)` by `curve`.
    #[must_use]
    pub fn error_of(runs: impl Iterator<Item = (u8, u32)>, curve: &Curve) -> f64 {
        let (sum, n) = runs.fold((0.0, 0.0), |(sum, n), (width, channels)| {
            (sum + f64::from(channels) * curve.at(width), n + f64::from(channels))
        });
        sum / f64::max(n, 1.0)
    }
}

/// What hangs on a token: squared changes of the attention output.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stake {
    /// If the token goes.
    pub gone: f64,
    /// If its key errs by its own length.
    pub key: f64,
    /// If its value errs by its own length.
    pub value: f64,
}

/// How a token ends.
pub type Choice = u8;

/// The token goes; `i` above stores it at rate `i - 1`.
pub const GONE: Choice = 0;

/// A step on a token's hull.
struct Step {
    token: usize,
    to: Choice,
    bytes: u64,
    /// Distortion that it saves per byte.
    gain: f64,
}

/// The predicted distortion of a choice.
#[must_use]
pub fn distortion(stakes: &[Stake], rates: &[Rate], choices: &[Choice]) -> f64 {
    stakes.iter().zip(choices).map(|(stake, choice)| stake.at(rates, *choice)).sum()
}

/// Bytes of a choice.
#[must_use]
pub fn bytes(rates: &[Rate], choices: &[Choice]) -> u64 {
    choices.iter().map(|choice| cost(rates, *choice)).sum()
}

/// The choice for every token that takes at most `budget` bytes: never worse in predicted distortion than the best
/// tokens at any one rate, or all tokens at one.
///
/// Ties go to the lower token.
#[must_use]
pub fn joint(stakes: &[Stake], rates: &[Rate], budget: u64) -> Vec<Choice> {
    let mut best = hulls(stakes, rates, budget);
    let mut least = distortion(stakes, rates, &best);
    for rate in 1..=rates.len() {
        let choices = one_rate(stakes, rates, rate as Choice, budget);
        let found = distortion(stakes, rates, &choices);
        if found < least {
            (best, least) = (choices, found);
        }
    }
    best
}

/// The best tokens at one rate: eviction alone.
#[must_use]
pub fn one_rate(stakes: &[Stake], rates: &[Rate], rate: Choice, budget: u64) -> Vec<Choice> {
    let gain = |token: &usize| stakes[*token].gone - stakes[*token].at(rates, rate);
    let mut tokens: Vec<usize> = (0..stakes.len()).filter(|token| gain(token) > 0.0).collect();
    tokens.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    let room = budget / cost(rates, rate).max(1);
    let mut choices = vec![GONE; stakes.len()];
    let room = usize::try_from(room).unwrap_or(usize::MAX);
    tokens.into_iter().take(room).for_each(|token| choices[token] = rate);
    choices
}

fn hulls(stakes: &[Stake], rates: &[Rate], budget: u64) -> Vec<Choice> {
    let mut steps = Vec::with_capacity(stakes.len() * rates.len());
    for (token, stake) in stakes.iter().enumerate() {
        hull(token, stake, rates, &mut steps);
    }
    // A stable sort: the steps of a token lie in the order of falling gain, and equal gains in that of tokens.
    steps.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    let mut choices = vec![GONE; stakes.len()];
    let mut stopped = vec![false; stakes.len()];
    let mut left = budget;
    for step in steps {
        if stopped[step.token] || step.bytes > left {
            stopped[step.token] = true;
            continue;
        }
        left -= step.bytes;
        choices[step.token] = step.to;
    }
    choices
}

/// The steps of a token's lower convex hull, each from the point before.
fn hull(token: usize, stake: &Stake, rates: &[Rate], steps: &mut Vec<Step>) {
    let mut at = GONE;
    loop {
        let (bytes, error) = (cost(rates, at), stake.at(rates, at));
        let next = (1..=rates.len() as Choice).filter(|next| cost(rates, *next) > bytes).map(|next| {
            let more = cost(rates, next) - bytes;
            Step { token, to: next, bytes: more, gain: (error - stake.at(rates, next)) / more as f64 }
        });
        let best = next.filter(|step| step.gain > 0.0).reduce(|a, b| if b.gain > a.gain { b } else { a });
        let Some(step) = best else { return };
        at = step.to;
        steps.push(step);
    }
}

fn cost(rates: &[Rate], choice: Choice) -> u64 {
    if choice == GONE { 0 } else { rates[usize::from(choice) - 1].bytes.into() }
}

impl Stake {
    fn at(&self, rates: &[Rate], choice: Choice) -> f64 {
        if choice == GONE {
            return self.gone;
        }
        let rate = &rates[usize::from(choice) - 1];
        self.key * rate.key + self.value * rate.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RATES: [Rate; 2] =
        [Rate { bytes: 40, key: 0.12, value: 0.12 }, Rate { bytes: 70, key: 0.01, value: 0.01 }];

    fn stakes(n: usize) -> impl Strategy<Value = Vec<Stake>> {
        let stake = (0.0..4.0f64, 0.0..4.0f64, 0.0..4.0f64).prop_map(|(gone, key, value)| Stake {
            gone: gone.exp(),
            key,
            value,
        });
        proptest::collection::vec(stake, 1..n)
    }

    /// The least distortion over every choice within the budget.
    fn brute_force(stakes: &[Stake], rates: &[Rate], budget: u64) -> f64 {
        let ways = rates.len() + 1;
        let choice = |code: usize| -> Vec<Choice> {
            (0..stakes.len()).map(|i| (code / ways.pow(i as u32) % ways) as Choice).collect()
        };
        let all = (0..ways.pow(stakes.len() as u32)).map(choice);
        let fits = all.filter(|choices| bytes(rates, choices) <= budget);
        fits.map(|choices| distortion(stakes, rates, &choices)).fold(f64::MAX, f64::min)
    }

    #[test]
    fn important_tokens_get_more_bits_and_idle_ones_go() {
        let stake = |x: f64| Stake { gone: x, key: x, value: x };
        let choices = joint(&[stake(0.001), stake(100.0), stake(1.0), stake(0.5)], &RATES, 150);
        assert_eq!(choices, [0, 2, 1, 1]);
        assert_eq!(joint(&[stake(1.0); 3], &RATES, 0), [GONE; 3]);
        assert_eq!(joint(&[stake(1.0); 3], &RATES, 1000), [2; 3]);
        assert!(joint(&[], &RATES, 9).is_empty());
    }

    #[test]
    fn errors_of_runs_are_their_mean_by_channels() {
        let error = Rate::error_of([(2, 16), (1, 48)].into_iter(), &Curve::GAUSSIAN);
        assert!((error - (0.11748 + 3.0 * 0.36338) / 4.0).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_nothing_simpler_is_better(stakes in stakes(60), budget in 0u64..4000) {
            let choices = joint(&stakes, &RATES, budget);
            prop_assert!(bytes(&RATES, &choices) <= budget);
            let found = distortion(&stakes, &RATES, &choices);
            for rate in 1..=2 {
                let alone = one_rate(&stakes, &RATES, rate, budget);
                prop_assert!(found <= distortion(&stakes, &RATES, &alone));
                let all = vec![rate; stakes.len()];
                if bytes(&RATES, &all) <= budget {
                    prop_assert!(found <= distortion(&stakes, &RATES, &all));
                }
            }
        }

        #[test]
        fn it_is_the_optimum_but_for_one_token(stakes in stakes(7), budget in 0u64..500) {
            let found = distortion(&stakes, &RATES, &joint(&stakes, &RATES, budget));
            let least = brute_force(&stakes, &RATES, budget);
            let most = stakes.iter().map(|stake| stake.gone.max(stake.key + stake.value)).fold(0.0, f64::max);
            prop_assert!(found >= least - 1e-9 && found <= least + most);
        }
    }
}
