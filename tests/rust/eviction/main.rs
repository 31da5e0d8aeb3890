//! Eviction: what is kept, when it is chosen, and that the bytes really go.
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod common;
mod histories;
mod later;
mod pages;
mod prompts;
mod refusals;
mod selection;
