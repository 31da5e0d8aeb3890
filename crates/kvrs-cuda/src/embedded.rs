//! The compiled kernels inside the library: which code runs on which device?
//!
//! `kernels_cu/tools/archive.py` describes the format. Each part is deflated on its own, so that a device inflates
//! what it loads.

use crate::status::Version;
use kvrs_core::{Error, Result};
use std::fmt;
use std::sync::OnceLock;

static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.kvcuda"));
const MAGIC: &[u8] = b"KVCUDA01";

/// What code was compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Machine code of a compute capability; runs on those of the same major number that are not older.
    Cubin(Version),
    /// PTX, which the driver compiles for its device or newer ones.
    Ptx(Version),
}

impl Target {
    fn parse(text: &str) -> Option<Self> {
        let version = |digits: &str| {
            let number: u32 = digits.parse().ok()?;
            Some(Version { major: number / 10, minor: number % 10 })
        };
        match text.split_once('_')? {
            ("sm", digits) => version(digits).map(Self::Cubin),
            ("compute", digits) => version(digits).map(Self::Ptx),
            _ => None,
        }
    }

    /// Whether the code runs on a device of that compute capability.
    fn runs_on(self, capability: Version) -> bool {
        match self {
            Self::Cubin(own) => own.major == capability.major && own.minor <= capability.minor,
            Self::Ptx(own) => own <= capability,
        }
    }

    /// Machine code before PTX, newer before older.
    fn preference(self) -> (bool, Version) {
        match self {
            Self::Cubin(own) => (true, own),
            Self::Ptx(own) => (false, own),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubin(own) => write!(f, "sm_{}{}", own.major, own.minor),
            Self::Ptx(own) => write!(f, "compute_{}{}", own.major, own.minor),
        }
    }
}

/// One kernel file compiled for one target.
#[derive(Debug)]
pub struct Module {
    file: String,
    target: Target,
    kernels: Vec<String>,
    packed: &'static [u8],
    size: usize,
}

impl Module {
    /// The names of its kernels.
    #[must_use]
    pub fn kernels(&self) -> &[String] {
        &self.kernels
    }

    /// The code as the driver loads it: a cubin, or PTX with a final zero.
    ///
    /// # Errors
    /// [`Error::Format`] if it is damaged.
    pub fn code(&self) -> Result<Vec<u8>> {
        match miniz_oxide::inflate::decompress_to_vec_with_limit(self.packed, self.size) {
            Ok(mut code) if code.len() == self.size => {
                if matches!(self.target, Target::Ptx(_)) {
                    code.push(0);
                }
                Ok(code)
            }
            _ => Err(Error::format(
                format_args!("the CUDA code {} for {}", self.file, self.target),
                "damaged bytes",
                format_args!("{} bytes after inflation", self.size),
            )),
        }
    }
}

/// The compiled kernels for all targets.
#[derive(Debug)]
pub struct Archive {
    compiler: String,
    modules: Vec<Module>,
}

impl Archive {
    /// What was embedded when the library was built, or why nothing was.
    ///
    /// # Errors
    /// The reason, as a sentence without a subject.
    pub fn embedded() -> std::result::Result<&'static Self, &'static String> {
        static PARSED: OnceLock<std::result::Result<Archive, String>> = OnceLock::new();
        let parse = || match env!("KVRS_CUDA_ABSENT") {
            "" => Self::parse(EMBEDDED).map_err(|error| error.to_string()),
            why => Err(why.to_owned()),
        };
        PARSED.get_or_init(parse).as_ref()
    }

    /// Reads an archive.
    ///
    /// # Errors
    /// [`Error::Format`] if it is none, or cut.
    pub fn parse(bytes: &'static [u8]) -> Result<Self> {
        Self::read(bytes).ok_or_else(|| {
            Error::format(
                "the archive of CUDA kernels",
                format_args!("{} bytes", bytes.len()),
                "a whole archive",
            )
        })
    }

    fn read(bytes: &'static [u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (index, parts) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let mut archive = Self { compiler: String::new(), modules: Vec::new() };
        for line in std::str::from_utf8(index).ok()?.lines() {
            match line.split_once(' ')? {
                ("compiler", name) => name.clone_into(&mut archive.compiler),
                ("module", fields) => archive.modules.push(module(fields, parts)?),
                _ => {}
            }
        }
        Some(archive)
    }

    /// What the kernels were compiled with.
    #[must_use]
    pub fn compiler(&self) -> &str {
        &self.compiler
    }

