//! TurboQuant (Zandieh et al., 2025, arXiv:2504.19874): length, rotation, Lloyd-Max codes; the `prod` variant gives one
//! of its bits to the signs of a random sketch of what the codes miss, which makes inner products unbiased.
//!
//! Where we differ from the paper: one gaussian book with int8 levels serves all dimensions, and the scale of
//! keys makes inner products unbiased (EDEN's), which costs no bit and errs far less than the `prod` variant.
//! Rates between integers give the first rotated channels one bit more, under one rotation and one scale.
//!
//! The sketch of `prod` acts on rotated channels `P x`: it is one more run of 1-bit codes, whose slice of the prepared
//! query is `S P q` and whose scale is the length of what it sketches. One bit alone is a sketch of the vector.

use super::parts::{Parts, runs};
use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext, sketch};
use crate::codebook::Book;
use crate::desc::{MAX_CHANNELS, RunDesc, Side};
use crate::encode::{ScaledEncoder, SketchEncoder};
use crate::rng;
use crate::scale::ScaleRule;
use crate::transform::{ROUNDS, Transform};
use kvrs_core::Result;
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "turboquant",
    paper: "Zandieh et al., 2025, arXiv:2504.19874",
    parameters: &[
        Parameter { name: "bits", allowed: "a number in 1..=8", default: None },
        Parameter { name: "variant", allowed: "mse, prod", default: Some("\"mse\"") },
        Parameter {
            name: "scale",
            allowed: "None (unbiased for keys, norm for values; raw for prod), raw, norm, lsq, unbiased",
            default: Some("null"),
        },
        Parameter { name: "rotation", allowed: "hadamard, dense", default: Some("\"hadamard\"") },
        Parameter {
            name: "sketch",
            allowed: "gaussian, orthogonal (with variant prod)",
            default: Some("\"gaussian\""),
        },
    ],
    check: |settings| Parsed::new(settings).map(drop),
    build,
};

/// Settings of known meaning.
struct Parsed {
    bits: f64,
    scale: Option<ScaleRule>,
    dense: bool,
    /// The sketch of the `prod` variant.
    sketch: Option<sketch::Kind>,
}

impl Parsed {
    fn new(settings: &Settings<'_>) -> Result<Self> {
        let bits = settings.number("bits")?;
        if !(1.0..=8.0).contains(&bits) {
            return Err(settings.error("bits", bits, settings.parameter("bits").allowed));
        }
        let prod = settings.choice("variant", &[("mse", false), ("prod", true)])?;
        let rules = [ScaleRule::Raw, ScaleRule::Norm, ScaleRule::Lsq, ScaleRule::Unbiased];
        let scale = match settings.get("scale") {
            None => None,
            Some(_) => Some(settings.choice("scale", &rules.map(|rule| (rule.name(), rule)))?),
        };
        let dense = settings.choice("rotation", &[("hadamard", false), ("dense", true)])?;
        let kinds = [("gaussian", sketch::Kind::Gaussian), ("orthogonal", sketch::Kind::Orthogonal)];
        let kind = settings.choice("sketch", &kinds)?;
        if prod && bits.fract() != 0.0 {
            return Err(settings.error("bits", bits, "an integer in 1..=8 for the variant prod"));
        }
        if prod && scale.is_some_and(|rule| rule != ScaleRule::Raw) {
            return Err(settings.error(
                "scale",
                scale.map_or("", ScaleRule::name),
                "None or raw for the variant prod",
            ));
        }
        if !prod && kind != sketch::Kind::Gaussian {
            return Err(settings.error(
                "sketch",
                "orthogonal",
                "gaussian for the variant mse, which has no sketch",
            ));
        }
        Ok(Self { bits, scale, dense, sketch: prod.then_some(kind) })
    }
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    let parsed = Parsed::new(settings)?;
    if let Some(kind) = parsed.sketch {
        return build_prod(settings, context, cache, &parsed, kind);
    }
    let parts = split(parsed.bits, context.d).ok_or_else(|| {
        let allowed = format!("for {} channels: {}", context.d, packable(context.d));
        settings.error("bits", parsed.bits, allowed)
    })?;
    let default = if context.side == Side::Key { ScaleRule::Unbiased } else { ScaleRule::Norm };
    let parts: Vec<_> = parts.iter().map(|&(width, channels)| (Book::gaussian(width), channels)).collect();
    let (runs, lut8) = runs(&parts);
    let books = parts.iter().map(|(book, _)| **book).collect();
    let encoder = Arc::new(ScaledEncoder { rule: parsed.scale.unwrap_or(default), books });
    let transform = rotation(context, parsed.dense, cache);
    Parts { runs, scales: 1, lut8, transform, encoder }.build(context, cache)
}

