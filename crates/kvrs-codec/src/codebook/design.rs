//! Derives the codebooks from the gaussian density: Lloyd-Max (Lloyd, 1982; Max, 1960), then the best int8 levels.

use super::Book;
use std::f64::consts::{FRAC_1_SQRT_2, TAU};

/// Probability below `x`.
fn mass_below(x: f64) -> f64 {
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

fn density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / TAU.sqrt()
}

/// Mass and first moment of each cell of the positive levels, both signs counted.
fn cells(levels: &[f64]) -> Vec<(f64, f64)> {
    let edge = |i: usize| match i {
        0 => 0.0,
        i if i == levels.len() => f64::INFINITY,
        i => f64::midpoint(levels[i - 1], levels[i]),
    };
    let cell = |(a, b): (f64, f64)| (2.0 * (mass_below(b) - mass_below(a)), 2.0 * (density(a) - density(b)));
    (0..levels.len()).map(|i| cell((edge(i), edge(i + 1)))).collect()
}

/// Mean squared error of coding a unit gaussian with the nearest level.
fn distortion(levels: &[f64]) -> f64 {
    1.0 + levels
        .iter()
        .zip(cells(levels))
        .map(|(c, (mass, moment))| c * c * mass - 2.0 * c * moment)
        .sum::<f64>()
}

/// Lloyd's iteration from uniform levels until none moves by 1e-10, sped up by extrapolation along the last move.
fn lloyd_max(bits: u32) -> Vec<f64> {
    let k = 1usize << (bits - 1);
    let mut c: Vec<f64> = (0..k).map(|i| (i as f64 + 0.5) * 3.0 / k as f64).collect();
    loop {
        let next: Vec<f64> = cells(&c).iter().map(|(mass, moment)| moment / mass).collect();
        let moved = next.iter().zip(&c).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        if moved < 1e-10 {
            return next;
        }
        let ahead: Vec<f64> = next.iter().zip(&c).map(|(a, b)| a + 0.9 * (a - b)).collect();
        c = if ahead.is_sorted() { ahead } else { next };
    }
}

fn scaled(levels: &[i32], step: f64) -> Vec<f64> {
    levels.iter().map(|&n| f64::from(n) * step).collect()
}

/// The step of least distortion for these levels, and that distortion.
fn best_step(levels: &[i32], mut step: f64, rounds: usize) -> (f64, f64) {
    for _ in 0..rounds {
        let cells = cells(&scaled(levels, step));
        let sum = |f: fn(f64, (f64, f64)) -> f64| -> f64 {
            levels.iter().zip(&cells).map(|(&n, &cell)| f(f64::from(n), cell)).sum()
        };
        step = sum(|n, cell| n * cell.1) / sum(|n, cell| n * n * cell.0);
    }
    (distortion(&scaled(levels, step)), step)
}

/// Moves levels by one while that lowers the distortion: one level, or two at a time.
fn descend(mut levels: Vec<i32>, step: f64, limit: i32) -> (f64, Vec<i32>, f64) {
    let (mut loss, mut step) = best_step(&levels, step, 12);
    loop {
        let best = neighbours(&levels, limit)
            .into_iter()
            .map(|near| (best_step(&near, step, 3), near))
            .min_by(|a, b| a.0.0.total_cmp(&b.0.0))
            .expect("a book has neighbours");
        if best.0.0 >= loss - 1e-13 {
            return (loss, levels, step);
        }
        ((loss, step), levels) = best;
    }
}

fn neighbours(levels: &[i32], limit: i32) -> Vec<Vec<i32>> {
    let both = |i: usize| [(i, -1), (i, 1)];
    let singles: Vec<(usize, i32)> = (0..levels.len()).flat_map(both).collect();
    let moved = |steps: &[(usize, i32)]| {
        let mut near = levels.to_vec();
        for &(i, by) in steps {
            near[i] += by;
        }
        near
    };
    let pairs = singles.iter().enumerate().flat_map(|(i, a)| singles[i + 1..].iter().map(move |b| [*a, *b]));
    let sound = |n: &Vec<i32>| n[0] > 0 && n.windows(2).all(|w| w[0] < w[1]) && n[n.len() - 1] <= limit;
    singles.iter().map(|a| moved(&[*a])).chain(pairs.map(|p| moved(&p))).filter(sound).collect()
}

