//! What a build can do with the machine that it runs on: why can I not use my GPU?

use kvrs_core::Error;
use std::fmt;

/// The oldest driver that kvrs runs on; code of CUDA 12.8 loads on all drivers of CUDA 12 and later.
pub const MINIMUM_DRIVER: Version = Version { major: 12, minor: 0 };

/// The oldest driver that compiles the embedded PTX, which only devices newer than the embedded code need.
pub const MINIMUM_DRIVER_OF_PTX: Version = Version { major: 12, minor: 8 };

/// A version of CUDA that a driver serves, or the compute capability of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Before the point.
    pub major: u32,
    /// Behind it.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device that the driver lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number, as in `cuda:0`.
    pub index: usize,
    /// What the driver calls it.
    pub name: String,
    /// Its compute capability.
    pub capability: Version,
    /// Its memory in bytes.
    pub memory: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
}

/// The first thing that is missing for a store on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missing {
    /// Built without the feature `cuda`.
    Feature,
    /// Built with it, but without compiled kernels; why.
    Kernels(String),
    /// No driver library can be loaded.
    Library,
    /// The driver library lacks a function.
    Function(&'static str),
    /// The driver refuses a call: the call, its code and its text.
    Call(&'static str, u32, String),
    /// The driver is too old.
    Driver {
        /// What it serves.
        found: Version,
        /// What is needed.
        needed: Version,
    },
    /// The driver lists no devices.
    Devices,
    /// The driver lists fewer devices.
    Device {
        /// The device that was asked for.
        index: usize,
        /// How many there are.
        found: usize,
    },
    /// None of the embedded kernels runs on the device.
    Code {
        /// Its name and compute capability.
        device: (String, Version),
        /// What is embedded.
        targets: Vec<String>,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Feature => f.write_str("this kvrs was built without CUDA (cargo feature `cuda`)"),
            Self::Kernels(why) => write!(f, "this kvrs was built without its CUDA kernels: {why}"),
            Self::Library => f.write_str("no NVIDIA driver: libcuda.so.1 cannot be loaded"),
            Self::Function(name) => write!(f, "the NVIDIA driver has no function {name}"),
            Self::Call(call, code, text) => {
                write!(f, "the NVIDIA driver answers {call} with error {code}: {text}")
            }
            Self::Driver { found, needed } => {
                write!(
                    f,
                    "the NVIDIA driver serves CUDA {found}, kvrs needs a driver for CUDA {needed} or newer"
                )
            }
            Self::Devices => f.write_str("the NVIDIA driver finds no device"),
            Self::Device { index, found } => {
                write!(f, "there is no device {index}, the driver finds {found}")
            }
            Self::Code { device: (name, capability), targets } => write!(
                f,
                "the kernels of this kvrs ({}) do not run on {name} of compute capability {capability}",
                targets.join(", ")
            ),
        }
    }
}

impl Missing {
    /// The error of a store that was to lie on device `index`; says what is missing.
    #[must_use]
    pub fn into_error(self, index: usize) -> Error {
        Error::device("the store", format_args!("cuda:{index}"), format_args!("cpu; {self}"))
    }
}

/// What is compiled in, which driver and devices were found, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether this is a build with the feature `cuda`.
    pub built: bool,
    /// What the embedded kernels were compiled with.
    pub compiler: Option<String>,
    /// What they were compiled for, as `sm_80`, or as `compute_120` where the driver compiles for newer devices.
    pub targets: Vec<String>,
    /// The version of CUDA that the driver serves.
    pub driver: Option<Version>,
    /// The devices that it lists.
    pub devices: Vec<DeviceInfo>,
    /// What is missing for a store on any device; `None` if nothing is.
    pub missing: Option<Missing>,
}

impl Status {
    /// Looks at the build, the driver and its devices; never panics, whatever the machine has.
    #[must_use]
    #[cfg(not(feature = "cuda"))]
    pub fn now() -> Self {
        let missing = Some(Missing::Feature);
        Self { built: false, compiler: None, targets: Vec::new(), driver: None, devices: Vec::new(), missing }
    }

    /// Looks at the build, the driver and its devices; never panics, whatever the machine has.
    #[must_use]
    #[cfg(feature = "cuda")]
    pub fn now() -> Self {
        let found = crate::probe::probe();
        let (archive, absent) = match crate::embedded::Archive::embedded() {
            Ok(archive) => (Some(archive), None),
            Err(why) => (None, Some(Missing::Kernels(why.clone()))),
        };
        Self {
            built: true,
            compiler: archive.map(|archive| archive.compiler().to_owned()),
            targets: archive.map(crate::embedded::Archive::targets).unwrap_or_default(),
            driver: found.driver,
            devices: found.devices,
            missing: absent.or(found.missing),
        }
    }

    /// The device with number `index`, if there is one and nothing else is missing.
    ///
    /// # Errors
    /// What is missing.
    pub fn device(&self, index: usize) -> Result<&DeviceInfo, Missing> {
        match &self.missing {
            Some(missing) => Err(missing.clone()),
            None => self.devices.get(index).ok_or(Missing::Device { index, found: self.devices.len() }),
        }
    }
}
