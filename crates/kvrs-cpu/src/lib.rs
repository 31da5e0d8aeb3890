//! The CPU backend: attention on packed pages, encoding, and the memory that pages lie in.
//!
//! `unsafe` stands behind three doors: [`memory`] hands out the bytes of a page, `gemm` checks extents before it
//! calls the matrix product, and nothing else needs it.

mod attend;
mod backend;
mod base;
mod class;
mod encode;
mod gemm;
mod lanes;
pub mod memory;
mod output;
mod own;
mod page;
mod softmax;
mod threads;
mod visible;

pub use memory::Cpu;
pub use threads::{get_num_threads, set_num_threads};
