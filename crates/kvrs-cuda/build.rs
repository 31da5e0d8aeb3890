//! Compiles the kernels for the emulator, and embeds those that were compiled for devices.

#[path = "build/embed.rs"]
mod embed;
#[cfg(feature = "emulate")]
#[path = "build/emulate.rs"]
mod emulate;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    #[cfg(feature = "emulate")]
    emulate::run();
    embed::run();
}
