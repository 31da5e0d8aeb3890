//! The driver side without a driver: a small stand-in for libcuda, compiled here, is found by child processes.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod fake;

use fake::{Settings, in_child};
use kvrs_core::Error;
use kvrs_cuda::{Archive, Device, Kernel, Launcher, Status, Version};
use std::ffi::c_void;

/// An archive with one module for each target, whose code is the names of its kernels.
fn kernels(targets: &[&str]) -> &'static Archive {
    let code = b"fill fault worn";
    let mut parts = vec![0x01, code.len() as u8, 0, !(code.len() as u8), 0xff];
    parts.extend(code);
    let sizes = format!("{} {}", parts.len(), code.len());
    let modules = targets.iter().map(|target| format!("module test {target} 0 {sizes} fill,fault,worn\n"));
    let lines = ["compiler none 1.0\n".to_owned()].into_iter().chain(modules).collect::<Vec<_>>().concat();
    let length = (lines.len() as u32).to_le_bytes();
    let bytes = [b"KVCUDA01", &length[..], lines.as_bytes(), &parts].concat();
    Box::leak(Box::new(Archive::parse(Box::leak(bytes.into_boxed_slice())).unwrap()))
}

fn device() -> Device {
    Device::open_with(0, kernels(&["sm_90", "compute_90"])).unwrap()
}

#[repr(C)]
struct Fill {
    to: u64,
    bytes: u32,
    value: u32,
}

fn launch(device: &Device, name: &'static str, args: &Fill) -> kvrs_core::Result<()> {
    let kernel = Kernel { name, threads: 32 };
    // SAFETY: the kernels of the stand-in take this structure.
    unsafe { device.launch(kernel, [1, 1, 1], std::ptr::from_ref(args).cast::<c_void>()) }
}

fn read(device: &Device, from: u64, bytes: usize) -> Vec<u8> {
    let mut found = vec![0x77; bytes];
    // SAFETY: the tests read what they allocated.
    unsafe { device.download(from, &mut found).unwrap() };
    found
}

#[test]
fn without_a_driver_its_library_is_named() {
    in_child("without_a_driver_its_library_is_named", &Settings::without_library(), || {
        assert_eq!(Status::now().driver, None);
        let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
        assert_eq!(
            error,
            "the store is on cuda:0; allowed: cpu; no NVIDIA driver: libcuda.so.1 cannot be loaded"
        );
    });
}

#[test]
fn a_library_that_is_no_driver_is_named_by_the_function_it_lacks() {
    let settings = Settings::compiled("empty", &["-DEMPTY"]);
    in_child("a_library_that_is_no_driver_is_named_by_the_function_it_lacks", &settings, || {
        assert_eq!(Status::now().driver, None);
        let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
        assert!(error.ends_with("the NVIDIA driver has no function cuDriverGetVersion"), "{error}");
    });
}

#[test]
fn a_driver_that_does_not_start_is_named_with_its_own_text() {
    let settings = Settings::fake().with("FAKE_INIT", 3);
    in_child("a_driver_that_does_not_start_is_named_with_its_own_text", &settings, || {
        let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
        assert!(
            error.ends_with("the NVIDIA driver answers cuInit with error 3: initialization error"),
            "{error}"
        );
        assert_eq!(Status::now().driver, Some(Version { major: 12, minor: 8 }));
    });
}

#[test]
fn an_old_driver_is_named_with_the_version_that_is_needed() {
    let settings = Settings::fake().with("FAKE_VERSION", 11040);
    in_child("an_old_driver_is_named_with_the_version_that_is_needed", &settings, || {
        let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
        let needed = "the NVIDIA driver serves CUDA 11.4, kvrs needs a driver for CUDA 12.0 or newer";
        assert!(error.ends_with(needed), "{error}");
    });
}

#[test]
fn a_driver_without_a_function_that_is_needed_is_named_before_a_device_is_opened() {
    let settings = Settings::compiled("without_pools", &["-DWITHOUT_POOLS"]);
    in_child(
        "a_driver_without_a_function_that_is_needed_is_named_before_a_device_is_opened",
        &settings,
        || {
            let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
            assert!(error.ends_with("the NVIDIA driver has no function cuMemAllocAsync"), "{error}");
            assert_eq!(Status::now().devices.len(), 1);
        },
    );
}

#[test]
fn a_machine_without_devices_and_a_device_that_is_not_there_are_named() {
    let name = "a_machine_without_devices_and_a_device_that_is_not_there_are_named";
    in_child(name, &Settings::fake().with("FAKE_DEVICES", 0), || {
        let error = Device::open_with(0, kernels(&["sm_90"])).unwrap_err().to_string();
        assert!(error.ends_with("cuda:0; allowed: cpu; the NVIDIA driver finds no device"), "{error}");
    });
    in_child(name, &Settings::fake().with("FAKE_DEVICES", 2), || {
        assert!(Device::open_with(1, kernels(&["sm_90"])).is_ok());
        let error = Device::open_with(2, kernels(&["sm_90"])).unwrap_err().to_string();
        assert!(error.ends_with("cuda:2; allowed: cpu; there is no device 2, the driver finds 2"), "{error}");
    });
}

