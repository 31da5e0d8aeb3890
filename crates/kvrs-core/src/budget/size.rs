//! A budget in tokens, as a share of the prompt, or in bytes.

use crate::{Error, Result};
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

const ALLOWED: &str = "tokens per head as a whole number, a share of the prompt in (0, 1], or bytes per sequence \
                       as {\"bytes\": n} or text like \"512MiB\"";
/// More tokens than a sequence can have.
const MAX_TOKENS: usize = u32::MAX as usize;

/// How much of a sequence is kept, sinks and window included.
///
/// Written as a whole number (tokens), a number with a point (share) or `{"bytes": n}`; text like `"512MiB"` is read
/// too.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Tokens per layer and key-value head.
    Tokens(usize),
    /// Share of the prompt's tokens, in (0, 1].
    Share(f64),
    /// Bytes per sequence, everything counted.
    Bytes(u64),
}

impl Budget {
    /// Checks the budget of the field `field`; `least` is the fewest tokens it must have.
    pub(crate) fn validate(&self, field: &str, least: usize) -> Result<()> {
        match *self {
            Self::Tokens(n) if n < least => {
                let allowed = format!("at least {least} tokens (sinks, newest tokens and one more)");
                Err(Error::plan(field, format!("{n} tokens"), allowed))
            }
            Self::Tokens(n) if n > MAX_TOKENS => {
                Err(Error::plan(field, format!("{n} tokens"), format!("up to {MAX_TOKENS} tokens")))
            }
            Self::Share(x) if !(x > 0.0 && x <= 1.0) => Err(Error::plan(field, x, "a share in (0, 1]")),
            Self::Bytes(0) => Err(Error::plan(field, "0 bytes", "a number of bytes above 0")),
            _ => Ok(()),
        }
    }

    /// Tokens per head, at least `least`, for a prompt of `prompt` tokens; may be more than the prompt has.
    ///
    /// A share is rounded to the nearest token. `bytes_of(n)` is what a sequence takes that keeps n tokens per head;
    /// it must never fall, and is called for a budget in bytes only, which becomes the most tokens that fit.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field `field` if `least` tokens take more bytes than the budget.
    pub fn resolve(
        &self,
        field: &str,
        prompt: usize,
        least: usize,
        bytes_of: impl Fn(usize) -> u64,
    ) -> Result<usize> {
        let tokens = match *self {
            Self::Tokens(n) => n,
            Self::Share(x) => (x * prompt as f64).round() as usize,
            Self::Bytes(bytes) => {
                let need = bytes_of(least);
                if need > bytes {
                    let allowed = format!("at least {need} bytes: {least} tokens per head");
                    return Err(Error::plan(field, format!("{bytes} bytes"), allowed));
                }
                most_within(bytes, least, bytes_of)
            }
        };
        Ok(tokens.max(least))
    }
}

/// The most tokens that take no more than `bytes`; `least` do.
fn most_within(bytes: u64, least: usize, bytes_of: impl Fn(usize) -> u64) -> usize {
    let mut fits = least;
    let mut step = 1;
    while fits < MAX_TOKENS && bytes_of(fits + step) <= bytes {
        fits += step;
        step *= 2;
    }
    while step > 0 {
        if bytes_of(fits + step) <= bytes {
            fits += step;
        }
        step /= 2;
    }
    fits.min(MAX_TOKENS.max(least))
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(n) => write!(f, "{n}"),
            Self::Share(x) => write!(f, "{x:?}"),
            Self::Bytes(n) => write!(f, "{n}B"),
        }
    }
}

impl FromStr for Budget {
    type Err = Error;

    /// Reads bytes with a unit ("512MiB", "1.5 GB", "4096B").
    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::argument("budget", format!("{text:?}"), ALLOWED);
        let unit = text.contains(|c: char| c.is_ascii_alphabetic());
        bytes_of(text).filter(|_| unit).map(Self::Bytes).ok_or_else(wrong)
    }
}

/// Bytes above 0 as text: digits, with or without a unit ("4096", "512 MiB", "1.5GB").
#[must_use]
pub fn bytes_of(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let number: f64 = text[..split].parse().ok()?;
    let bytes = (number * unit(text[split..].trim())?).round();
    // Up to 2^63 bytes, where f64 to u64 cannot saturate.
    (1.0..9.2e18).contains(&bytes).then_some(bytes as u64)
}

fn unit(name: &str) -> Option<f64> {
    let name = name.to_ascii_lowercase();
    let (base, prefix) = match (name.strip_suffix("ib"), name.strip_suffix('b')) {
        (Some(prefix), _) if !prefix.is_empty() => (1024.0f64, prefix),
        (_, Some(prefix)) => (1000.0, prefix),
        (_, None) if name.is_empty() => (1000.0, ""),
        _ => return None,
    };
    let power = ["", "k", "m", "g", "t"].iter().position(|&u| u == prefix)?;
    Some(base.powi(power as i32))
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Tokens(n) => serializer.serialize_u64(*n as u64),
            Self::Share(x) => serializer.serialize_f64(*x),
            Self::Bytes(n) => {
                let mut map = serializer.serialize_map(Some(1))?;
                map.serialize_entry("bytes", n)?;
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(AnyBudget)
    }
}

struct AnyBudget;

impl<'de> Visitor<'de> for AnyBudget {
    type Value = Budget;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "budget: {ALLOWED}")
    }

    fn visit_u64<E: serde::de::Error>(self, n: u64) -> std::result::Result<Budget, E> {
        Ok(Budget::Tokens(usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn visit_i64<E: serde::de::Error>(self, n: i64) -> std::result::Result<Budget, E> {
        let wrong = |_| E::invalid_value(serde::de::Unexpected::Signed(n), &self);
        u64::try_from(n).map_err(wrong).and_then(|n| self.visit_u64(n))
    }

    fn visit_f64<E: serde::de::Error>(self, x: f64) -> std::result::Result<Budget, E> {
        Ok(Budget::Share(x))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Budget, E> {
        text.parse().map_err(|_| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Budget, A::Error> {
        use serde::de::Error as _;
        let only = |_: &mut A| A::Error::custom(format!("budget: a map with one key; {ALLOWED}"));
        let Some((key, bytes)) = map.next_entry::<String, u64>()? else { return Err(only(&mut map)) };
        if key != "bytes" || map.next_key::<String>()?.is_some() {
            return Err(only(&mut map));
        }
        Ok(Budget::Bytes(bytes))
    }
}
