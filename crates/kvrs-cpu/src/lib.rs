//! The CPU backend: attention on packed pages, encoding, and the memory that pages lie in.
//!
//! `unsafe` stands behind three doors: [`memory`] hands out the bytes of a page, `gemm` checks extents before it
//! calls the matrix product, and nothing else needs it.

mod attend;
mod backend;
mod base;
mod block_pass;
mod class;
mod digits;
mod encode;
mod gemm;
mod isa;
mod jobs;
mod kernels;
mod lanes;
pub mod memory;
mod output;
mod own;
mod packed;
mod packed_pass;
mod simd;
mod softmax;
#[cfg(test)]
mod testing;
mod threads;
mod visible;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use isa::Isa;
pub use memory::Cpu;
pub use threads::{get_num_threads, set_num_threads};
