//! The instruction sets of x86-64.
#![allow(clippy::inline_always, reason = "operations must end up inside the function that owns the features")]
#![allow(clippy::wildcard_imports, reason = "a file per instruction set uses many of its intrinsics")]

mod attend;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod encode;

pub(crate) use attend::{AVX2, AVX512};
