//! Transfers that fail: a sequence that leaves a device or comes back arrives whole, or the call says that it did not.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

use kvrs::{
    CodecSpec, Compress, Dtype, Error, Geometry, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Result,
    SeqId, Tokens, View,
};
use kvrs_codec::Place;
use kvrs_codec::backend::Backend;
use kvrs_cuda::{Cuda, Emulator, Kernel, Launcher};
use std::ffi::c_void;
use std::io::Cursor;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// An emulated device of which one transfer fails. With the next one another caller asks the backend what went wrong.
#[derive(Debug)]
struct Unreliable {
    emulator: Emulator,
    /// Transfers until the one that fails.
    left: AtomicI64,
    backend: Mutex<Weak<Cuda<Unreliable>>>,
    /// What the other caller was told.
    told: Mutex<Option<Error>>,
}

impl Unreliable {
    fn transfer(&self) -> Result<()> {
        match self.left.fetch_sub(1, Relaxed) {
            0 => Err(Error::Internal("a transfer that was made to fail".into())),
            -1 => {
                let backend = self.backend.lock().unwrap().upgrade().unwrap();
                *self.told.lock().unwrap() = backend.flush().err();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Launcher for Unreliable {
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.emulator.allocate(bytes)
    }
    unsafe fn free(&self, address: u64, bytes: usize) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.free(address, bytes) };
    }
    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<()> {
        self.transfer()?;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.upload(from, to) }
    }
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.transfer()?;
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.download(from, to) }
    }
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.copy(from, to, bytes) }
    }
    unsafe fn launch(&self, kernel: Kernel, grid: [u32; 3], args: *const c_void) -> Result<()> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.launch(kernel, grid, args) }
    }
    fn synchronize(&self) -> Result<()> {
        self.emulator.synchronize()
    }
}

/// A store on such a device, and a sequence of it that has sealed and raw pages.
struct Home {
    device: Arc<Cuda<Unreliable>>,
    store: KvStore<Cuda<Unreliable>>,
    id: SeqId,
}

impl Home {
    fn new() -> Self {
        let launcher = Unreliable {
            emulator: Emulator::new(3).with_poison(),
            left: AtomicI64::new(i64::MAX),
            backend: Mutex::default(),
            told: Mutex::default(),
        };
        let device = Arc::new(Cuda::new(launcher, Place::Host).unwrap());
        *device.launcher().backend.lock().unwrap() = Arc::downgrade(&device);
        let layer = LayerShape {
            query_heads: KV_HEADS,
            kv_heads: KV_HEADS,
            key_dim: DIM,
            value_dim: DIM,
            rope: None,
            sliding: None,
        };
        let codec = CodecSpec::turboquant(4.0);
        let spec = PlanSpec::uniform(ModelShape::uniform(1, layer), codec.clone(), codec);
        let plan = Plan::new(PlanSpec { sinks: 2, recent: 8, ..spec }).unwrap();
        let store = KvStore::new(plan, Arc::clone(&device), None).unwrap();
        let id = store.create(1).unwrap()[0];
        let home = Self { device, store, id };
        home.append(150);
        home
    }

    fn append(&self, tokens: usize) {
        let number = |i: usize| f32::from((i.wrapping_mul(2_654_435_761) >> 7) as u8) / 64.0 - 2.0;
        let bytes: Vec<u8> = (0..KV_HEADS * tokens * DIM).flat_map(|i| number(i).to_le_bytes()).collect();
        let strides = [KV_HEADS * tokens * DIM, tokens * DIM, DIM, 1].map(|n| n as isize);
        let geometry = Geometry { dtype: Dtype::F32, shape: [1, KV_HEADS, tokens, DIM], strides, start: 0 };
        let view = View::new("x", &bytes, geometry).unwrap();
        self.store.append(0, &[self.id], &Tokens::new(view, view)).unwrap();
    }

    fn saved(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.store.save_to("a file", &mut bytes, self.id, Compress::None)?;
        Ok(bytes)
    }

    /// Runs `call` with each of its transfers made to fail in turn, and at last with none: `whole` looks at what is
    /// there after each. How many transfers there were.
    fn fail_each(&self, call: impl Fn() -> Result<()>, whole: impl Fn()) -> i64 {
        let launcher = self.device.launcher();
        for transfer in 0.. {
            launcher.left.store(transfer, Relaxed);
            let result = call();
            let all = launcher.left.swap(i64::MAX, Relaxed) >= 0;
            launcher.told.lock().unwrap().take();
            assert_eq!(result.is_ok(), all, "transfer {transfer}: {result:?}");
            let _late = self.device.flush();
            whole();
            if all {
                return transfer;
            }
        }
        unreachable!("transfers end");
    }
}

#[test]
fn a_page_that_could_not_be_read_is_an_error_of_the_save_that_asked_for_it_whoever_else_asks() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    for compress in [Compress::None, Compress::Deflate] {
        let save = || home.store.save_to("a file", &mut Vec::new(), home.id, compress);
        assert!(home.fail_each(save, || assert!(home.saved().unwrap() == whole)) > 4);
    }
}

#[test]
fn a_sequence_whose_pages_could_not_be_read_stays_on_the_device_as_it_was() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    let transfers = home.fail_each(
        || home.store.to_host(&[home.id]),
        || assert!(home.saved().unwrap() == whole, "on the device or parked, it is the same file"),
    );
    assert!(transfers > 4 && home.store.stats().unwrap().bytes_parked > 0);
}

#[test]
fn a_sequence_whose_pages_could_not_be_written_stays_parked_as_it_was() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    home.store.to_host(&[home.id]).unwrap();
    let transfers = home.fail_each(
        || home.store.to_device(&[home.id]),
        || assert!(home.saved().unwrap() == whole, "on the device or parked, it is the same file"),
    );
    assert!(transfers > 4 && home.store.stats().unwrap().bytes_parked == 0);
    home.append(40);
    home.store.check().unwrap();
}

#[test]
fn a_file_whose_pages_could_not_be_written_is_not_loaded() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    let load = || home.store.load_from("a file", Cursor::new(&whole)).map(drop);
    assert!(home.fail_each(load, || ()) > 4);
    assert_eq!(home.store.stats().unwrap().sequences, 2, "only the load without a fault gave one");
}
