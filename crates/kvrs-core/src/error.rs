//! The one error type: each variant says what the caller can do about it.

/// Everything that a caller can cause.
///
/// Every message names the argument, its value and what is allowed. An error is returned before
/// anything has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument has a value outside its range.
    #[error("{what} is {got}; allowed: {allowed}")]
    Argument {
        /// The argument.
        what: String,
        /// Its value.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A tensor has the wrong rank or extents.
    #[error("{what} has shape {got}; allowed: {allowed}")]
    Shape {
        /// The argument.
        what: String,
        /// Its shape.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A tensor has an element type that cannot be used here.
    #[error("{what} has dtype {got}; allowed: {allowed}")]
    DType {
        /// The argument.
        what: String,
        /// Its element type.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A tensor is on another device than the store, or the device does not exist.
    #[error("{what} is on {got}; allowed: {allowed}")]
    Device {
        /// The argument.
        what: String,
        /// Where it is.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A plan asks for something that cannot be done.
    #[error("plan: {what} is {got}; allowed: {allowed}")]
    Plan {
        /// The field of the plan.
        what: String,
        /// Its value.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A sequence id, length or position that does not fit the store.
    #[error("{what} is {got}; allowed: {allowed}")]
    Sequence {
        /// The argument.
        what: String,
        /// Its value.
        got: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// The store's byte capacity would be passed.
    #[error("{what} needs {needed} bytes more, {free} of the capacity of {capacity} bytes are free")]
    Capacity {
        /// What asked for memory.
        what: String,
        /// Bytes that are missing for the request.
        needed: u64,
        /// Bytes that the store may still take.
        free: u64,
        /// The hard limit.
        capacity: u64,
    },
    /// A file is cut, of another version, or not what it should be.
    #[error("{what}: found {got}; expected {allowed}")]
    Format {
        /// The file or the section.
        what: String,
        /// What was found.
        got: String,
        /// What was expected.
        allowed: String,
    },
    /// A file could not be read or written.
    #[error("{what}: {got}")]
    Io {
        /// The path and what was tried.
        what: String,
        /// What the system answered.
        got: String,
    },
    /// A broken invariant: a bug of kvrs, never the caller's fault.
    #[error("internal error: {0}; please report it, and do not go on with this store")]
    Internal(String),
}

/// Shorthand used across the crates.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $variant:ident),* $(,)?) => {
        impl Error {$(
            $(#[$doc])*
            pub fn $name(what: impl ToString, got: impl ToString, allowed: impl ToString) -> Self {
                Self::$variant { what: what.to_string(), got: got.to_string(), allowed: allowed.to_string() }
            }
        )*}
    };
}
constructors! {
    /// [`Error::Argument`] from anything that prints.
    argument => Argument,
    /// [`Error::Shape`] from anything that prints.
    shape => Shape,
    /// [`Error::DType`] from anything that prints.
    dtype => DType,
    /// [`Error::Device`] from anything that prints.
    device => Device,
    /// [`Error::Plan`] from anything that prints.
    plan => Plan,
    /// [`Error::Sequence`] from anything that prints.
    sequence => Sequence,
    /// [`Error::Format`] from anything that prints.
    format => Format,
}
