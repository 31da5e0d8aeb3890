//! The head of a sequence file: the fields of its metadata and the list of its sections.

use super::Compress;
use crate::hash::LAYOUT_VERSION;
use kvrs_codec::Dtype;
use kvrs_core::{Error, Result};
use safetensors::tensor::Metadata;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const FORMAT: &str = "kvrs-sequence";
/// Version of the format.
pub(super) const VERSION: &str = "1";
/// The section that ends every file.
pub(super) const CHECKSUMS: &str = "checksums";
const ABSENT: &str = "none";
/// Largest position that a sequence may start at.
const MAX_START: i64 = 1 << 40;

/// What the metadata says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fields {
    /// Hash of the plan.
    pub(super) plan: String,
    /// Tokens of the sequence.
    pub(super) tokens: usize,
    /// Position of its first token; `None` if it has none.
    pub(super) start: Option<i64>,
    /// Input and window type of the store; `None` before its first append.
    pub(super) types: Option<(Dtype, Dtype)>,
    pub(super) compress: Compress,
}

/// A section: a tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Section {
    pub(super) name: String,
    pub(super) dtype: safetensors::Dtype,
    pub(super) shape: Vec<usize>,
}

impl Section {
    pub(super) fn new(name: impl Into<String>, dtype: safetensors::Dtype, shape: &[usize]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl Fields {
    /// The fields as strings, by name.
    fn entries(&self) -> [(&'static str, String); 9] {
        let names =
            |pick: fn(&(Dtype, Dtype)) -> Dtype| self.types.as_ref().map_or(ABSENT, |t| pick(t).name());
        [
            ("format", FORMAT.to_owned()),
            ("version", VERSION.to_owned()),
            ("layout", LAYOUT_VERSION.to_string()),
            ("plan", self.plan.clone()),
            ("tokens", self.tokens.to_string()),
            ("start", self.start.map_or_else(|| ABSENT.to_owned(), |start| start.to_string())),
            ("input", names(|t| t.0).to_owned()),
            ("window", names(|t| t.1).to_owned()),
            ("compress", self.compress.name().to_owned()),
        ]
    }

    /// Length and header of a safetensors file with these sections, one behind the other.
    pub(super) fn header(&self, sections: &[Section]) -> Vec<u8> {
        let text = |(name, value): (&str, String)| (name.to_owned(), Value::String(value));
        let fields: Map<String, Value> = self.entries().into_iter().map(text).collect();
        let mut header = Map::from_iter([("__metadata__".to_owned(), Value::Object(fields))]);
        let mut at = 0;
        for section in sections {
            let end = at + section.bytes();
            let info = json!({
                "dtype": format!("{:?}", section.dtype), "shape": section.shape, "data_offsets": [at, end]
            });
            header.insert(section.name.clone(), info);
            at = end;
        }
        let mut json = Value::Object(header).to_string();
        json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
        [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
    }

    fn parse(what: &str, found: &HashMap<String, String>) -> Result<Self> {
        let field = |name: &str| found.get(name).map_or("nothing", String::as_str);
        let expect = |name: &str, expected: &str| {
            let got = field(name);
            if got == expected { Ok(()) } else { Err(wrong(what, name, got, expected)) }
        };
        expect("format", FORMAT)?;
        expect("version", VERSION)?;
        expect("layout", &LAYOUT_VERSION.to_string())?;
        let (tokens, start) = (field("tokens"), field("start"));
        let fields = Self {
            plan: field("plan").to_owned(),
            tokens: tokens.parse().map_err(|_| wrong(what, "tokens", tokens, "a whole number"))?,
            start: parse_start(what, start)?,
            types: parse_types(what, field("input"), field("window"))?,
            compress: parse_compress(what, field("compress"))?,
        };
        let entries = fields.entries();
        for (name, value) in &entries {
            expect(name, value)?;
        }
        let known = |name: &str| entries.iter().any(|(known, _)| *known == name);
        match found.keys().filter(|name| !known(name)).min() {
            Some(name) => Err(wrong(what, name, field(name), "no such field")),
            None => Ok(fields),
        }
    }
}

fn parse_start(what: &str, text: &str) -> Result<Option<i64>> {
    if text == ABSENT {
        return Ok(None);
    }
    let start = text.parse().ok().filter(|start| (0..MAX_START).contains(start));
    start.map(Some).ok_or_else(|| wrong(what, "start", text, "none, or 0 up to 2^40"))
}

fn parse_types(what: &str, input: &str, window: &str) -> Result<Option<(Dtype, Dtype)>> {
    if (input, window) == (ABSENT, ABSENT) {
        return Ok(None);
    }
    let parse = |name: &str, text: &str| {
        Dtype::from_name(text).ok_or_else(|| wrong(what, name, text, "float16, bfloat16 or float32"))
    };
    let (input, kept) = (parse("input", input)?, parse("window", window)?);
    if kept == Dtype::F32 || (input != Dtype::F32 && input != kept) {
        return Err(wrong(what, "window", window, "a 16-bit type, that of the input unless it is float32"));
    }
    Ok(Some((input, kept)))
}

fn parse_compress(what: &str, text: &str) -> Result<Compress> {
    let known = [Compress::None, Compress::Deflate].into_iter().find(|known| known.name() == text);
    known.ok_or_else(|| wrong(what, "compress", text, "none or deflate"))
}

/// An error that names a field of the metadata.
pub(super) fn wrong(what: &str, field: &str, got: impl ToString, allowed: impl ToString) -> Error {
    Error::format(format!("{what}: {field}"), got, allowed)
}

/// Parses a header (its length in front); sections come in the order of their bytes, without gap or overlap.
pub(super) fn parse(what: &str, header: &[u8]) -> Result<(Fields, Vec<Section>)> {
    let broken = |e: &dyn std::fmt::Display| Error::format(what, e, "the header of a safetensors file");
    let metadata: Metadata =
        serde_json::from_slice(header.get(8..).unwrap_or_default()).map_err(|e| broken(&e))?;
    let none = HashMap::new();
    let fields = Fields::parse(what, metadata.metadata().as_ref().unwrap_or(&none))?;
    let section = |name: String| {
        let info = metadata.info(&name).expect("a listed tensor has its description");
        Section { dtype: info.dtype, shape: info.shape.clone(), name }
    };
    Ok((fields, metadata.offset_keys().into_iter().map(section).collect()))
}
