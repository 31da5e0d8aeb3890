//! Sequences on disk: one file each, framed as safetensors (`docs/files.md` draws it).
//!
//! A file holds the bytes of the pages as they are, and small arrays that say what stands in them. Loading checks all
//! of it against the plan before the store changes, reads sections straight into their pages, and maps nothing: a file
//! that is cut while it is read is an error, not a crash.

mod atomic;
mod check;
mod deflate;
mod header;
mod inspect;
mod read;
mod source;
mod state;
mod write;

pub(crate) use atomic::replace;
pub use inspect::{SequenceFile, inspect};

use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Error, Result, SeqId};
use std::path::Path;

/// How the pages of a file are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compress {
    /// As they lie in memory.
    #[default]
    None,
    /// DEFLATE, without loss: the cold tier.
    Deflate,
}

impl Compress {
    /// Its name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Deflate => "deflate",
        }
    }
}

impl<B: Backend> KvStore<B> {
    /// Saves a sequence as one file, replacing an older one as a whole; the sequence goes on.
    ///
    /// The file is written beside the path, synced and renamed: whatever happens, the path holds the old or the new
    /// file. What is compressed is held in memory until it is written.
    ///
    /// # Errors
    /// [`Error::Sequence`] for an unknown id, an open prompt or a sequence in the middle of a step,
    /// [`Error::Io`] naming the path if it cannot be written; the old file and nothing else is there then.
    pub fn save(&self, path: &Path, seq: SeqId, compress: Compress) -> Result<()> {
        replace(path, |file| self.save_to(&path.display().to_string(), file, seq, compress))
    }

    /// Loads a sequence that a store of the same plan saved, and returns its id in this store.
    ///
    /// It goes on as the saved one would have: codes, statistics of policies and pages are the same. The store may have
    /// other sequences and another number of threads. A store that has no tokens yet takes the types of the file's.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read; [`Error::Format`] naming the field if it is cut, damaged, of another
    /// plan, type or version, or says what no store can have saved; [`Error::Capacity`] if its pages do not fit. The
    /// store is as it was then, and no more than twice the file's size and 16 MiB was ever allocated for it.
    pub fn load(&self, path: &Path) -> Result<SeqId> {
        let what = path.display().to_string();
        let file = std::fs::File::open(path);
        let file = file.map_err(|e| Error::Io { what: format!("reading {what}"), got: e.to_string() })?;
        self.load_from(&what, file)
    }
}
