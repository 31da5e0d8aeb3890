//! Loading allocates no more than the file justifies, whatever it says.
#![allow(clippy::unwrap_used, reason = "a test may")]

use kvrs::{Compress, Error};
use kvrs_testkit::{Noise, feeding, fuzz, hostile};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Cursor;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts what is live and the most there ever was.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came; counting touches two atomic numbers only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak of what a load allocates; chunks of 2 MiB and more are mapped and counted by the store.
fn peak_of_load(file: &[u8]) -> (usize, kvrs::Result<()>) {
    let store = fuzz::store();
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = store.load_from("a file", Cursor::new(file));
    (PEAK.load(Ordering::Relaxed) - before, result.map(drop))
}

#[test]
fn no_file_makes_a_load_allocate_more_than_twice_its_size_and_16_mib() {
    let store = fuzz::store();
    let id = store.create(1).unwrap()[0];
    feeding::feed(&store, id, 2000, 7).unwrap();
    for compress in [Compress::None, Compress::Deflate] {
        let mut file = Vec::new();
        store.save_to("memory", &mut file, id, compress).unwrap();
        let (peak, result) = peak_of_load(&file);
        result.unwrap();
        assert!(peak <= 2 * file.len() + (16 << 20), "{peak} bytes for a file of {}", file.len());
        let mut lies: Vec<Vec<u8>> = Vec::new();
        for name in hostile::sections(&file) {
            for count in [1u64 << 31, 1 << 60, u64::MAX] {
                lies.push(hostile::with_header(&file, |header| header[&name]["shape"][0] = count.into()));
                lies.push(hostile::with_header(&file, |header| {
                    header[&name]["data_offsets"][1] = count.into();
                }));
            }
        }
        let mut noise = Noise::new(3);
        lies.extend((0..300).map(|_| hostile::mutant(&file, &mut noise)));
        for lie in lies {
            let (peak, result) = peak_of_load(&lie);
            assert!(!matches!(result, Err(Error::Internal(_))), "{result:?}");
            assert!(peak <= 2 * lie.len() + (16 << 20), "{peak} bytes for a file of {}", lie.len());
        }
    }
}