    /// What they were compiled for, in the order of the archive.
    #[must_use]
    pub fn targets(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.modules.iter().map(|module| module.target.to_string()) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The target that suits a device best, if any runs on it.
    #[must_use]
    pub fn target_for(&self, capability: Version) -> Option<Target> {
        let targets = self.modules.iter().map(|module| module.target);
        targets.filter(|target| target.runs_on(capability)).max_by_key(|target| target.preference())
    }

    /// The code that holds a kernel for a target.
    #[must_use]
    pub fn module(&self, kernel: &str, target: Target) -> Option<&Module> {
        let mut modules = self.modules.iter().filter(|module| module.target == target);
        modules.find(|module| module.kernels.iter().any(|name| name == kernel))
    }
}

/// `FILE TARGET OFFSET PACKED SIZE KERNEL,KERNEL,...`
fn module(fields: &str, parts: &'static [u8]) -> Option<Module> {
    let fields: Vec<&str> = fields.split(' ').collect();
    let [file, target, at, packed, size, kernels] = fields[..] else { return None };
    let (at, packed): (usize, usize) = (at.parse().ok()?, packed.parse().ok()?);
    Some(Module {
        file: file.to_owned(),
        target: Target::parse(target)?,
        kernels: kernels.split(',').map(str::to_owned).collect(),
        packed: parts.get(at..at.checked_add(packed)?)?,
        size: size.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(lines: &str, parts: &[u8]) -> &'static [u8] {
        let length = (lines.len() as u32).to_le_bytes();
        Box::leak([MAGIC, &length, lines.as_bytes(), parts].concat().into_boxed_slice())
    }

    fn of_targets(names: &[&str]) -> Archive {
        let lines: Vec<String> = names.iter().map(|name| format!("module a {name} 0 0 0 k\n")).collect();
        Archive::parse(archive(&lines.concat(), &[])).unwrap()
    }

    fn chosen(names: &[&str], major: u32, minor: u32) -> Option<String> {
        of_targets(names).target_for(Version { major, minor }).map(|target| target.to_string())
    }

    #[test]
    fn a_device_gets_the_newest_machine_code_of_its_own_family_and_else_ptx() {
        let all = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120"];
        for (capability, target) in [
            ((8, 0), "sm_80"),
            ((8, 6), "sm_80"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90"),
            ((10, 3), "sm_100"),
            ((12, 0), "sm_120"),
            ((12, 1), "sm_120"),
            ((13, 0), "compute_120"),
        ] {
            assert_eq!(chosen(&all, capability.0, capability.1).as_deref(), Some(target), "{capability:?}");
        }
        assert_eq!(chosen(&all, 7, 5), None);
        assert_eq!(chosen(&all, 11, 0), None);
    }

    #[test]
    fn code_is_inflated_and_ptx_ends_with_a_zero() {
        let packed = miniz_oxide::deflate::compress_to_vec(b"some code, some code", 9);
        let n = packed.len();
        let lines = format!(
            "source 0\ncompiler NVRTC 12.8\nmodule a sm_80 0 {n} 20 k,l\nmodule a compute_120 0 {n} 20 k,l\n"
        );
        let found = Archive::parse(archive(&lines, &packed)).unwrap();
        assert_eq!(
            (found.compiler(), found.targets()),
            ("NVRTC 12.8", vec!["sm_80".into(), "compute_120".into()])
        );
        let [cubin, ptx] = ["sm_80", "compute_120"].map(|name| Target::parse(name).unwrap());
        assert_eq!(found.module("l", cubin).unwrap().code().unwrap(), b"some code, some code");
        assert_eq!(found.module("k", ptx).unwrap().code().unwrap(), b"some code, some code\0");
        assert!(found.module("m", cubin).is_none());
    }

    #[test]
    fn damaged_archives_and_parts_are_errors() {
        let packed = miniz_oxide::deflate::compress_to_vec(b"some code", 9);
        let whole = archive(&format!("module a sm_80 0 {} 8 k\n", packed.len()), &packed);
        for cut in 0..whole.len() {
            assert!(Archive::parse(&whole[..cut]).is_err(), "{cut}");
        }
        let found = Archive::parse(whole).unwrap();
        let error = found.modules[0].code().unwrap_err().to_string();
        assert_eq!(error, "the CUDA code a for sm_80: found damaged bytes; expected 8 bytes after inflation");
    }
}
