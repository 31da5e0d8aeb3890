//! Rows that move: what is copied, what is counted, and what stays.

use crate::common::{attend, codec, contents, feed, plan, store};
use kvrs::{Cpu, KvStore, SeqId};
use std::sync::Arc;

fn filled(store: &KvStore<Cpu>, rows: u64, tokens: usize) -> Vec<SeqId> {
    let ids = store.create(rows as usize).unwrap();
    ids.iter().zip(0..).for_each(|(id, seed)| feed(store, *id, tokens, seed).unwrap());
    ids
}

#[test]
fn reordered_rows_hold_what_their_sources_held_and_copy_no_page() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let ids = filled(&store, 3, 203);
    let before: Vec<_> = ids.iter().map(|id| contents(&store, *id)).collect();
    let pages = |store: &KvStore<Cpu>| {
        let stats = store.stats().unwrap();
        stats.pages_total - stats.pages_free
    };
    let (held, encoded) = (pages(&store), store.stats().unwrap().tokens_encoded);
    store.reorder(&ids, &[2, 0, 0]).unwrap();
    assert_eq!(
        ids.iter().map(|id| contents(&store, *id)).collect::<Vec<_>>(),
        [2, 0, 0].map(|i| before[i].clone())
    );
    assert_eq!((pages(&store), store.stats().unwrap().tokens_encoded), (held / 3 * 2, encoded));
    for id in &ids {
        feed(&store, *id, 1, 7).unwrap();
    }
    // The open raw page of each of the four heads is copied once.
    assert_eq!(pages(&store), held / 3 * 2 + 4);
    store.check().unwrap();
}

#[test]
fn a_permutation_moves_sequences_with_what_they_had_reserved() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let ids = filled(&store, 3, 60);
    let before = [2, 0, 1].map(|i| contents(&store, ids[i]));
    store.reserve(&ids, 300).unwrap();
    let stats = store.stats().unwrap();
    store.reorder(&ids, &[2, 0, 1]).unwrap();
    assert_eq!(store.stats().unwrap(), stats);
    assert_eq!([0, 1, 2].map(|i| contents(&store, ids[i])), before);
}

#[test]
fn selected_rows_get_new_ids_and_the_old_ones_are_freed() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let ids = filled(&store, 3, 100);
    let before: Vec<_> = ids.iter().map(|id| contents(&store, *id)).collect();
    let new = store.select_rows(&ids, &[1, 1, 0, 1, 2]).unwrap();
    assert_eq!(new.len(), 5);
    assert!(ids.iter().all(|id| store.length(*id, None).is_err()) && new.iter().all(|id| !ids.contains(id)));
    assert!(new.iter().zip([1, 1, 0, 1, 2]).all(|(id, i)| contents(&store, *id) == before[i]));
    let few = store.select_rows(&new, &[2]).unwrap();
    assert_eq!(contents(&store, few[0]), before[0]);
    assert_eq!(store.stats().unwrap().sequences, 1);
    assert!(store.select_rows(&few, &[]).unwrap().is_empty());
    assert_eq!(store.stats().unwrap().bytes_total, 0);
}

#[test]
fn shared_pages_count_once_and_the_parts_sum_to_the_total() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let id = filled(&store, 1, 500)[0];
    let before = store.stats().unwrap();
    let forks: Vec<_> = (0..4).map(|_| store.fork(id).unwrap()).collect();
    let snapshot = store.snapshot(id).unwrap();
    let stats = store.stats().unwrap();
    assert_eq!(
        (stats.bytes_codes, stats.bytes_scales, stats.bytes_window),
        (before.bytes_codes, before.bytes_scales, before.bytes_window)
    );
    assert_eq!(stats.bytes_tables, 6 * before.bytes_tables);
    assert_eq!((stats.tokens_kept, stats.tokens_logical), (5 * before.tokens_kept, 5 * 500));
    let parts = stats.bytes_codes + stats.bytes_scales + stats.bytes_window + stats.bytes_tables;
    assert_eq!(stats.bytes_total, parts + stats.bytes_statistics + stats.bytes_slack);
    store.free(id).unwrap();
    for id in &forks {
        store.free(*id).unwrap();
    }
    let stats = store.stats().unwrap();
    assert_eq!((stats.bytes_codes, stats.bytes_tables), (before.bytes_codes, before.bytes_tables));
    drop(snapshot);
    assert_eq!(store.stats().unwrap().bytes_total, 0);
}