/// The best int8 levels: the Lloyd-Max book rounded at every top level, the best few improved by [`descend`].
/// Books of equal distortion (the same ratios) rank by their top level, the largest first.
fn int_levels(bits: u32) -> (Vec<i32>, f64) {
    let limit = if bits <= 4 { 63 } else { 127 };
    let c = lloyd_max(bits);
    let top = c[c.len() - 1];
    let rounded = |t: i32| {
        let factor = f64::from(t) / 20.0 / top;
        let levels: Vec<i32> = c.iter().map(|x| (x * factor).round_ties_even() as i32).collect();
        (levels[0] > 0 && levels.windows(2).all(|w| w[0] < w[1])).then_some(levels)
    };
    let mut starts: Vec<Vec<i32>> = (limit * 10..=limit * 20).filter_map(rounded).collect();
    starts.dedup();
    let rank = |loss: f64, levels: &[i32]| ((loss * 1e12).round() as i64, -levels[levels.len() - 1]);
    let start_step = |levels: &[i32]| top / f64::from(levels[levels.len() - 1]);
    starts.sort_by_cached_key(|levels| rank(best_step(levels, start_step(levels), 12).0, levels));
    let tries = if bits <= 4 { 8 } else { 1 };
    let found = starts.into_iter().take(tries).map(|levels| {
        let step = start_step(&levels);
        descend(levels, step, limit)
    });
    let (_, levels, step) = found.min_by_key(|(loss, levels, _)| rank(*loss, levels)).expect("a start");
    let step = best_step(&levels, step, 400).1;
    (levels, step)
}

fn typed(bits: u32) -> Vec<i32> {
    let book = Book::gaussian(bits);
    book.levels[book.levels.len() / 2..].iter().map(|&n| i32::from(n)).collect()
}

#[test]
fn the_levels_up_to_4_bits_and_of_6_are_what_the_density_gives() {
    for bits in [1, 2, 3, 4, 6] {
        let (levels, step) = int_levels(bits);
        assert_eq!(levels, typed(bits), "{bits} bits");
        assert!((step / f64::from(Book::gaussian(bits).step) - 1.0).abs() < 5e-4, "{bits} bits: {step}");
    }
}

#[test]
fn each_book_loses_what_its_documentation_says() {
    for (bits, loss) in [(1, 1e-9), (2, 1.5e-6), (3, 4.5e-4), (4, 2.25e-3), (5, 6.8e-3), (6, 2.05e-2)] {
        let book = distortion(&scaled(&typed(bits), f64::from(Book::gaussian(bits).step)));
        let best = distortion(&lloyd_max(bits));
        let got = book / best - 1.0;
        assert!((-1e-9..loss).contains(&got), "{bits} bits lose {got:e}");
    }
}

#[test]
fn the_best_5_bit_book_is_hardly_better_than_ours() {
    // The descent ends at levels up to 97, .1 % lower.
    let (levels, step) = int_levels(5);
    let ours = distortion(&scaled(&typed(5), f64::from(Book::gaussian(5).step)));
    assert!(ours / distortion(&scaled(&levels, step)) < 1.0011);
}

#[test]
fn the_uniform_steps_are_the_best_to_their_digits() {
    for (bits, error) in [(7, 3.04e-4), (8, 8.8e-5)] {
        let at = |step: f64| {
            let half: Vec<f64> = (0..1 << (bits - 1)).map(|i| (f64::from(i) + 0.5) * step).collect();
            distortion(&half)
        };
        let step = f64::from(Book::gaussian(bits).step);
        assert!((at(step) / error - 1.0).abs() < 5e-3, "{bits} bits: {}", at(step));
        assert!(at(step) < at(step * 1.01) && at(step) < at(step * 0.99));
    }
}
