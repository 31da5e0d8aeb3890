//! Sequences on disk: what is loaded goes on as what was saved, and a file that lies is an error.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod common;
mod corpus;
mod faults;
mod histories;
mod lies;
mod parking;