/// One bit less by the mse variant with its raw scale, then the sketch of the rest under the rest's length.
fn build_prod(
    settings: &Settings<'_>,
    context: &SideContext<'_>,
    cache: &mut ConstantCache,
    parsed: &Parsed,
    kind: sketch::Kind,
) -> Result<SideBuild> {
    let (width, n) = (parsed.bits as u32 - 1, context.d.next_multiple_of(16));
    let sketch = sketch::square(kind, context, cache);
    let step = kind.step(context.d, context.d);
    if width == 0 {
        let encoder = Arc::new(SketchEncoder { first: None, sketch: sketch.clone(), live: context.d });
        let runs = vec![sketch::run(n, 0, step)];
        let lut8 = sketch::LEVELS.to_vec();
        return Parts { runs, scales: 1, lut8, transform: sketch, encoder }.build(context, cache);
    }
    if 2 * n > MAX_CHANNELS {
        let allowed = format!("mse for more than {} channels", MAX_CHANNELS / 2);
        return Err(settings.error("variant", "prod", allowed));
    }
    let (rotation, book) = (rotation(context, parsed.dense, cache), Book::gaussian(width));
    let (mut runs, mut lut8) = runs(&[(book, n)]);
    let transform = sketch::behind(&rotation, &sketch, (kind, parsed.dense), context, cache);
    let signs = RunDesc { at: runs[0].channels * 2 * width, scale: 1, ..sketch::run(n, n, step) };
    runs.push(RunDesc { lut_at: lut8.len() as u32, ..signs });
    lut8.extend(sketch::LEVELS);
    let encoder = Arc::new(SketchEncoder { first: Some((rotation, *book)), sketch, live: context.d });
    Parts { runs, scales: 2, lut8, transform, encoder }.build(context, cache)
}

/// Hadamard where `d` is a power of two from 16 on, unless dense is asked for; dense otherwise.
pub(super) fn rotation(context: &SideContext<'_>, dense: bool, cache: &mut ConstantCache) -> Transform {
    let d = context.d;
    if !dense && d.is_power_of_two() && d >= 16 {
        let signs = cache.floats(rng::ROTATION_SIGNS, context, |key| rng::signs(key, ROUNDS, d));
        return Transform::Hadamard { signs, d };
    }
    let n = d.next_multiple_of(16);
    let matrix = cache.floats(rng::DENSE_ROTATION, context, |key| {
        let mut matrix = rng::dense_rotation(key, d);
        matrix.resize(n * d, 0.0);
        matrix
    });
    Transform::Dense { matrix, d, n }
}

/// Widths and channels: `frac * d` channels, rounded to 16 (the larger at a tie), have one bit more.
/// `None` if that is no channel or all of them.
fn split(bits: f64, d: usize) -> Option<Vec<(u32, usize)>> {
    let (low, n) = (bits.floor(), d.next_multiple_of(16));
    if bits - low <= 0.0 {
        return Some(vec![(bits as u32, n)]);
    }
    // Exact: bits are at least 1, so the fraction is a multiple of 2^-52.
    let one = 1u128 << 52;
    let fraction = ((bits - low) * one as f64) as u128;
    let high = ((fraction * d as u128 + 8 * one) / (16 * one)) as usize * 16;
    (0 < high && high < n).then(|| vec![(low as u32 + 1, high), (low as u32, n - high)])
}

/// The rates that `d` channels can hold, for messages.
fn packable(d: usize) -> String {
    let blocks = d.div_ceil(16);
    if blocks == 1 {
        return "the integers 1..=8".to_owned();
    }
    let fractions: Vec<String> = (1..blocks).map(|k| format!("{:.4}", (16 * k) as f64 / d as f64)).collect();
    let fractions: Vec<&str> =
        fractions.iter().map(|f| f.trim_start_matches('0').trim_end_matches('0')).collect();
    format!("an integer in 1..=8, or in 1..=7 plus the nearest of {}", fractions.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractional_rates_give_the_first_channels_one_bit_more() {
        assert_eq!(split(2.5, 128).unwrap(), [(3, 64), (2, 64)]);
        assert_eq!(split(2.25, 128).unwrap(), [(3, 32), (2, 96)]);
        assert_eq!(split(7.5, 80).unwrap(), [(8, 48), (7, 32)]); // 40 channels: a tie goes up
        assert_eq!(split(4.0, 72).unwrap(), [(4, 80)]);
        assert_eq!(split(2.05, 64), None);
        assert_eq!(split(2.5, 16), None);
    }

    #[test]
    fn messages_list_the_rates_that_fit() {
        assert_eq!(packable(64), "an integer in 1..=8, or in 1..=7 plus the nearest of .25, .5, .75");
        assert_eq!(packable(16), "the integers 1..=8");
    }
}
