//! What unit tests of this crate share: skips that speak, and buffers whose neighbours cannot be read.

use crate::isa::Isa;
use std::ops::Deref;
use std::ptr::{NonNull, null_mut};

/// Whether `KVRS_REQUIRE`, a list as `avx2,avx512`, names `what`: tests that need it may then not be skipped.
pub(crate) fn required(what: &str) -> bool {
    std::env::var("KVRS_REQUIRE").is_ok_and(|list| list.split(',').any(|name| name.trim() == what))
}

/// Whether this CPU has an instruction set; says so if not.
///
/// # Panics
/// If the CPU has it not and `KVRS_REQUIRE` names it.
pub(crate) fn require(isa: Isa) -> bool {
    let (there, name) = (isa <= Isa::detected(), isa.name());
    assert!(there || !required(name), "KVRS_REQUIRE names {name}, which this CPU has not");
    if !there {
        eprintln!("not run: this CPU has no {name}");
    }
    there
}

/// Which end of a [`Guarded`] buffer touches memory that faults when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guard {
    Before,
    After,
}

/// A copy of bytes that touches an inaccessible page at one end: a read past that end is a fault.
#[derive(Debug)]
pub(crate) struct Guarded {
    start: NonNull<u8>,
    mapped_bytes: usize,
    offset: usize,
    len: usize,
}

impl Guarded {
    pub(crate) fn new(bytes: &[u8], guard: Guard) -> Self {
        // SAFETY: asks for a constant of the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("a page size");
        let usable = bytes.len().next_multiple_of(page);
        let mapped_bytes = usable + 2 * page;
        // SAFETY: a new private mapping that no one else knows of.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), mapped_bytes, libc::PROT_NONE, flags, -1, 0)
        };
        assert!(start != libc::MAP_FAILED, "memory for a test");
        let offset = if guard == Guard::Before { page } else { page + usable - bytes.len() };
        // SAFETY: the pages between the first and the last lie in the new mapping, and are made writable before the
        // copy, which ends inside of them.
        unsafe {
            let usable_start = start.cast::<u8>().add(page);
            let status = libc::mprotect(usable_start.cast(), usable, libc::PROT_READ | libc::PROT_WRITE);
            assert_eq!(status, 0, "memory for a test");
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.cast::<u8>().add(offset), bytes.len());
        }
        Self { start: NonNull::new(start.cast()).expect("a mapping"), mapped_bytes, offset, len: bytes.len() }
    }
}

impl Deref for Guarded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `new` made `len` readable bytes at `offset`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(self.offset), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whose borrows have ended.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

#[test]
fn guarded_bytes_are_the_given_ones_and_touch_the_page_border() {
    for len in [0, 1, 63, 64, 4096, 4097, 10_000] {
        let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
        let [before, after] = [Guard::Before, Guard::After].map(|guard| Guarded::new(&bytes, guard));
        assert_eq!((&before[..], &after[..]), (&bytes[..], &bytes[..]));
        assert_eq!(before.as_ptr().addr() % 4096, 0);
        assert_eq!((after.as_ptr().addr() + len) % 4096, 0);
    }
}
