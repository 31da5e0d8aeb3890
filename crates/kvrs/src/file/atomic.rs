//! Replacing a file as a whole: a temporary file beside it is written, synced and renamed.

use kvrs_core::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Bytes that are collected before the system is called.
const BUFFER: usize = 1 << 20;
/// Saves of one path that may go on at the same time.
const MOST: usize = 64;

/// Replaces `path` by what `write` writes: whatever happens, the path holds the old or the new file, never a mix.
///
/// A save that is killed leaves its temporary file behind, which the next save of the same path uses again.
///
/// # Errors
/// [`Error::Io`] naming the path, and those of `write`; the old file and nothing else is left then.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> Result<()>) -> Result<()> {
    let failed = |e: io::Error| Error::Io { what: format!("writing {}", path.display()), got: e.to_string() };
    if path.is_dir() {
        return Err(failed(io::Error::from(io::ErrorKind::IsADirectory)));
    }
    let (temporary, file) = claim(path)?;
    let written = || {
        let mut buffered = BufWriter::with_capacity(BUFFER, &file);
        write(&mut buffered)?;
        buffered.flush().map_err(failed)?;
        drop(buffered);
        file.sync_all().and_then(|()| std::fs::rename(&temporary, path)).map_err(failed)
    };
    let result = written();
    if result.is_err() {
        let _ = std::fs::remove_file(&temporary);
        return result;
    }
    sync_folder(path);
    result
}

/// An empty temporary file beside `path` that no other save uses: locked until it is closed.
fn claim(path: &Path) -> Result<(PathBuf, File)> {
    let name = path.file_name().ok_or_else(|| Error::argument("path", path.display(), "a file"))?;
    let failed = |e: io::Error| Error::Io { what: format!("writing {}", path.display()), got: e.to_string() };
    for i in 0..MOST {
        let mut beside = name.to_owned();
        beside.push(format!(".{i}.tmp"));
        let temporary = path.with_file_name(beside);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&temporary);
        let file = file.map_err(failed)?;
        match file.try_lock() {
            Ok(()) if is_at(&file, &temporary) => {
                file.set_len(0).map_err(failed)?;
                return Ok((temporary, file));
            }
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(e)) => return Err(failed(e)),
        }
    }
    Err(failed(io::Error::other(format!("{MOST} saves of this file are under way"))))
}

/// Whether a path still names an open file, which another save may have renamed between opening and locking.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let (Ok(open), Ok(there)) = (file.metadata(), std::fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (there.dev(), there.ino())
}

#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

/// Makes the renaming last; a folder that cannot be synced does not fail a save that is already in place.
fn sync_folder(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}