#[test]
fn a_device_that_no_code_runs_on_is_named_with_the_code_there_is() {
    let name = "a_device_that_no_code_runs_on_is_named_with_the_code_there_is";
    in_child(name, &Settings::fake().with("FAKE_CAPABILITY", 75), || {
        let error = Device::open_with(0, kernels(&["sm_80", "compute_120"])).unwrap_err().to_string();
        let text =
            "the kernels of this kvrs (sm_80, compute_120) do not run on Fake 0 of compute capability 7.5";
        assert!(error.ends_with(text), "{error}");
    });
    let settings = Settings::fake().with("FAKE_CAPABILITY", 130).with("FAKE_VERSION", 12040);
    in_child(name, &settings, || {
        let error = Device::open_with(0, kernels(&["sm_90", "compute_120"])).unwrap_err().to_string();
        assert!(error.ends_with("serves CUDA 12.4, kvrs needs a driver for CUDA 12.8 or newer"), "{error}");
    });
}

#[test]
fn the_status_lists_driver_and_devices() {
    let settings = Settings::fake().with("FAKE_DEVICES", 2).with("FAKE_CAPABILITY", 89);
    in_child("the_status_lists_driver_and_devices", &settings, || {
        let status = Status::now();
        assert!(status.built);
        assert_eq!(status.driver.unwrap().to_string(), "12.8");
        let second = &status.devices[1];
        assert_eq!((second.index, second.name.as_str(), second.memory), (1, "Fake 1", 1 << 20));
        assert_eq!((second.capability.to_string().as_str(), second.multiprocessors), ("8.9", 4));
    });
}

