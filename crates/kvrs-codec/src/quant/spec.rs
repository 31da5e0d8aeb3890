//! Names and settings of codecs, as they stand in plans.

use super::{ConstantCache, Entry, Parameter, SideBuild, SideContext, entries, raw16, side_name, turboquant};
use kvrs_core::budget::Budget;
use kvrs_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A codec's settings as they stand in a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodecSpec {
    /// Name in the registry.
    pub name: String,
    /// Settings by name; those left out have their defaults.
    #[serde(default)]
    pub params: Map<String, Value>,
}

impl CodecSpec {
    /// TurboQuant with `bits` bits per channel and defaults otherwise.
    #[must_use]
    pub fn turboquant(bits: f64) -> Self {
        let params = std::iter::once(("bits".to_owned(), Value::from(bits))).collect();
        Self { name: turboquant::ENTRY.name.to_owned(), params }
    }

    /// Uncompressed 16-bit rows.
    #[must_use]
    pub fn raw16() -> Self {
        Self { name: raw16::ENTRY.name.to_owned(), params: Map::new() }
    }

    /// Builds one side of one head.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the codec or its setting, the value and what is allowed.
    pub fn build(&self, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
        let prefix = format!("{}[{}]", side_name(context.side), context.layer);
        let settings = self.settings(&prefix)?;
        (settings.entry.build)(&settings, context, cache)
    }

    fn settings(&self, prefix: &str) -> Result<Settings<'_>> {
        let names = || entries().iter().map(|e| e.name).collect::<Vec<_>>().join(", ");
        let entry = entries().iter().find(|e| e.name == self.name);
        let entry = entry.ok_or_else(|| Error::plan(format!("{prefix}.name"), &self.name, names()))?;
        let known = |name: &String| entry.parameters.iter().any(|p| p.name == name);
        if let Some(unknown) = self.params.keys().find(|name| !known(name)) {
            let allowed = entry.parameters.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
            let allowed = if allowed.is_empty() { "no settings".to_owned() } else { allowed };
            return Err(Error::plan(format!("a setting of {prefix}.{}", entry.name), unknown, allowed));
        }
        Ok(Settings { entry, prefix: prefix.to_owned(), params: &self.params })
    }
}

impl std::fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        for (i, (name, value)) in self.params.iter().filter(|(_, v)| !v.is_null()).enumerate() {
            write!(f, "{}{name}=", if i == 0 { "(" } else { ", " })?;
            match value {
                Value::String(text) => f.write_str(text)?,
                other => write!(f, "{other}")?,
            }
        }
        if self.params.values().all(Value::is_null) { Ok(()) } else { f.write_str(")") }
    }
}

/// Checks a codec's name and settings, as far as no layer is needed.
///
/// # Errors
/// [`Error::Plan`] naming the codec or its setting, the value and what is allowed.
pub fn check(spec: &CodecSpec) -> Result<()> {
    let settings = spec.settings("codec")?;
    (settings.entry.check)(&settings)
}

/// The settings of one codec, with their names for messages.
pub(super) struct Settings<'a> {
    entry: &'static Entry,
    prefix: String,
    params: &'a Map<String, Value>,
}

impl Settings<'_> {
    pub(super) fn error(&self, name: &str, got: impl ToString, allowed: impl ToString) -> Error {
        Error::plan(format!("{}.{name}", self.prefix), got, allowed)
    }

    /// Why a codec cannot be built without its array `name`.
    pub(super) fn uncalibrated(&self, name: &str) -> Error {
        let got = format!("{} without the array {name}", self.entry.name);
        Error::plan(&self.prefix, got, "with its data, out of kvrs.calibrate; other codecs without it")
    }

    pub(super) fn parameter(&self, name: &str) -> &'static Parameter {
        self.entry.parameters.iter().find(|p| p.name == name).expect("a codec reads its own parameters")
    }

    /// A given, non-null value.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.params.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn number(&self, name: &str) -> Result<f64> {
        let allowed = self.parameter(name).allowed;
        let value = self.get(name).ok_or_else(|| self.error(name, "missing", allowed))?;
        value.as_f64().ok_or_else(|| self.error(name, value, allowed))
    }

    /// A number that is `allowed`.
    pub(super) fn number_in(&self, name: &str, allowed: impl Fn(f64) -> bool) -> Result<f64> {
        let number = self.number(name)?;
        if allowed(number) { Ok(number) } else { Err(self.error(name, number, self.parameter(name).allowed)) }
    }

    /// A truth value; `default` if it is not given.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(name, value, self.parameter(name).allowed))
    }

    /// A number of bytes, plain or with a unit.
    pub(super) fn size(&self, name: &str) -> Result<u64> {
        let allowed = self.parameter(name).allowed;
        let value = self.get(name).ok_or_else(|| self.error(name, "missing", allowed))?;
        let size = match value {
            Value::String(text) => text.parse().ok().and_then(|budget| match budget {
                Budget::Bytes(bytes) => Some(bytes),
                _ => None,
            }),
            other => other.as_u64(),
        };
        size.filter(|bytes| *bytes > 0).ok_or_else(|| self.error(name, plain(value), allowed))
    }

    /// One of `choices`; the first if it is not given.
    pub(super) fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> Result<T> {
        let Some(value) = self.get(name) else { return Ok(choices[0].1) };
        let found = choices.iter().find(|(choice, _)| Some(*choice) == value.as_str());
        found.map(|(_, t)| *t).ok_or_else(|| self.error(name, plain(value), self.parameter(name).allowed))
    }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
