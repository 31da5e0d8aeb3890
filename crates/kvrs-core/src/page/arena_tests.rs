use super::testing::Counting;
use super::*;
use crate::Error;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// Raw pages, 4-bit pages at 128 channels, neighbours of the slab limits, tiny and huge.
const SIZES: [u32; 10] = [8192, 8448, 64, 65536, 65600, 3136, 100_032, 262_144, 262_208, 1_100_032];

fn arena(capacity: Option<u64>) -> (Arc<Counting>, Arena<Counting>) {
    let source = Counting::new(u64::MAX);
    (Arc::clone(&source), Arena::new(source, capacity).unwrap())
}

fn drain<C>(supply: &mut Supply<C>) -> Vec<Page<C>> {
    SIZES
        .iter()
        .flat_map(|&bytes| (0..supply.count(bytes)).map(|_| supply.take(bytes)).collect::<Vec<_>>())
        .collect()
}

/// Extents of pages by chunk, which must not meet.
fn assert_disjoint(pages: &[Page<Arc<testing::Bytes>>]) {
    let mut spans: Vec<_> =
        pages.iter().map(|p| (p.chunk().id(), p.offset(), p.offset() + p.bytes())).collect();
    spans.sort_unstable();
    assert!(spans.windows(2).all(|w| w[0].0 != w[1].0 || w[0].2 <= w[1].1), "{spans:?}");
    assert!(pages.iter().all(|p| p.offset() % 64 == 0 && (p.offset() + p.bytes()) as u64 <= p.chunk().len()));
}

