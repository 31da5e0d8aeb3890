//! The CUDA backend.
//!
//! Kernels are written once, in `kernels_cu/`, and run twice: on a device through the driver, and on the CPU in an
//! emulator, where tests compare them with the scalar code. Both are a [`Launcher`].

#[cfg(feature = "cuda")]
mod api;
mod args;
mod attend;
mod backend;
mod codec;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod embedded;
#[cfg(feature = "emulate")]
mod emulator;
mod fetch;
mod launcher;
mod memory;
#[cfg(not(feature = "cuda"))]
mod no_driver;
mod pass;
#[cfg(feature = "cuda")]
mod probe;
mod queue;
mod status;
mod units;
mod workspace;

pub use backend::Cuda;
#[cfg(feature = "cuda")]
pub use driver::{Device, OnStream};
#[cfg(feature = "cuda")]
pub use embedded::{Archive, Module, Target};
#[cfg(feature = "emulate")]
pub use emulator::Emulator;
pub use launcher::{Kernel, Launcher};
pub use memory::Chunk;
#[cfg(not(feature = "cuda"))]
pub use no_driver::{Device, OnStream};
pub use status::{DeviceInfo, MINIMUM_DRIVER, MINIMUM_DRIVER_OF_PTX, Missing, Status, Version};
