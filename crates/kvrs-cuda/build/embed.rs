//! Embeds the compiled kernels: the archive that `make cuda` leaves, if it is as new as the kernels.

use std::fs;
use std::path::{Path, PathBuf};

/// Another archive than `build/cuda/kernels.kvcuda`, taken as it is.
const OTHER: &str = "KVRS_CUDA_KERNELS";

/// Puts the archive where `src/embedded.rs` includes it, or nothing and the reason: a build never fails for it.
pub(crate) fn run() {
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo:rerun-if-env-changed={OTHER}");
    let root = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../..");
    let (archive, absent) = match std::env::var_os(OTHER) {
        Some(path) => read(&PathBuf::from(path)).map_or_else(refused, |bytes| (bytes, String::new())),
        None => own(&root).map_or_else(refused, |bytes| (bytes, String::new())),
    };
    println!("cargo:rustc-env=KVRS_CUDA_ABSENT={absent}");
    let out = Path::new(&variable("OUT_DIR")).join("kernels.kvcuda");
    fs::write(out, archive).expect("OUT_DIR can be written");
}

fn refused(reason: String) -> (Vec<u8>, String) {
    println!("cargo:warning=no CUDA kernels are embedded: {reason}");
    (Vec::new(), reason)
}

fn variable(name: &str) -> String {
    std::env::var(name).expect("cargo sets it")
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    println!("cargo:rerun-if-changed={}", path.display());
    fs::read(path).map_err(|_| "`make cuda` had not compiled them".to_owned())
}

/// The archive of this source tree; one that older kernels were compiled to is refused.
fn own(root: &Path) -> Result<Vec<u8>, String> {
    let bytes = read(&root.join("build/cuda/kernels.kvcuda"))?;
    let folder = root.join("kernels_cu");
    println!("cargo:rerun-if-changed={}", folder.display());
    let hash = format!("source {:016x}\n", source_hash(&folder));
    match bytes.get(12..12 + hash.len()) {
        Some(found) if found == hash.as_bytes() => Ok(bytes),
        _ => Err("`make cuda` had compiled them before kernels_cu changed".to_owned()),
    }
}

/// FNV-1a over names and bytes of the sources, in the order of `kernels_cu/tools/archive.py`.
fn source_hash(folder: &Path) -> u64 {
    let sources = files(folder, "cu").into_iter().chain(files(&folder.join("include/kvrs"), "cuh"));
    let mut state = 0xcbf2_9ce4_8422_2325;
    for path in sources {
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        let bytes = fs::read(&path).unwrap_or_default();
        for byte in name.bytes().chain([0]).chain(bytes).chain([0]) {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    state
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    paths.sort();
    paths
}
