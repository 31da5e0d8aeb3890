//! What the bytes of a page mean: descriptors, transforms, codebooks, packed layouts and quantisers.
//!
//! The code here is scalar and is the meaning: every faster backend must give the same codes and scales
//! bit for bit (`docs/encoding.md`, `docs/layouts.md`).
#![forbid(unsafe_code)]

pub mod backend;
pub mod calibrated;
pub mod codebook;
pub mod codec;
pub mod desc;
pub mod encode;
pub mod layout;
pub mod nonuniform;
pub mod offset;
pub mod phasor;
pub mod quant;
pub mod rng;
pub mod scale;
pub mod tile;
pub mod transform;
pub mod view;

pub use codec::{HeadCodec, SideCodec};
pub use desc::{Arith, Elem, Inner, PageDesc, Path, RunDesc, Side, SideDesc};
pub use view::{DeviceBytes, Dtype, Place, View, ViewMut};
