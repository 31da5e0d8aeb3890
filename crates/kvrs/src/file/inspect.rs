//! What a sequence file holds, from its header alone.

use super::source::Source;
use kvrs_core::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// Longest header that is read without a plan to say how long it may be.
const MOST: u64 = 64 << 20;

/// What a sequence file says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SequenceFile {
    /// Version of the format.
    pub version: &'static str,
    /// Hash of the plan that it belongs to.
    pub plan: String,
    /// Tokens of the sequence, dropped ones included.
    pub tokens: usize,
    /// Position of its first token.
    pub start: Option<i64>,
    /// 16-bit type of uncompressed tokens.
    pub window: Option<&'static str>,
    /// `none` or `deflate`.
    pub compress: &'static str,
    /// Layers.
    pub layers: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of sections by kind: `pages.0` holds 16-bit rows, `pages.1` the codes of the plan's codec.
    pub sections: BTreeMap<String, u64>,
}

/// Reads the header of a sequence file, and no page.
///
/// # Errors
/// [`Error::Io`] if it cannot be read, [`Error::Format`] if it is cut, of another version or not a sequence.
pub fn inspect(path: &Path) -> Result<SequenceFile> {
    let what = path.display().to_string();
    let file =
        File::open(path).map_err(|e| Error::Io { what: format!("reading {what}"), got: e.to_string() })?;
    let source = Source::open(&what, file, MOST)?;
    let mut sections = BTreeMap::new();
    for section in &source.sections {
        let mut parts = section.name.split('.');
        let kind = parts.next().unwrap_or_default();
        let class = parts.nth(2).map_or(String::new(), |class| format!(".{class}"));
        *sections.entry(format!("{kind}{class}")).or_default() += section.bytes() as u64;
    }
    let layers = source.sections.first().map_or(0, |section| section.shape.first().copied().unwrap_or(0));
    let fields = source.fields;
    Ok(SequenceFile {
        version: super::header::VERSION,
        plan: fields.plan,
        tokens: fields.tokens,
        start: fields.start,
        window: fields.types.map(|(_, window)| window.name()),
        compress: fields.compress.name(),
        layers,
        bytes: source.size,
        sections,
    })
}
