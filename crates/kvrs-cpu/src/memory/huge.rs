//! Memory on huge pages, where the system gives them: a page walk per 2 MiB instead of one per 4 KiB.

use std::ptr::NonNull;

/// Bytes of a huge page.
pub(super) const HUGE: usize = 2 << 20;

/// Maps zeroed memory that starts on a huge page boundary and asks for huge pages, before anything touches it.
///
/// `bytes` is a multiple of 64 KiB. `None`: the system has no such mapping.
#[cfg(target_os = "linux")]
pub(super) fn map(bytes: usize) -> Option<NonNull<u8>> {
    let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let all = bytes.checked_add(HUGE)?;
    // SAFETY: a new private mapping, at an address that the system chooses.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), all, rights, kind, -1, 0) };
    if base == libc::MAP_FAILED {
        return None;
    }
    let base = NonNull::new(base.cast::<u8>())?;
    let head = base.as_ptr().addr().next_multiple_of(HUGE) - base.as_ptr().addr();
    // SAFETY: `head + bytes` is below the mapping's `bytes + HUGE`; the parts around it are unmapped, once, and
    // nothing knows their addresses. Advice never changes what memory holds; where it is refused, pages stay small.
    unsafe {
        let start = base.add(head);
        unmap(base, head);
        unmap(start.add(bytes), HUGE - head);
        libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        Some(start)
    }
}

/// Gives memory back to the system.
///
/// # Safety
/// The range is mapped by [`map`], and nothing uses it any more.
#[cfg(target_os = "linux")]
pub(super) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        let done = unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        debug_assert_eq!(done, 0, "a mapped range is unmapped");
    }
}

/// Whether the first huge page of fresh memory really is one: touching a byte then brings in all of it.
///
/// # Safety
/// `start` comes from [`map`] with at least [`HUGE`] bytes, and nobody else knows it yet.
#[cfg(target_os = "linux")]
pub(super) unsafe fn is_huge(start: NonNull<u8>) -> bool {
    const MOST_PAGES: usize = HUGE / 4096;
    let mut resident = [0u8; MOST_PAGES];
    // SAFETY: the byte is mapped, writable and ours alone; it is zero and stays zero.
    unsafe { start.as_ptr().write_volatile(0) };
    // SAFETY: the range is mapped, and `resident` has a byte for each page of it, as no page is below 4 KiB.
    let known = unsafe { libc::mincore(start.as_ptr().cast(), HUGE, resident.as_mut_ptr()) } == 0;
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(HUGE);
    known && page < HUGE && resident[..HUGE / page.max(4096)].iter().all(|flags| flags & 1 == 1)
}

/// Elsewhere no memory is mapped.
#[cfg(not(target_os = "linux"))]
pub(super) fn map(_: usize) -> Option<NonNull<u8>> {
    None
}

/// Elsewhere no memory is mapped.
///
/// # Safety
/// None: it does nothing.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn unmap(_: NonNull<u8>, _: usize) {}

/// Elsewhere no memory is mapped.
///
/// # Safety
/// None: it does nothing.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn is_huge(_: NonNull<u8>) -> bool {
    false
}
