//! Sequences that share pages: forks, snapshots, published prefixes, rows that move, and tokens that are taken back.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;
mod histories;
mod policies;
mod prefixes;
mod refusals;
mod rows;
