//! Compiles the stand-in for the driver, and runs a test again in a child process that finds it.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

const CHILD: &str = "KVRS_TEST_IN_CHILD";
/// The file that a child process writes when it has done its work.
const DONE: &str = "KVRS_TEST_DONE";
/// As the driver's library is looked for.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// What the child process finds.
pub(crate) struct Settings {
    folder: PathBuf,
    variables: Vec<(&'static str, String)>,
}

impl Settings {
    /// No driver, whatever the machine has.
    pub(crate) fn without_library() -> Self {
        // Nothing that can be loaded, but found before the machine's own driver.
        let folder = folder("none");
        for name in NAMES {
            std::fs::write(folder.join(name), "no library").unwrap();
        }
        Self { folder, variables: Vec::new() }
    }

    /// The stand-in.
    pub(crate) fn fake() -> Self {
        Self::compiled("fake", &[])
    }

    /// The stand-in, compiled with options.
    pub(crate) fn compiled(name: &'static str, options: &[&str]) -> Self {
        Self { folder: compile(name, options), variables: Vec::new() }
    }

    /// With a variable of the environment.
    pub(crate) fn with(mut self, name: &'static str, value: i64) -> Self {
        self.variables.push((name, value.to_string()));
        self
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The folder of the compiled library; each is compiled once in a process, and replaced as a whole.
fn compile(name: &'static str, options: &[&str]) -> PathBuf {
    static DONE: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder(name);
    if std::env::var_os(CHILD).is_some() || done.contains(&name) {
        return folder;
    }
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_driver/libcuda.c");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    for library in NAMES {
        let new = folder.join(format!("{library}.{}", std::process::id()));
        let mut command = Command::new(&compiler);
        command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wno-unused", source, "-o"]).arg(&new);
        assert!(command.args(options).status().expect("a C compiler is there").success(), "{source}");
        std::fs::rename(new, folder.join(library)).unwrap();
    }
    done.push(name);
    folder
}

/// Runs the test with that name again in a child process, where it does `work`.
pub(crate) fn in_child(test: &str, settings: &Settings, work: impl FnOnce()) {
    if let Some(number) = std::env::var_os(CHILD) {
        if number == *settings_name(settings) {
            work();
            std::fs::write(std::env::var(DONE).unwrap(), "").unwrap();
        }
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env("LD_LIBRARY_PATH", &settings.folder);
    let done = settings.folder.join(format!("{test}.{}", std::process::id()));
    command.env(CHILD, settings_name(settings)).env(DONE, &done);
    let output = command.envs(settings.variables.iter().cloned()).output().unwrap();
    let shown =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let done = std::fs::remove_file(done).is_ok();
    assert!(output.status.success() && done, "in the child process:\n{shown}");
}

fn settings_name(settings: &Settings) -> String {
    format!("{:?}", settings.variables)
}

/// A number that the stand-in counts.
pub(crate) fn number(name: &str) -> i64 {
    type Function = unsafe extern "C" fn() -> std::ffi::c_long;
    // SAFETY: the stand-in is loaded, and these functions take nothing and return a long.
    unsafe { std::mem::transmute::<*const c_void, Function>(symbol(name))() }
}

/// A stream of a device of the stand-in, as a number.
pub(crate) fn stream(device: i32, capturing: bool) -> u64 {
    type Function = unsafe extern "C" fn(i32, i32) -> *const c_void;
    // SAFETY: as above; this one takes two ints and returns a pointer.
    unsafe {
        std::mem::transmute::<*const c_void, Function>(symbol("fake_stream"))(device, capturing.into()) as u64
    }
}

fn symbol(name: &str) -> *const c_void {
    // SAFETY: the driver was loaded by an earlier call of the test, and stays.
    unsafe {
        let library = cudarc::driver::sys::culib();
        *library.get::<*const c_void>(name.as_bytes()).unwrap()
    }
}
