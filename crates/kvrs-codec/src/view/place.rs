//! Where the bytes of a tensor are: host memory, or a device's, which only kernels reach.

use std::fmt;
use std::marker::PhantomData;

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The host's.
    Host,
    /// That of CUDA device N.
    Cuda(u32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// Bytes of a device's memory; whoever makes them answers for their being there.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBytes<'a> {
    device: u32,
    address: u64,
    len: usize,
    owner: PhantomData<&'a ()>,
}

impl DeviceBytes<'_> {
    /// `len` bytes from `address` on, in the memory of CUDA device `device`.
    ///
    /// Nothing here reads them; a kernel that is given a wrong address fails or reads rubbish.
    #[must_use]
    pub fn new(device: u32, address: u64, len: usize) -> Self {
        Self { device, address, len, owner: PhantomData }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Memory<'a> {
    Host(&'a [u8]),
    Device(DeviceBytes<'a>),
}

#[derive(Debug)]
pub(super) enum MemoryMut<'a> {
    Host(&'a mut [u8]),
    Device(DeviceBytes<'a>),
}

/// Host code was handed a device's memory: stores compare places before anything else.
const UNREACHABLE: &str = "host code reads and writes host memory only";

impl<'a> Memory<'a> {
    pub(super) fn place(&self) -> Place {
        match self {
            Self::Host(_) => Place::Host,
            Self::Device(bytes) => Place::Cuda(bytes.device),
        }
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr().expose_provenance() as u64,
            Self::Device(bytes) => bytes.address,
        }
    }

    pub(super) fn host(&self) -> &'a [u8] {
        let Self::Host(bytes) = self else { unreachable!("{UNREACHABLE}") };
        bytes
    }
}

impl MemoryMut<'_> {
    pub(super) fn place(&self) -> Place {
        match self {
            Self::Host(_) => Place::Host,
            Self::Device(bytes) => Place::Cuda(bytes.device),
        }
    }

    pub(super) fn address(&mut self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_mut_ptr().expose_provenance() as u64,
            Self::Device(bytes) => bytes.address,
        }
    }

    pub(super) fn host(&mut self) -> &mut [u8] {
        let Self::Host(bytes) = self else { unreachable!("{UNREACHABLE}") };
        bytes
    }
}
