//! Where a store lies, and what the machine has for it.

use crate::any_store::{AnyStore, new_store};
use crate::enter::enter;
use crate::errors::raise;
use crate::plan::json;
use crate::torch;
use kvrs::{Cpu, Error, Plan, ScoreFn};
use kvrs_codec::Place;
use kvrs_cuda::{Cuda, Device, DeviceInfo, MINIMUM_DRIVER, Missing, Status, Version};
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;

/// What a store is asked to lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    Cpu,
    /// The device with that number.
    Cuda(u32),
    /// The device that is a program, whose memory is the host's.
    #[cfg(feature = "emulate")]
    Emulated,
}

impl Choice {
    /// `"cpu"`, `"cuda"` (the first device), `"cuda:1"`, or anything that prints as one of them, like a
    /// `torch.device`.
    pub(crate) fn parse(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let name = value.str()?.to_string();
        match name.as_str() {
            "cpu" | "cpu:0" => return Ok(Self::Cpu),
            "cuda" => return Ok(Self::Cuda(0)),
            #[cfg(feature = "emulate")]
            "emulated" => return Ok(Self::Emulated),
            _ => {}
        }
        let number = name.strip_prefix("cuda:").filter(|digits| digits.bytes().all(|c| c.is_ascii_digit()));
        match number.and_then(|digits| digits.parse().ok()) {
            Some(index) => Ok(Self::Cuda(index)),
            None => Err(raise(value.py(), &Error::device("the store", name, "cpu, cuda or cuda:N"))),
        }
    }
}

/// Where a store lies.
pub(crate) enum Site {
    Cpu,
    Cuda(Arc<Cuda<Device>>, u32),
    #[cfg(feature = "emulate")]
    Emulated,
}

impl Site {
    /// Opens what is asked for and makes a store there; the error says what is missing.
    pub(crate) fn open(
        choice: Choice,
        plan: Plan,
        capacity: Option<u64>,
        functions: Option<Arc<ScoreFn>>,
    ) -> kvrs::Result<(Self, Box<dyn AnyStore>)> {
        match choice {
            Choice::Cpu => Ok((Self::Cpu, new_store(plan, Cpu::shared(), capacity, functions)?)),
            Choice::Cuda(index) => {
                let backend = Device::open(index as usize).and_then(|d| Cuda::new(d, Place::Cuda(index)))?;
                let backend = Arc::new(backend);
                let store = new_store(plan, Arc::clone(&backend), capacity, functions)?;
                Ok((Self::Cuda(backend, index), store))
            }
            #[cfg(feature = "emulate")]
            Choice::Emulated => {
                let backend = Cuda::new(kvrs_cuda::Emulator::new(1), Place::Host)?;
                Ok((Self::Emulated, new_store(plan, Arc::new(backend), capacity, functions)?))
            }
        }
    }

    /// Its name, as a store is asked for it.
    pub(crate) fn name(&self) -> String {
        match self {
            #[cfg(feature = "emulate")]
            Self::Emulated => "emulated".to_owned(),
            _ => self.place().to_string(),
        }
    }

    /// Where the tensors of calls must be.
    pub(crate) fn place(&self) -> Place {
        match self {
            Self::Cuda(_, index) => Place::Cuda(*index),
            Self::Cpu => Place::Host,
            #[cfg(feature = "emulate")]
            Self::Emulated => Place::Host,
        }
    }

    /// Runs `work` without the GIL; on a device on the stream that torch uses there now, in its order.
    pub(crate) fn enter<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce() -> kvrs::Result<T> + Send,
    ) -> PyResult<T> {
        let Self::Cuda(backend, index) = self else { return enter(py, work) };
        let stream = torch::current_stream(py, *index)?;
        enter(py, || backend.launcher().on_stream(stream).and_then(|_turn| work()))
    }

    /// Says that a device found keys or values that it could not store: they travel there unseen.
    pub(crate) fn check_stored(&self) -> kvrs::Result<()> {
        let Self::Cuda(backend, _) = self else { return Ok(()) };
        match backend.refused()? {
            0 => Ok(()),
            count => {
                let got = format!(
                    "{count} vectors with numbers that are not finite, or too large, stored as zeros"
                );
                Err(Error::argument("k or v", got, "finite numbers that the window's type holds"))
            }
        }
    }
}

/// What is compiled in, which driver and devices were found, or why not, as JSON.
#[pyfunction]
pub(crate) fn cuda_status(py: Python<'_>) -> String {
    let status = py.detach(Status::now);
    json(&json!({
        "built": status.built,
        "compiler": status.compiler,
        "targets": status.targets,
        "minimum_driver": MINIMUM_DRIVER.to_string(),
        "driver": status.driver.as_ref().map(Version::to_string),
        "devices": status.devices.iter().map(device).collect::<Vec<_>>(),
        "missing": status.missing.as_ref().map(Missing::to_string),
    }))
}

fn device(info: &DeviceInfo) -> Value {
    json!({
        "index": info.index,
        "name": info.name,
        "capability": info.capability.to_string(),
        "memory": info.memory,
        "multiprocessors": info.multiprocessors,
    })
}
