//! Compiles the emulator and every `kernels_cu/*.cu` for the CPU.
//!
//! `KVRS_EMU_SANITIZE=address,undefined` or `=thread` instruments the kernels: `make sanitize-emu` sets it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

const SANITIZE: &str = "KVRS_EMU_SANITIZE";

/// Kernels with bugs and kernels that try single instructions, of the emulator's own tests.
const TESTS: &str = "emu/tests";

/// Builds both libraries; a build without them would test nothing, so it fails if they cannot be compiled.
pub(crate) fn run() {
    let crate_folder = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let root = Path::new(&crate_folder).join("../../kernels_cu");
    let root = root.canonicalize().expect("the kernels lie beside the crates");
    println!("cargo:rerun-if-changed={}", root.display());
    println!("cargo:rerun-if-env-changed={SANITIZE}");
    println!("cargo:rustc-check-cfg=cfg(kvrs_emu_address, kvrs_emu_thread, kvrs_emu_undefined)");
    let sanitizers = Sanitizers::chosen();
    sanitizers.tell_rust();
    sanitizers.link();
    sanitizers.compiler(&root).files(sources(&root.join("emu"), "cpp")).compile("kvrs_emu");
    let mut kernels = sanitizers.compiler(&root);
    sanitizers.instrument(&mut kernels);
    kernels.files(units(&root)).compile("kvrs_emu_kernels");
}

/// What `KVRS_EMU_SANITIZE` asks for.
struct Sanitizers(Vec<String>);

impl Sanitizers {
    fn chosen() -> Self {
        let value = std::env::var(SANITIZE).unwrap_or_default();
        let names: Vec<_> = value.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let known = |name: &String| ["address", "undefined", "thread"].contains(&name.as_str());
        assert!(
            names.iter().all(known),
            "{SANITIZE} is {value}; allowed: address, undefined, thread, with commas"
        );
        Self(names)
    }

    /// A `cfg` for tests that expect a sanitizer's report, or its absence.
    fn tell_rust(&self) {
        for name in &self.0 {
            println!("cargo:rustc-cfg=kvrs_emu_{name}");
        }
    }

    /// The sanitizers' libraries, before any other: they must be the first that a program loads.
    fn link(&self) {
        for name in &self.0 {
            let library = match name.as_str() {
                "address" => "asan",
                "thread" => "tsan",
                _ => "ubsan",
            };
            println!("cargo:rustc-link-lib=dylib={library}");
        }
    }

    /// How the emulator and the kernels are both compiled.
    ///
    /// No contraction: a kernel says itself where it wants a fused multiply-add. AVX2 is there for FMA and binary16.
    fn compiler(&self, root: &Path) -> cc::Build {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++20").opt_level(2).debug(true).pic(true).warnings(true).extra_warnings(true);
        build.include(root).include(root.join("include")).define("KVRS_EMULATE", None);
        build.flag("-march=x86-64-v3").flag("-ffp-contract=off").flag("-pthread");
        for (name, define) in [("address", "KVRS_EMU_ASAN"), ("thread", "KVRS_EMU_TSAN")] {
            if self.0.iter().any(|chosen| chosen == name) {
                build.define(define, None);
            }
        }
        build
    }

    /// The emulator's own state is not the kernels' memory, so only the kernels are instrumented.
    fn instrument(&self, build: &mut cc::Build) {
        build.flag("-Wno-unknown-pragmas");
        for name in &self.0 {
            build.flag(format!("-fsanitize={name}"));
        }
        if !self.0.is_empty() {
            build.flag("-fno-sanitize-recover=all").flag("-fno-omit-frame-pointer");
        }
    }
}

/// One C++ file for each `.cu`, which includes it, and one that holds on to all of them: a linker drops members of a
/// library that nobody names, and kernels are found by name at run time.
fn units(root: &Path) -> Vec<PathBuf> {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels: Vec<_> = sources(root, "cu").into_iter().chain(sources(&root.join(TESTS), "cu")).collect();
    let mut units = Vec::new();
    let mut anchors = Vec::new();
    for kernel in &kernels {
        let stem = kernel.file_stem().and_then(OsStr::to_str).expect("a name in ASCII");
        let anchor = format!("kvrs_emu_unit_{}_{stem}", anchors.len());
        let text = format!("#include \"{}\"\nextern \"C\" void {anchor}() {{}}\n", kernel.display());
        units.push(written(&out, &format!("unit_{stem}.cpp"), &text));
        anchors.push(anchor);
    }
    units.push(written(&out, "units.cpp", &list(&anchors)));
    units
}

/// The array through which `registry.cpp` holds on to the units.
fn list(anchors: &[String]) -> String {
    let declarations: Vec<_> =
        anchors.iter().map(|anchor| format!("extern \"C\" void {anchor}();\n")).collect();
    let elements: Vec<_> = anchors.iter().map(|anchor| format!("    &{anchor},\n")).collect();
    let (declarations, elements) = (declarations.concat(), elements.concat());
    format!("{declarations}extern void (*const kvrs_emu_units[])() = {{\n{elements}    nullptr,\n}};\n")
}

/// Writes a file unless it is there already.
fn written(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    if fs::read_to_string(&path).ok().as_deref() != Some(text) {
        fs::write(&path, text).expect("OUT_DIR can be written");
    }
    path
}

fn sources(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    paths.sort();
    paths
}
