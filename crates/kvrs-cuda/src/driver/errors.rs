//! From the driver's codes to errors: what can the caller do about it?

use crate::api::Basics;
use kvrs_core::Error;

pub(super) const OUT_OF_MEMORY: u32 = 2;

/// Codes that only a wrong call or a wrong kernel gives: an invalid value, context, handle or symbol, a kernel that
/// asks for more than there is, an illegal address or instruction.
const OURS: [u32; 13] = [1, 98, 201, 400, 500, 700, 701, 714, 715, 716, 717, 718, 719];

/// The error of a call, or a launch of the kernel with that name, on device `index`.
pub(super) fn error(basics: &Basics, index: usize, call: &str, code: u32) -> Error {
    let text = basics.name_and_text(code);
    if OURS.contains(&code) {
        return Error::Internal(format!("{call} on cuda:{index} gave {text}"));
    }
    let allowed = format!("a device on which {call} does not give {text}");
    Error::device("the store", format_args!("cuda:{index}"), allowed)
}