#[derive(Debug, Clone)]
enum Op {
    Reserve(Vec<(usize, usize)>),
    Free(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let wants = prop::collection::vec((0..SIZES.len(), 0usize..40), 1..4);
    prop::collection::vec(
        prop_oneof![wants.prop_map(Op::Reserve), (0usize..10_000).prop_map(Op::Free)],
        1..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn pages_are_neither_lost_nor_shared_and_the_capacity_holds(
        ops in ops(), capacity in prop_oneof![Just(None), (64 * KIB..40 * MIB).prop_map(Some)],
    ) {
        let (source, arena) = arena(capacity);
        let mut held = Vec::new();
        for op in ops {
            match op {
                Op::Reserve(wants) => {
                    let wants: Vec<_> = wants.into_iter().map(|(size, count)| (SIZES[size], count)).collect();
                    let before = arena.stats();
                    match arena.reserve("test", &wants) {
                        Ok(mut supply) => {
                            prop_assert_eq!(supply.pages(), wants.iter().map(|w| w.1).sum::<usize>());
                            held.extend(drain(&mut supply));
                        }
                        Err(Error::Capacity { needed, free, .. }) => {
                            prop_assert!(needed > free);
                            prop_assert_eq!(arena.stats(), before);
                        }
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Op::Free(at) if !held.is_empty() => drop(held.swap_remove(at % held.len())),
                Op::Free(_) => {}
            }
            arena.check().unwrap();
            assert_disjoint(&held);
            let stats = arena.stats();
            prop_assert_eq!(stats.pages_total - stats.pages_free, held.len() as u64);
            prop_assert_eq!(stats.page_bytes_used, held.iter().map(|p| p.bytes() as u64).sum::<u64>());
            prop_assert_eq!(stats.chunk_bytes, source.live());
        }
        prop_assert!(source.peak.load(Ordering::Relaxed) <= capacity.unwrap_or(u64::MAX));
        held.clear();
        arena.check().unwrap();
        prop_assert_eq!(arena.stats(), ArenaStats { capacity, ..ArenaStats::default() });
        prop_assert_eq!(source.live(), 0);
    }

    #[test]
    fn footprint_is_what_an_arena_holds(
        wants in prop::collection::vec((0usize..8, 0usize..600), 1..8), pieces in 1usize..5,
    ) {
        let wants: Vec<_> = wants.into_iter().map(|(size, count)| (SIZES[size], count)).collect();
        let (_, arena) = arena(None);
        let mut held = Vec::new();
        for piece in 0..pieces {
            let part: Vec<_> = wants.iter().map(|&(b, n)| (b, n * (piece + 1) / pieces - n * piece / pieces)).collect();
            held.push(arena.reserve("test", &part).unwrap());
        }
        let wants: Vec<_> = wants.iter().map(|&(bytes, count)| (bytes, count as u64)).collect();
        prop_assert_eq!(footprint(&wants), arena.stats().chunk_bytes);
    }

    #[test]
    fn footprint_of_huge_pages_is_close(counts in prop::collection::vec(1usize..90, 10)) {
        let wants: Vec<_> = SIZES.into_iter().zip(counts).collect();
        let (_, arena) = arena(None);
        let _held = arena.reserve("test", &wants).unwrap();
        let wants: Vec<_> = wants.iter().map(|&(bytes, count)| (bytes, count as u64)).collect();
        let (plan, real) = (footprint(&wants), arena.stats().chunk_bytes);
        let bound = (plan * 3 / 100).max(2 * MIB);
        prop_assert!(plan.abs_diff(real) <= bound, "{} planned, {} held", plan, real);
    }
}

#[test]
fn a_capacity_below_one_slab_is_refused() {
    let error = Arena::new(Counting::new(0), Some(65535)).unwrap_err().to_string();
    assert_eq!(error, "capacity is 65535 bytes; allowed: None or at least 65536 bytes");
    assert!(Arena::new(Counting::new(0), Some(65536)).is_ok());
}

#[test]
fn a_failed_reservation_leaves_the_other_pages_alone() {
    let (_, arena) = arena(Some(10 * (65536 + ENTRY_BYTES)));
    let held = arena.reserve("append", &[(65536, 6)]).unwrap();
    let before = arena.stats();
    let error = arena.reserve("append", &[(65536, 7)]).unwrap_err();
    assert!(matches!(&error, Error::Capacity { what, .. } if what == "append"), "{error}");
    assert_eq!((arena.stats(), held.pages()), (before, 6));
    let more = arena.reserve("append", &[(65536, 4)]).unwrap();
    assert!(arena.reserve("append", &[(65536, 1)]).is_err());
    drop((held, more));
    assert_eq!(arena.stats().chunk_bytes, 0);
}

#[test]
fn a_failing_source_leaves_everything_as_it_was() {
    let source = Counting::new(3 * MIB);
    let arena = Arena::new(Arc::clone(&source), None).unwrap();
    let held = arena.reserve("append", &[(8192, 100)]).unwrap();
    let before = (arena.stats(), source.live());
    let error = arena.reserve("append", &[(8192, 10), (8448, 1000)]).unwrap_err();
    assert_eq!(error, Error::Internal("out of memory".into()));
    assert_eq!((arena.stats(), source.live(), held.pages()), (before.0, before.1, 100));
    arena.check().unwrap();
}

#[test]
fn a_fragmented_arena_serves_pages_from_its_holes() {
    let (_, arena) = arena(None);
    let mut all = arena.reserve("append", &[(8192, 64)]).unwrap();
    let mut sequences: Vec<_> = (0..16).map(|_| all.split(&[(8192, 4)])).collect();
    let mut index = 0..;
    sequences.retain(|_| index.next().is_some_and(|i: usize| i % 2 == 1));
    let before = arena.stats();
    let loaded = arena.reserve("load", &[(8192, 20)]).unwrap();
    assert_eq!((sequences.len(), loaded.pages(), arena.stats().chunk_bytes), (8, 20, before.chunk_bytes));
    arena.check().unwrap();
}

#[test]
fn pages_come_in_address_order() {
    let (_, arena) = arena(None);
    let mut supply = arena.reserve("test", &[(8192, 100)]).unwrap();
    let mut part = supply.split(&[(8192, 60)]);
    let at = |page: &Page<Arc<testing::Bytes>>| (page.chunk().id(), page.offset());
    let pages: Vec<_> = (0..60).map(|_| part.take(8192)).chain((0..40).map(|_| supply.take(8192))).collect();
    assert!(pages.is_sorted_by_key(at));
    assert_eq!((supply.pages(), supply.bytes(), part.count(8192)), (0, 0, 0));
}

/// Reserves `count` pages a group, for all groups at once, takes them group by group and tells the share of
/// neighbours in a group whose addresses ascend, and of those that touch.
fn neighbours(arena: &Arena<Counting>, groups: usize, count: usize) -> (f64, f64) {
    let wants: Vec<_> = (0..groups).flat_map(|_| [(8192, 3), (8448, count)]).collect();
    let mut supply = arena.reserve("prompt", &wants).unwrap();
    let (mut ascending, mut touching) = (0, 0);
    for _ in 0..groups {
        let mut part = supply.split(&[(8192, 3), (8448, count)]);
        let pages: Vec<_> = (0..count).map(|_| part.take(8448)).collect();
        for pair in pages.windows(2) {
            let [a, b] = [0, 1].map(|i| (pair[i].chunk().id(), pair[i].offset()));
            ascending += usize::from(a < b);
            touching += usize::from(a.0 == b.0 && a.1 + 8448 == b.1);
        }
    }
    let all = (groups * (count - 1)) as f64;
    (f64::from(ascending as u32) / all, f64::from(touching as u32) / all)
}

#[test]
fn pages_of_each_group_of_a_prompt_are_neighbours_in_address_order() {
    let (_, arena) = arena(None);
    let (ascending, touching) = neighbours(&arena, 8, 100);
    assert!(ascending == 1.0 && touching >= 0.95, "{ascending} ascend, {touching} touch");
}

#[test]
fn pages_ascend_in_an_arena_full_of_holes_too() {
    let (_, arena) = arena(None);
    let mut all = arena.reserve("test", &[(8448, 1000)]).unwrap();
    let mut pages: Vec<_> = (0..1000).map(Some).map(|page| page.map(|_: i32| all.take(8448))).collect();
    let mut at = 1usize;
    for _ in 0..400 {
        at = (at * 509 + 7) % 1000;
        pages[at] = None;
    }
    let (ascending, _) = neighbours(&arena, 3, 100);
    assert_eq!(ascending, 1.0);
}

#[test]
fn a_large_reservation_takes_huge_chunks_and_no_more_bytes_than_small_ones() {
    let sizes = |counts: &[usize]| {
        let (source, arena) = arena(None);
        let reserve = |&count: &usize| drain(&mut arena.reserve("test", &[(8192, count)]).unwrap());
        let pages: Vec<_> = counts.iter().flat_map(reserve).collect();
        let chunks = pages.iter().map(|page| (page.chunk().id(), page.chunk().len()));
        (
            source.live(),
            chunks.collect::<std::collections::BTreeMap<_, _>>().into_values().collect::<Vec<_>>(),
        )
    };
    let (whole, chunks) = sizes(&[2500]);
    assert_eq!(chunks, vec![2 * MIB; 10]);
    let (pieces, small) = sizes(&vec![1; 2500]);
    assert_eq!(whole, pieces);
    assert!(small.len() > 20 && small[0] == 256 * KIB);
    let (_, chunks) = sizes(&[300]);
    assert_eq!(chunks, [2 * MIB, 512 * KIB], "2.34 MiB of pages");
}

#[test]
fn odd_page_sizes_and_impossible_counts_are_refused() {
    let (_, unbounded) = arena(None);
    for bytes in [0, 56, 100] {
        assert!(matches!(unbounded.reserve("test", &[(bytes, 1)]), Err(Error::Internal(_))));
    }
    let (_, bounded) = arena(Some(MIB));
    assert!(matches!(bounded.reserve("test", &[(64, usize::MAX)]), Err(Error::Capacity { .. })));
    assert!(matches!(bounded.reserve("test", &[((1 << 20) + 64, 1)]), Err(Error::Capacity { .. })));
    assert_eq!(bounded.reserve("test", &[]).unwrap().pages(), 0);
}

#[test]
fn a_capacity_can_be_filled_one_page_after_the_other() {
    let large = [(64, 5 * MIB, 0.95), (1024, 5 * MIB, 0.95), (8448, 5 * MIB, 0.93), (65536, 5 * MIB, 0.95)];
    for (bytes, capacity, part) in large.into_iter().chain([(64, 512 * KIB, 0.85)]) {
        let (_, arena) = arena(Some(capacity));
        let mut held = Vec::new();
        while let Ok(page) = arena.reserve("test", &[(bytes, 1)]) {
            held.push(page);
        }
        let stats = arena.stats();
        let used = (stats.page_bytes_used + stats.table_bytes) as f64 / capacity as f64;
        assert!(used > part, "{used} of the capacity is used with pages of {bytes} bytes");
    }
}

#[test]
fn table_entries_count_against_the_capacity() {
    let (_, arena) = arena(Some(128 * KIB));
    let full = arena.reserve("test", &[(64, 1024)]);
    assert!(full.is_err(), "64 KiB of pages and 160 KiB of entries");
    let part = arena.reserve("test", &[(64, 400)]).unwrap();
    assert_eq!((arena.stats().chunk_bytes, arena.stats().table_bytes), (64 * KIB, 400 * ENTRY_BYTES));
    assert!(arena.reserve("test", &[(64, 10)]).is_err(), "624 pages are free, 1536 bytes for entries");
    let rest = arena.reserve("test", &[(64, 9)]).unwrap();
    assert_eq!((part.pages(), rest.pages()), (400, 9));
    arena.check().unwrap();
}

#[test]
fn an_entry_is_no_larger_than_what_is_counted_for_it() {
    // A table grows by doubling, so an entry may stand for two; an Arc adds two counters.
    let bytes = 2 * size_of::<Entry<Arc<()>>>() + size_of::<Page<Arc<()>>>() + 2 * size_of::<usize>();
    assert!(bytes as u64 <= ENTRY_BYTES, "{bytes} bytes");
}

#[test]
fn threads_reserve_and_free_at_the_same_time() {
    let (source, arena) = arena(Some(8 * MIB));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let arena = arena.clone();
            scope.spawn(move || {
                for i in 0..500usize {
                    let wants = [(SIZES[(thread + i) % 4], i % 30), (SIZES[i % 6], 3)];
                    drop(arena.reserve("test", &wants));
                }
            });
        }
    });
    arena.check().unwrap();
    assert_eq!(source.live(), 0);
}

#[derive(Debug)]
struct Panicking;

impl ChunkSource for Panicking {
    type Chunk = ();
    fn allocate(&self, bytes: usize) -> crate::Result<()> {
        assert!(bytes <= 256 << 10, "no large chunks");
        Ok(())
    }
}

#[test]
fn after_a_panic_inside_the_arena_calls_fail_and_pages_can_still_be_dropped() {
    let arena = Arena::new(Arc::new(Panicking), None).unwrap();
    let held = arena.reserve("test", &[(8192, 4)]).unwrap();
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| arena.reserve("test", &[(1 << 20, 1)])));
    assert!(panic.is_err());
    assert!(matches!(arena.reserve("test", &[(64, 1)]), Err(Error::Internal(_))));
    assert!(arena.check().is_err());
    drop(held);
}
