//! What is refused, by name, and changes nothing.

use crate::common::{codec, contents, feed, plan, store};
use kvrs::{Dtype, Error, SeqId, Tokens};
use kvrs_testkit::Tensor;

#[test]
fn wrong_ids_counts_and_indices_are_named_and_nothing_changes() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let ids = store.create(2).unwrap();
    for id in &ids {
        feed(&store, *id, 100, id.0).unwrap();
    }
    let before: Vec<_> = ids.iter().map(|id| contents(&store, *id)).collect();
    let dead = SeqId(99);
    let cases: Vec<(kvrs::Result<()>, &str)> = vec![
        (store.fork(dead).map(|_| ()), "99"),
        (store.snapshot(dead).map(|_| ()), "99"),
        (store.remove(dead, 0, 0), "99"),
        (store.drop_last(ids[0], 101), "n is 101; allowed: 0..=100"),
        (store.truncate(ids[0], 101), "n is 101; allowed: 0..=100"),
        (store.remove(ids[0], 0, 101), "stop is 101; allowed: 0..=100"),
        (store.remove(ids[0], 5, 4), "start is 5; allowed: 0..=4"),
        (store.reorder(&ids, &[0, 2]), "index[1] is 2; allowed: a row below 2"),
        (store.reorder(&ids, &[0]), "index has shape 1 numbers; allowed: 2"),
        (store.reorder(&[ids[0], ids[0]], &[0, 1]), "twice"),
        (store.select_rows(&ids, &[0, 7]).map(|_| ()), "index[1] is 7"),
        (store.select_rows(&[ids[0], dead], &[0]).map(|_| ()), "99"),
        (store.truncate(ids[0], 20), "layer 2 has dropped what lies behind its window"),
    ];
    for (answer, part) in cases {
        let error = answer.unwrap_err().to_string();
        assert!(error.contains(part), "{error}: {part}");
    }
    assert_eq!(ids.iter().map(|id| contents(&store, *id)).collect::<Vec<_>>(), before);
    store.check().unwrap();
}

#[test]
fn a_sequence_in_the_middle_of_a_step_is_neither_forked_nor_moved() {
    let store = store(&plan(&codec(4.0), 4, 16), None);
    let ids = store.create(2).unwrap();
    let x = Tensor::zeros(Dtype::F32, [1, 2, 3, 32]);
    store.append(0, &ids[..1], &Tokens::new(x.view(), x.view())).unwrap();
    for error in [
        store.fork(ids[0]).unwrap_err(),
        store.snapshot(ids[0]).unwrap_err(),
        store.reorder(&ids, &[1, 0]).unwrap_err(),
        store.select_rows(&ids, &[0, 0]).unwrap_err(),
        store.publish(ids[0], &[]).unwrap_err(),
    ] {
        assert!(error.to_string().contains("whose layers have 0 to 3 tokens"), "{error}");
    }
    store.truncate(ids[0], 0).unwrap();
    store.fork(ids[0]).unwrap();
}

#[test]
fn a_fork_that_does_not_fit_changes_nothing() {
    let plan = plan(&codec(4.0), 4, 16);
    let full = store(&plan, Some(1 << 20));
    let id = full.create(1).unwrap()[0];
    feed(&full, id, 1000, 1).unwrap();
    assert!(matches!((0..1000).find_map(|_| full.fork(id).err()), Some(Error::Capacity { .. })));
    let before = (full.stats().unwrap(), contents(&full, id));
    for answer in [
        full.fork(id).map(|_| ()),
        full.snapshot(id).map(|_| ()),
        full.select_rows(&[id], &[0, 0]).map(|_| ()),
        full.publish(id, &[1; 1000]).map(|_| ()),
    ] {
        assert!(matches!(answer, Err(Error::Capacity { .. })), "{answer:?}");
    }
    assert_eq!((full.stats().unwrap(), contents(&full, id)), before);
    full.check().unwrap();
}
