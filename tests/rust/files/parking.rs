//! Parked in host memory: pages are free meanwhile, and what comes back goes on as if it had never left.

use crate::common::{contents, fed, feed, packed, plan, saved, store, store_on};
use crate::histories::{act, any_plan, op};
use kvrs::{Compress, Cpu, Error, KvStore, SeqId};
use proptest::prelude::*;

/// Every verb that needs a sequence's pages names it and what brings it back.
fn is_refused(store: &KvStore<Cpu>, id: SeqId) {
    let answers = [
        feed(store, id, 1, 1).err(),
        store.decode(0, id, 0).err(),
        store.kept_positions(id, 0, 0).err(),
        store.selection_report(id).err(),
        store.truncate(id, 0).err(),
        store.drop_last(id, 0).err(),
        store.remove(id, 0, 0).err(),
        store.keep(id, 0, &vec![vec![]; store.plan().spec().shape.layers[0].kv_heads]).err(),
        store.fork(id).err(),
        store.snapshot(id).err(),
        store.publish(id, &[]).err(),
        store.reserve(&[id], 1).err(),
        store.reorder(&[id], &[0]).err(),
        store.select_rows(&[id], &[0]).err(),
        store.begin_prompt(&[id]).err(),
        store.end_prompt(&[id]).err(),
        store.save_to("a file", &mut Vec::new(), id, Compress::Deflate).err(),
    ];
    for (i, answer) in answers.into_iter().enumerate() {
        let text = answer.unwrap_or_else(|| panic!("call {i} did not need the pages")).to_string();
        assert!(text.contains(&id.to_string()) && text.contains("to_device"), "call {i}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_sequence_back_from_the_host_goes_on_as_one_that_never_left(
        plan in any_plan(), before in prop::collection::vec(op(), 0..8), after in prop::collection::vec(op(), 1..6),
        start in any::<u64>(),
    ) {
        let stores = [store_on(&plan.1, 1), store_on(&plan.1, 2)];
        let [one, other] = stores.each_ref().map(|store| fed(store, (start % 90) as usize, start));
        for op in &before {
            let [a, b] = [(&stores[0], one), (&stores[1], other)].map(|(store, id)| act(store, id, op).ok());
            prop_assert_eq!(a, b);
        }
        let (length, file) = (stores[0].length(one, None).unwrap(), saved(&stores[0], one, Compress::None));
        stores[1].to_host(&[other]).unwrap();
        let stats = stores[1].stats().unwrap();
        prop_assert_eq!((stats.bytes_total, stats.sequences, stats.tokens_logical), (0, 1, length as u64));
        prop_assert_eq!(stats.bytes_parked, file.len() as u64);
        prop_assert_eq!(stores[1].length(other, Some(1)).unwrap(), length);
        prop_assert!(saved(&stores[1], other, Compress::None) == file, "a parked sequence is its file");
        is_refused(&stores[1], other);
        stores[1].to_host(&[other]).unwrap();
        stores[1].to_device(&[other]).unwrap();
        stores[1].check().unwrap();
        prop_assert_eq!(stores[1].stats().unwrap().bytes_parked, 0);
        prop_assert_eq!(contents(&stores[0], one), contents(&stores[1], other));
        for op in &after {
            let (expected, got) = (act(&stores[0], one, op), act(&stores[1], other, op));
            prop_assert_eq!(expected.ok(), got.ok(), "{:?}", op);
        }
        prop_assert!(saved(&stores[0], one, Compress::None) == saved(&stores[1], other, Compress::None));
    }
}

#[test]
fn pages_of_a_parked_sequence_serve_others_and_it_waits_until_they_fit_again() {
    let plan = plan(&packed());
    let room = {
        let store = store(&plan);
        fed(&store, 900, 1);
        store.stats().unwrap().bytes_total
    };
    let store = KvStore::new(plan, Cpu::shared(), Some(room)).unwrap();
    let first = fed(&store, 800, 1);
    let held = contents(&store, first);
    let second = store.create(1).unwrap()[0];
    assert!(matches!(feed(&store, second, 800, 2), Err(Error::Capacity { .. })));
    store.truncate(second, 0).unwrap();
    store.to_host(&[first]).unwrap();
    feed(&store, second, 800, 2).unwrap();
    assert!(matches!(store.to_device(&[second, first]), Err(Error::Capacity { .. })));
    is_refused(&store, first);
    store.to_host(&[second]).unwrap();
    store.to_device(&[first]).unwrap();
    assert_eq!(contents(&store, first), held);
    store.free(second).unwrap();
    assert_eq!(store.stats().unwrap().bytes_parked, 0);
}

#[test]
fn either_all_sequences_of_a_call_move_or_none() {
    let store = store(&plan(&packed()));
    let [first, second] = [1, 2].map(|seed| fed(&store, 100, seed));
    let total = store.stats().unwrap().bytes_total;
    store.begin_prompt(&[second]).unwrap();
    assert!(store.to_host(&[first, second]).unwrap_err().to_string().contains("prompt is open"));
    assert_eq!(store.stats().unwrap().bytes_total, total);
    store.end_prompt(&[second]).unwrap();
    assert!(store.to_host(&[first, first]).is_err() && store.to_device(&[first, SeqId(99)]).is_err());
    store.to_host(&[second, first]).unwrap();
    assert_eq!(store.stats().unwrap().bytes_total, 0);
    store.reset().unwrap();
    assert_eq!(store.stats().unwrap().bytes_parked, 0);
}

#[test]
fn forks_and_snapshots_keep_the_pages_that_a_parked_sequence_shared() {
    let store = store(&plan(&packed()));
    let id = fed(&store, 300, 1);
    let held = contents(&store, id);
    let (fork, snapshot) = (store.fork(id).unwrap(), store.snapshot(id).unwrap());
    store.to_host(&[id]).unwrap();
    assert_eq!(contents(&store, fork), held);
    store.free(fork).unwrap();
    assert_eq!(contents(&store, store.create_from(1, &snapshot).unwrap()[0]), held);
    store.to_device(&[id]).unwrap();
    assert_eq!(contents(&store, id), held);
    let other = store.create_from(1, &snapshot).unwrap()[0];
    assert_eq!(feed(&store, id, 40, 2).unwrap(), feed(&store, other, 40, 2).unwrap());
}