#[test]
fn memory_is_zeroed_and_bytes_come_back() {
    in_child("memory_is_zeroed_and_bytes_come_back", &Settings::fake(), || {
        let device = device();
        assert_eq!(device.target(), "sm_90");
        let (a, b) = (device.allocate(300_000).unwrap(), device.allocate(300_000).unwrap());
        assert_eq!(a % 256, 0);
        assert!(read(&device, a, 300_000).iter().all(|&byte| byte == 0));
        let bytes: Vec<u8> = (0..300_000_u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let before = fake::number("fake_synchronisations");
        // SAFETY: the ranges are those that were allocated.
        unsafe {
            device.upload(&bytes[1..], a + 1).unwrap();
            device.copy(a, b, bytes.len()).unwrap();
        }
        assert_eq!(fake::number("fake_synchronisations"), before, "uploads and copies wait for nothing");
        assert_eq!(read(&device, b, bytes.len()), bytes);
        // SAFETY: nobody uses the memory any more.
        unsafe { device.free(a, 300_000) };
        assert!(device.memory().unwrap().0 >= 300_000);
    });
}

#[test]
fn kernels_run_by_name_and_an_empty_grid_is_nothing() {
    in_child("kernels_run_by_name_and_an_empty_grid_is_nothing", &Settings::fake(), || {
        let device = device();
        let to = device.allocate(64).unwrap();
        launch(&device, "fill", &Fill { to: to + 8, bytes: 8, value: 5 }).unwrap();
        assert_eq!(read(&device, to, 24), [[0; 8], [5; 8], [0; 8]].concat());
        let kernel = Kernel { name: "fill", threads: 32 };
        // SAFETY: no block runs.
        unsafe { device.launch(kernel, [1, 0, 1], std::ptr::null()).unwrap() };
        let error = launch(&device, "unknown", &Fill { to, bytes: 0, value: 0 }).unwrap_err();
        assert!(matches!(&error, Error::Internal(text) if text == "no kernel unknown for sm_90"), "{error}");
    });
}

#[test]
fn too_little_memory_is_a_capacity_error_with_the_numbers_of_the_device() {
    let name = "too_little_memory_is_a_capacity_error_with_the_numbers_of_the_device";
    for pools in [0, 1] {
        in_child(name, &Settings::fake().with("FAKE_POOLS", pools), || {
            let device = device();
            let held = device.allocate(1 << 19).unwrap();
            let error = device.allocate((1 << 19) + 1).unwrap_err();
            let what = "memory of cuda:0".to_owned();
            let (needed, free, capacity) = ((1 << 19) + 1, 1 << 19, 1 << 20);
            assert_eq!(error, Error::Capacity { what, needed, free, capacity });
            // SAFETY: nobody uses the memory any more.
            unsafe { device.free(held, 1 << 19) };
            assert!(device.allocate((1 << 19) + 1).is_ok());
        });
    }
}

#[test]
fn a_broken_kernel_is_our_fault() {
    in_child("a_broken_kernel_is_our_fault", &Settings::fake(), || {
        let device = device();
        let args = Fill { to: 0, bytes: 0, value: 0 };
        let error = launch(&device, "fault", &args).unwrap_err();
        let text =
            "fault on cuda:0 gave CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)";
        assert!(matches!(&error, Error::Internal(found) if found == text), "{error}");
        assert!(device.synchronize().is_err(), "the driver says it again");
    });
}

#[test]
fn a_broken_device_is_an_error_of_the_device() {
    in_child("a_broken_device_is_an_error_of_the_device", &Settings::fake(), || {
        let error = launch(&device(), "worn", &Fill { to: 0, bytes: 0, value: 0 }).unwrap_err();
        assert!(matches!(&error, Error::Device { got, .. } if got == "cuda:0"), "{error}");
        assert!(error.to_string().contains("CUDA_ERROR_ECC_UNCORRECTABLE"), "{error}");
    });
}

#[test]
fn every_call_leaves_the_current_context_as_it_was_and_everything_goes_with_the_device() {
    let name = "every_call_leaves_the_current_context_as_it_was_and_everything_goes_with_the_device";
    in_child(name, &Settings::fake(), || {
        let device = device();
        let to = device.allocate(64).unwrap();
        launch(&device, "fill", &Fill { to, bytes: 8, value: 5 }).unwrap();
        let _ = launch(&device, "unknown", &Fill { to, bytes: 0, value: 0 });
        let _ = device.allocate(1 << 30).unwrap_err();
        read(&device, to, 64);
        drop(device.on_stream(fake::stream(0, false)).unwrap());
        assert_eq!(fake::number("fake_depth"), 0);
        // SAFETY: nobody uses the memory any more.
        unsafe { device.free(to, 64) };
        drop(device);
        assert_eq!((fake::number("fake_depth"), fake::number("fake_alive")), (0, 0));
    });
}

#[test]
fn work_on_a_stream_of_the_caller_is_ordered_by_events_only_where_the_stream_changes() {
    let name = "work_on_a_stream_of_the_caller_is_ordered_by_events_only_where_the_stream_changes";
    in_child(name, &Settings::fake(), || {
        let device = device();
        let to = device.allocate(64).unwrap();
        let (torch, other) = (fake::stream(0, false), fake::stream(0, false));
        let orders = |stream: u64| {
            let before = fake::number("fake_orders");
            let on = device.on_stream(stream).unwrap();
            launch(&device, "fill", &Fill { to, bytes: 8, value: 5 }).unwrap();
            drop(on);
            fake::number("fake_orders") - before
        };
        assert_eq!(orders(torch), 2, "behind the allocation, and before what follows");
        assert_eq!([orders(torch), orders(torch)], [1, 1], "only before what follows");
        assert_eq!([orders(other), orders(torch)], [2, 2], "another stream");
        launch(&device, "fill", &Fill { to, bytes: 8, value: 5 }).unwrap();
        assert_eq!(orders(torch), 2, "behind the work between");
        assert_eq!(orders(0), 2, "the legacy default stream");
    });
}

#[test]
fn a_stream_of_another_device_is_refused_and_nothing_changes() {
    let settings = Settings::fake().with("FAKE_DEVICES", 2);
    in_child("a_stream_of_another_device_is_refused_and_nothing_changes", &settings, || {
        let device = device();
        let error = device.on_stream(fake::stream(1, false)).unwrap_err().to_string();
        assert_eq!(error, "the stream is on another device; allowed: a stream of cuda:0");
        let to = device.allocate(8).unwrap();
        assert_eq!(read(&device, to, 8), [0; 8]);
    });
}

#[test]
fn a_captured_stream_takes_kernels_and_refuses_what_a_graph_cannot_repeat() {
    let name = "a_captured_stream_takes_kernels_and_refuses_what_a_graph_cannot_repeat";
    in_child(name, &Settings::fake(), || {
        let device = device();
        let to = device.allocate(64).unwrap();
        let before = fake::number("fake_orders");
        let on = device.on_stream(fake::stream(0, true)).unwrap();
        launch(&device, "fill", &Fill { to, bytes: 8, value: 5 }).unwrap();
        // SAFETY: the range was allocated.
        let error = unsafe { device.upload(&[1], to) }.unwrap_err().to_string();
        assert!(error.starts_with("the stream is on its way into a CUDA graph; allowed: "), "{error}");
        assert!(device.allocate(64).is_err(), "memory of a graph is not the store's");
        drop(on);
        assert_eq!(fake::number("fake_orders"), before);
        // SAFETY: the range was allocated.
        unsafe { device.upload(&[1], to).unwrap() };
    });
}

#[test]
fn a_build_without_kernels_says_so() {
    in_child("a_build_without_kernels_says_so", &Settings::fake(), || {
        let status = Status::now();
        let Err(error) = Device::open(0) else {
            assert_eq!(status.missing, None);
            assert!(!status.targets.is_empty());
            return;
        };
        assert!(status.targets.is_empty());
        assert!(error.to_string().contains("built without its CUDA kernels: `make cuda` had"), "{error}");
    });
}
