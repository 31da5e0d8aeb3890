//! What the tests of the workspace share: tensors with random content, attention in f64, and a naive store.
//!
//! Nothing here looks at a page: a [`Naive`] store keeps every token as it came, so that what the real store
//! answers can be told from what it ought to answer. [`Pair`] runs both side by side.
#![forbid(unsafe_code)]

pub mod attention;
pub mod faults;
pub mod feeding;
pub mod fuzz;
pub mod hostile;
pub mod naive;
pub mod pair;
pub mod sharing;
pub mod tensor;

pub use attention::{Head, Scoring};
pub use naive::Naive;
pub use pair::Pair;
pub use tensor::{Noise, Tensor};
