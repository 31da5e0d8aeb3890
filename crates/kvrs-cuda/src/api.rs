//! The functions of the driver that kvrs calls, looked up by name.
//!
//! Results are plain numbers: a driver newer than its bindings returns codes that they do not know, and a function
//! that a driver lacks must be an error, not a panic.

use crate::status::Missing;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// A structure of driver functions, each with the name that the library has for it.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident = $symbol:literal ($($argument:ty),*);)* }) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $table {
            /// Looks all of them up.
            pub(crate) fn load() -> Result<Self, Missing> {
                library()?;
                // SAFETY: the types are those of the CUDA headers, with the result as a number of the same size.
                Ok(unsafe { Self { $($field: function(concat!($symbol, "\0"))?,)* } })
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($table))
            }
        }
    };
}

functions! {
    /// What every driver has: enough to ask for its version and devices.
    Basics {
        version = "cuDriverGetVersion" (*mut c_int);
        init = "cuInit" (c_uint);
        error_name = "cuGetErrorName" (u32, *mut *const c_char);
        error_text = "cuGetErrorString" (u32, *mut *const c_char);
        device_count = "cuDeviceGetCount" (*mut c_int);
        device = "cuDeviceGet" (*mut CUdevice, c_int);
        device_name = "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
        device_memory = "cuDeviceTotalMem_v2" (*mut usize, CUdevice);
        attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, CUdevice);
    }
}

functions! {
    /// What a device needs.
    Api {
        retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
        release = "cuDevicePrimaryCtxRelease_v2" (CUdevice);
        push = "cuCtxPushCurrent_v2" (CUcontext);
        pop = "cuCtxPopCurrent_v2" (*mut CUcontext);
        memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        allocate = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
        allocate_async = "cuMemAllocAsync" (*mut CUdeviceptr, usize, CUstream);
        free = "cuMemFree_v2" (CUdeviceptr);
        free_async = "cuMemFreeAsync" (CUdeviceptr, CUstream);
        fill = "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
        upload = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
        download = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
        copy = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
        pin = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        unpin = "cuMemFreeHost" (*mut c_void);
        stream_new = "cuStreamCreate" (*mut CUstream, c_uint);
        stream_drop = "cuStreamDestroy_v2" (CUstream);
        stream_context = "cuStreamGetCtx" (CUstream, *mut CUcontext);
        stream_capturing = "cuStreamIsCapturing" (CUstream, *mut u32);
        stream_id = "cuStreamGetId" (CUstream, *mut u64);
        stream_wait = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
        stream_synchronize = "cuStreamSynchronize" (CUstream);
        event_new = "cuEventCreate" (*mut CUevent, c_uint);
        event_drop = "cuEventDestroy_v2" (CUevent);
        event_record = "cuEventRecord" (CUevent, CUstream);
        event_synchronize = "cuEventSynchronize" (CUevent);
        module_load = "cuModuleLoadDataEx" (*mut CUmodule, *const c_void, c_uint, *mut c_void, *mut c_void);
        module_drop = "cuModuleUnload" (CUmodule);
        module_function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
        launch = "cuLaunchKernel" (
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void
        );
    }
}

impl Basics {
    /// An error code as the driver's text.
    pub(crate) fn text(&self, code: u32) -> String {
        named(self.error_text, code).unwrap_or_else(|| "unknown error".to_owned())
    }

    /// An error code as the driver's name for it and its text.
    pub(crate) fn name_and_text(&self, code: u32) -> String {
        let name = named(self.error_name, code).unwrap_or_else(|| format!("error {code}"));
        format!("{name} ({})", self.text(code))
    }
}

fn named(lookup: unsafe extern "C" fn(u32, *mut *const c_char) -> u32, code: u32) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: the function writes a pointer to a constant text, or none.
    let status = unsafe { lookup(code, &raw mut text) };
    // SAFETY: as above; the text ends with a zero.
    (status == 0 && !text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The library is there, and stays.
fn library() -> Result<(), Missing> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which is what it is for.
    match PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        true => Ok(()),
        false => Err(Missing::Library),
    }
}

/// # Safety
/// The library is there, `F` is the type of the function, and `name` ends with a zero.
unsafe fn function<F: Copy>(name: &'static str) -> Result<F, Missing> {
    // SAFETY: the caller's promise.
    match unsafe { sys::culib().get::<F>(name.as_bytes()) } {
        Ok(found) => Ok(*found),
        Err(_) => Err(Missing::Function(name.trim_end_matches('\0'))),
    }
}
