//! Published prefixes and snapshots.

use crate::common::{attend, codec, contents, feed, plan, store};
use kvrs::{Cpu, Error, KvStore, SeqId};

fn ids(seed: i64, tokens: usize) -> Vec<i64> {
    (0..tokens as i64).map(|i| (i * 7 + seed) % 1000).collect()
}

fn filled(store: &KvStore<Cpu>, tokens: usize, seed: u64) -> SeqId {
    let id = store.create(1).unwrap()[0];
    feed(store, id, tokens, seed).unwrap();
    id
}

#[test]
fn a_snapshot_stays_as_it_was_and_sequences_start_from_it() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let id = filled(&store, 150, 1);
    let before = (contents(&store, id), attend(&store, id));
    let snapshot = store.snapshot(id).unwrap();
    assert_eq!(snapshot.length(), 150);
    feed(&store, id, 40, 2).unwrap();
    let after = contents(&store, id);
    store.free(id).unwrap();
    let new = store.create_from(3, &snapshot).unwrap();
    for seq in &new {
        assert_eq!((contents(&store, *seq), attend(&store, *seq)), before);
    }
    feed(&store, new[0], 40, 2).unwrap();
    assert_eq!(contents(&store, new[0]), after);
    assert_eq!(contents(&store, new[1]), before.0);
    store.check().unwrap();
    store.reset().unwrap();
    assert!(store.stats().unwrap().bytes_total > 0, "the snapshot still has its pages");
    drop(snapshot);
    assert_eq!(store.stats().unwrap().bytes_total, 0);
}

#[test]
fn a_snapshot_outlives_its_store_and_serves_no_other() {
    let plan = plan(&codec(0.0), 0, 0);
    let (one, other) = (store(&plan, None), store(&plan, None));
    let id = filled(&one, 50, 1);
    let snapshot = one.snapshot(id).unwrap();
    let error = other.create_from(1, &snapshot).unwrap_err().to_string();
    assert!(error.contains("a snapshot of another store"), "{error}");
    drop(one);
    assert_eq!(snapshot.length(), 50);
}

#[test]
fn the_longest_published_prefix_of_whole_blocks_is_found() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let id = filled(&store, 200, 1);
    let tokens = ids(0, 200);
    assert!(store.find_prefix(&tokens).unwrap().is_none());
    assert_eq!(store.publish(id, &tokens).unwrap(), 192);
    let (found, n) = store.find_prefix(&tokens).unwrap().unwrap();
    assert_eq!((n, found.length()), (192, 192));
    let longer = [tokens.clone(), ids(3, 70)].concat();
    assert_eq!(store.find_prefix(&longer).unwrap().unwrap().1, 192);
    let mut other = tokens.clone();
    other[191] += 1;
    // The sliding windows have dropped what a query at 128 would see, so 192 tokens cannot be cut to 128.
    assert!(store.find_prefix(&other).unwrap().is_none());
    other[0] += 1;
    assert!(store.find_prefix(&other).unwrap().is_none());
    assert!(store.find_prefix(&tokens[..63]).unwrap().is_none());
    store.truncate(id, 192).unwrap();
    let new = store.create_from(1, &found).unwrap()[0];
    assert_eq!(contents(&store, new), contents(&store, id));
    assert_eq!(store.publish(id, &tokens[..192]).unwrap(), 192, "once more changes nothing");
    store.check().unwrap();
}

#[test]
fn published_prefixes_make_way_for_new_pages_the_least_recently_used_first() {
    let plan = plan(&codec(4.0), 4, 16);
    let store = store(&plan, Some(1 << 20));
    let mut published = 0;
    for seed in 0..40 {
        let id = filled(&store, 192, seed as u64);
        published += store.publish(id, &ids(seed, 192)).unwrap();
        store.free(id).unwrap();
        // The first one stays in use.
        assert_eq!(store.find_prefix(&ids(0, 192)).unwrap().unwrap().1, 192);
        let stats = store.stats().unwrap();
        assert!(stats.bytes_total <= 1 << 20 && stats.bytes_codes > 0);
    }
    assert_eq!(published, 40 * 192);
    let found: Vec<bool> =
        (0..40).map(|seed| store.find_prefix(&ids(seed, 192)).unwrap().is_some()).collect();
    assert!(found[0] && found[39] && !found[1], "{found:?}");
    store.check().unwrap();
    store.reset().unwrap();
    assert_eq!(store.stats().unwrap().bytes_total, 0);
}

#[test]
fn a_prefix_that_somebody_holds_does_not_make_way() {
    let store = store(&plan(&codec(4.0), 4, 16), Some(1 << 20));
    let id = filled(&store, 192, 0);
    store.publish(id, &ids(0, 192)).unwrap();
    let (held, _) = store.find_prefix(&ids(0, 192)).unwrap().unwrap();
    assert!(matches!(store.reserve(&[id], 13_500), Err(Error::Capacity { .. })));
    assert!(store.find_prefix(&ids(0, 192)).unwrap().is_some());
    drop(held);
    assert!(matches!(store.reserve(&[id], 13_500), Err(Error::Capacity { .. })));
    assert!(store.find_prefix(&ids(0, 192)).unwrap().is_none());
}

#[test]
fn what_cannot_be_published_is_named() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let id = filled(&store, 100, 0);
    let error = store.publish(id, &ids(0, 101)).unwrap_err().to_string();
    assert!(error.contains("token_ids is 101 ids; allowed: at most 100"), "{error}");
    store.begin_prompt(&[id]).unwrap();
    let error = store.publish(id, &ids(0, 64)).unwrap_err().to_string();
    assert!(error.contains("prompt is open"), "{error}");
    assert_eq!(store.find_prefix(&ids(0, 64)).unwrap().map(|found| found.1), None);
}
