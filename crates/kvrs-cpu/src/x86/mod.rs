//! The instruction sets of x86-64.
#![allow(clippy::inline_always, reason = "operations must end up inside the function that owns the features")]
#![allow(clippy::wildcard_imports, reason = "a file per instruction set uses many of its intrinsics")]

pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod encode;
mod tables;

pub(crate) use tables::{AVX2, AVX512};
