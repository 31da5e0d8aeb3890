//! Asks the machine for a driver and its devices, step by step, each of which may fail.

use crate::api::{Api, Basics};
use crate::status::{DeviceInfo, MINIMUM_DRIVER, Missing, Version};
use std::ffi::{CStr, c_char, c_int};

/// The driver's numbers of device attributes.
pub(crate) mod attribute {
    pub(crate) const MULTIPROCESSORS: u32 = 16;
    pub(crate) const CAPABILITY_MAJOR: u32 = 75;
    pub(crate) const CAPABILITY_MINOR: u32 = 76;
    pub(crate) const MEMORY_POOLS: u32 = 115;
}

/// What was found, and the first thing that was not.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) driver: Option<Version>,
    pub(crate) devices: Vec<DeviceInfo>,
    pub(crate) missing: Option<Missing>,
}

/// Looks for library, version, devices, in this order; never panics.
pub(crate) fn probe() -> Found {
    let mut found = Found::default();
    found.missing = look(&mut found).err();
    found
}

fn look(found: &mut Found) -> Result<(), Missing> {
    let basics = Basics::load()?;
    let mut number = 0;
    // SAFETY: the function writes a number, and may be called before any other.
    call(&basics, "cuDriverGetVersion", unsafe { (basics.version)(&raw mut number) })?;
    let driver = Version { major: (number / 1000) as u32, minor: (number % 1000 / 10) as u32 };
    found.driver = Some(driver);
    if driver < MINIMUM_DRIVER {
        return Err(Missing::Driver { found: driver, needed: MINIMUM_DRIVER });
    }
    // SAFETY: the function takes flags, of which there are none.
    call(&basics, "cuInit", unsafe { (basics.init)(0) })?;
    let mut count = 0;
    // SAFETY: the driver is initialised; the function writes a number.
    call(&basics, "cuDeviceGetCount", unsafe { (basics.device_count)(&raw mut count) })?;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        found.devices.push(device(&basics, index)?);
    }
    Api::load()?;
    if found.devices.is_empty() { Err(Missing::Devices) } else { Ok(()) }
}

fn call(basics: &Basics, name: &'static str, code: u32) -> Result<(), Missing> {
    if code == 0 { Ok(()) } else { Err(Missing::Call(name, code, basics.text(code))) }
}

/// A number that the driver knows of a device; the driver is initialised.
pub(crate) fn attribute(basics: &Basics, device: c_int, which: u32) -> Result<u32, Missing> {
    let mut value = 0;
    // SAFETY: the function checks device and attribute and writes a number.
    call(basics, "cuDeviceGetAttribute", unsafe { (basics.attribute)(&raw mut value, which, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn device(basics: &Basics, index: usize) -> Result<DeviceInfo, Missing> {
    let (mut handle, mut memory) = (0, 0);
    // SAFETY: the functions check the number and write a handle and a size.
    call(basics, "cuDeviceGet", unsafe { (basics.device)(&raw mut handle, index as c_int) })?;
    // SAFETY: as above.
    call(basics, "cuDeviceTotalMem", unsafe { (basics.device_memory)(&raw mut memory, handle) })?;
    Ok(DeviceInfo {
        index,
        name: name(basics, handle)?,
        capability: Version {
            major: attribute(basics, handle, attribute::CAPABILITY_MAJOR)?,
            minor: attribute(basics, handle, attribute::CAPABILITY_MINOR)?,
        },
        memory: memory as u64,
        multiprocessors: attribute(basics, handle, attribute::MULTIPROCESSORS)?,
    })
}

fn name(basics: &Basics, device: c_int) -> Result<String, Missing> {
    let mut bytes = [0_u8; 256];
    let room = bytes.len() as c_int - 1;
    // SAFETY: the function writes at most `room` bytes.
    let code = unsafe { (basics.device_name)(bytes.as_mut_ptr().cast::<c_char>(), room, device) };
    call(basics, "cuDeviceGetName", code)?;
    let text = CStr::from_bytes_until_nul(&bytes).expect("the last byte stays 0");
    Ok(text.to_string_lossy().into_owned())
}
