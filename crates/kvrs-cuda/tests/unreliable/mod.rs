//! A device that fails when it is told to, and a store on it.
#![allow(dead_code, reason = "each test uses a part")]

use kvrs::{
    CodecSpec, Compress, Dtype, Error, Geometry, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Result,
    SeqId, Tokens, View,
};
use kvrs_codec::Place;
use kvrs_codec::backend::Backend;
use kvrs_cuda::{Cuda, Emulator, Kernel, Launcher};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

pub(crate) const KV_HEADS: usize = 2;
pub(crate) const DIM: usize = 64;

/// An emulated device of which one transfer or one launch fails. With the next transfer another caller asks the backend
/// what went wrong.
#[derive(Debug)]
pub(crate) struct Unreliable {
    emulator: Emulator,
    /// Transfers until the one that fails.
    pub(crate) left: AtomicI64,
    /// The kernel whose next launch fails.
    pub(crate) fails: Mutex<Option<&'static str>>,
    backend: Mutex<Weak<Cuda<Unreliable>>>,
    /// What the other caller was told.
    pub(crate) told: Mutex<Option<Error>>,
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
        if self.fails.lock().unwrap().take_if(|name| *name == kernel.name).is_some() {
            return Err(Error::device("the store", "cuda:0", "a device that can launch"));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.emulator.launch(kernel, grid, args) }
    }
    fn synchronize(&self) -> Result<()> {
        self.emulator.synchronize()
    }
}

/// A store on such a device, and a sequence of it that has sealed and raw pages.
pub(crate) struct Home {
    pub(crate) device: Arc<Cuda<Unreliable>>,
    pub(crate) store: KvStore<Cuda<Unreliable>>,
    pub(crate) id: SeqId,
}

impl Home {
    pub(crate) fn new() -> Self {
        let launcher = Unreliable {
            emulator: Emulator::new(3).with_poison(),
            left: AtomicI64::new(i64::MAX),
            fails: Mutex::default(),
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
        home.append(home.id, 150).unwrap();
        home
    }

    pub(crate) fn append(&self, id: SeqId, tokens: usize) -> Result<()> {
        let bytes = numbers(tokens);
        let view = View::new("x", &bytes, geometry(tokens)).unwrap();
        self.store.append(0, &[id], &Tokens::new(view, view))
    }

    pub(crate) fn saved(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.store.save_to("a file", &mut bytes, self.id, Compress::None)?;
        Ok(bytes)
    }
}

/// Queries, keys or values of some tokens, f32.
pub(crate) fn numbers(tokens: usize) -> Vec<u8> {
    let number = |i: usize| f32::from((i.wrapping_mul(2_654_435_761) >> 7) as u8) / 64.0 - 2.0;
    (0..KV_HEADS * tokens * DIM).flat_map(|i| number(i).to_le_bytes()).collect()
}

/// Where they lie.
pub(crate) fn geometry(tokens: usize) -> Geometry {
    Geometry::contiguous(Dtype::F32, [1, KV_HEADS, tokens, DIM])
}
