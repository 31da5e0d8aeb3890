//! The CPU backend: attention on packed pages, encoding, and the memory that pages lie in.
//!
//! `unsafe` stands behind four doors: [`memory`] maps chunks and hands out the bytes of a page, `gemm` checks extents
//! before it calls the matrix product, `jobs` lends a call's closure to other threads until the call returns, `kernels`
//! calls functions of an instruction set that the CPU was seen to have; the tokens in `x86` prove the same
//! for single operations.

mod attend;
mod backend;
mod base;
mod batches;
mod block_pass;
mod class;
mod digits;
mod encode;
mod gemm;
mod isa;
mod job;
mod jobs;
mod kernels;
mod lanes;
pub mod memory;
mod output;
mod own;
mod packed;
mod packed_pass;
mod received;
mod simd;
mod softmax;
#[cfg(test)]
mod testing;
mod threads;
mod top_k;
mod visible;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use isa::Isa;
pub use memory::Cpu;
pub use threads::{get_num_threads, set_num_threads};
