//! Kernels by name, loaded when they are first launched.

use super::context::Context;
use crate::embedded::{Archive, Module, Target};
use cudarc::driver::sys::{CUfunction, CUmodule};
use kvrs_core::{Error, Result};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, PoisonError, RwLock};

#[derive(Debug)]
pub(super) struct Modules {
    context: Arc<Context>,
    archive: &'static Archive,
    target: Target,
    loaded: RwLock<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: Vec<CUmodule>,
    functions: HashMap<String, CUfunction>,
}

// SAFETY: handles of the driver, which any thread may use; they are never dereferenced here.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Modules {
    pub(super) fn new(context: Arc<Context>, archive: &'static Archive, target: Target) -> Self {
        Self { context, archive, target, loaded: RwLock::default() }
    }

    pub(super) fn target(&self) -> Target {
        self.target
    }

    /// The kernel with that name; the context is current.
    pub(super) fn function(&self, name: &str) -> Result<CUfunction> {
        let known = self.loaded.read().unwrap_or_else(PoisonError::into_inner).functions.get(name).copied();
        known.map_or_else(|| self.load(name), Ok)
    }

    fn load(&self, name: &str) -> Result<CUfunction> {
        let module = self.archive.module(name, self.target);
        let absent = || Error::Internal(format!("no kernel {name} for {}", self.target));
        let module = module.ok_or_else(absent)?;
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        if !loaded.functions.contains_key(name) {
            self.load_module(&mut loaded, module)?;
        }
        loaded.functions.get(name).copied().ok_or_else(absent)
    }

    fn load_module(&self, loaded: &mut Loaded, module: &Module) -> Result<()> {
        let (code, mut handle, none) = (module.code()?, std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the code is whole, PTX ends with a zero, and there are no options.
        let status = unsafe {
            (self.context.driver().module_load)(&raw mut handle, code.as_ptr().cast(), 0, none, none)
        };
        self.context.check("cuModuleLoadDataEx", status)?;
        loaded.modules.push(handle);
        for name in module.kernels() {
            let text = CString::new(name.as_str()).expect("names of kernels hold no zeros");
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is loaded, and the name ends with a zero.
            let status =
                unsafe { (self.context.driver().module_function)(&raw mut function, handle, text.as_ptr()) };
            self.context.check("cuModuleGetFunction", status)?;
            loaded.functions.insert(name.clone(), function);
        }
        Ok(())
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !self.context.is_alive() {
            return;
        }
        let Ok(_current) = self.context.enter() else { return };
        for module in loaded.modules.drain(..) {
            // SAFETY: the module was loaded once, and no kernel of it runs: the stream was waited for.
            unsafe { (self.context.driver().module_drop)(module) };
        }
    }
}