#[test]
fn a_removed_range_is_not_seen_and_what_follows_keeps_its_position() {
    for bits in [0.0, 4.0] {
        let store = store(&plan(&codec(bits), 4, 16), None);
        let id = filled(&store, 1, 300)[0];
        let bytes = store.stats().unwrap().bytes_total;
        store.remove(id, 2, 250).unwrap();
        assert_eq!(store.length(id, None).unwrap(), 300);
        let kept: Vec<i64> = (0..2).chain(250..300).collect();
        assert_eq!(store.kept_positions(id, 0, 1).unwrap(), kept);
        assert!(store.stats().unwrap().bytes_total <= bytes);
        feed(&store, id, 40, 9).unwrap();
        store.truncate(id, 290).unwrap();
        assert_eq!(store.kept_positions(id, 0, 0).unwrap(), (0..2).chain(250..290).collect::<Vec<i64>>());
        feed(&store, id, 1, 9).unwrap();
        assert_eq!(store.kept_positions(id, 0, 0).unwrap().last(), Some(&290));
        store.remove(id, 0, 291).unwrap();
        assert!(attend(&store, id).iter().all(|bits| f32::from_bits(*bits) == 0.0), "nothing is left to see");
        store.check().unwrap();
    }
}

#[test]
fn a_sequence_whose_tokens_were_all_removed_goes_on() {
    for (bits, sinks) in [(0.0, 19), (4.0, 19), (0.0, 40), (4.0, 4)] {
        for n in [1, 2, 15, 16, 17, 18, 20, 33] {
            let store = store(&plan(&codec(bits), sinks, 16), None);
            let id = filled(&store, 1, n)[0];
            let fork = store.fork(id).unwrap();
            for id in [fork, id] {
                store.remove(id, 0, n).unwrap();
                for (layer, shape) in store.plan().spec().shape.layers.iter().enumerate() {
                    store.keep(id, layer, &vec![Vec::new(); shape.kv_heads]).unwrap();
                }
                feed(&store, id, 3, 5).unwrap();
                feed(&store, id, 70, 6).unwrap();
                assert_eq!(
                    store.kept_positions(id, 0, 0).unwrap(),
                    (n as i64..n as i64 + 73).collect::<Vec<_>>()
                );
            }
            store.check().unwrap();
        }
    }
}

#[test]
fn removing_sealed_tokens_gives_their_pages_back() {
    for bits in [0.0, 4.0] {
        let store = store(&plan(&codec(bits), 0, 16), None);
        let id = filled(&store, 1, 2000)[0];
        let pages = |store: &KvStore<Cpu>| {
            let stats = store.stats().unwrap();
            stats.pages_total - stats.pages_free
        };
        let before = pages(&store);
        store.remove(id, 64, 1900).unwrap();
        assert!(pages(&store) * 2 < before, "{} of {before} pages", pages(&store));
    }
}

#[test]
fn parents_and_forks_go_on_in_threads_of_their_own() {
    let plan = plan(&codec(4.0), 4, 16);
    let shared = Arc::new(store(&plan, None));
    let id = filled(&shared, 1, 203)[0];
    let ids: Vec<SeqId> = std::iter::once(id).chain((0..3).map(|_| shared.fork(id).unwrap())).collect();
    std::thread::scope(|scope| {
        for id in &ids {
            let shared = &shared;
            scope.spawn(move || (0..60).for_each(|i| feed(shared, *id, 3, id.0 * 100 + i).unwrap()));
        }
    });
    for id in &ids {
        let alone = store(&plan, None);
        let one = filled(&alone, 1, 203)[0];
        (0..60).for_each(|i| feed(&alone, one, 3, id.0 * 100 + i).unwrap());
        assert_eq!(contents(&alone, one), contents(&shared, *id));
    }
    shared.check().unwrap();
}
