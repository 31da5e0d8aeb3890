//! Full disks, files that change while they are read, memory that runs out: an error, and nothing has changed.

use crate::common::{contents, evicting, fed, feed, loaded, packed, plan, policy, raw, saved, store};
use kvrs::{Compress, Cpu, Error, KvStore, SeqId};
use kvrs_testkit::faults::{BadDisk, Faulty, FullDisk, Luck};
use serde_json::json;
use std::io::{Cursor, ErrorKind};
use std::sync::Arc;

#[test]
fn a_disk_that_fills_up_anywhere_is_an_error_and_the_sequence_goes_on() {
    let store = store(&plan(&packed()));
    let id = fed(&store, 150, 1);
    let whole = saved(&store, id, Compress::None);
    for room in (0..whole.len()).step_by(whole.len() / 97) {
        let mut disk = FullDisk { room, ..FullDisk::default() };
        let error = store.save_to("the disk", &mut disk, id, Compress::None).unwrap_err();
        assert!(matches!(&error, Error::Io { what, .. } if what == "writing the disk"), "{error}");
        assert!(whole.starts_with(&disk.bytes));
    }
    assert!(saved(&store, id, Compress::None) == whole);
}

#[test]
fn a_file_that_is_cut_or_fails_while_it_is_read_is_an_error_and_the_store_stays() {
    let store = store(&plan(&packed()));
    let id = fed(&store, 150, 1);
    for compress in [Compress::None, Compress::Deflate] {
        let file = saved(&store, id, compress);
        let before = store.stats().unwrap();
        for end in (0..file.len()).step_by(file.len() / 61) {
            let failing = |error| store.load_from("a file", BadDisk::new(&file, end, error)).unwrap_err();
            let (cut, broken) = (failing(None), failing(Some(ErrorKind::PermissionDenied)));
            assert!(matches!(cut, Error::Format { .. }), "cut at {end}: {cut}");
            assert!(matches!(broken, Error::Io { .. } | Error::Format { .. }), "{broken}");
            assert_eq!(store.stats().unwrap(), before);
        }
    }
}

#[test]
fn memory_that_runs_out_while_loading_is_a_capacity_error_and_the_store_stays() {
    let one = store(&plan(&raw()));
    let id = fed(&one, 3000, 1);
    let file = saved(&one, id, Compress::None);
    let luck = Luck::default();
    let backend = Arc::new(Faulty::new(Cpu::new(None).unwrap(), &luck));
    let other = KvStore::new(plan(&raw()), backend, None).unwrap();
    for chunks in 0.. {
        luck.fail_after(chunks);
        let Err(error) = other.load_from("a file", Cursor::new(&file)) else {
            assert!(chunks > 0, "the first chunk was made to fail");
            return;
        };
        assert!(matches!(error, Error::Capacity { .. }), "{error}");
        assert_eq!(other.stats().unwrap().bytes_total, 0, "after {chunks} chunks");
        other.check().unwrap();
    }
}

#[test]
fn a_capacity_that_the_pages_do_not_fit_is_an_error_and_other_sequences_stay() {
    let one = store(&plan(&packed()));
    let file = saved(&one, fed(&one, 9000, 1), Compress::None);
    let small = KvStore::new(plan(&packed()), Cpu::shared(), Some(512 << 10)).unwrap();
    let other = fed(&small, 100, 2);
    let before = contents(&small, other);
    let error = loaded(&small, &file).unwrap_err();
    assert!(matches!(&error, Error::Capacity { what, .. } if what == "loading a file"), "{error}");
    assert_eq!(contents(&small, other), before);
    assert!(feed(&small, other, 10, 3).is_ok());
}

#[test]
fn a_small_capacity_gives_published_prefixes_up_for_a_loaded_sequence() {
    let store = KvStore::new(plan(&raw()), Cpu::shared(), Some(2 << 20)).unwrap();
    let id = fed(&store, 900, 1);
    let file = saved(&store, id, Compress::None);
    store.publish(id, &(0..900).collect::<Vec<i64>>()).unwrap();
    store.free(id).unwrap();
    let copies: Vec<_> = (0..2).map_while(|_| loaded(&store, &file).ok()).collect();
    assert!(!copies.is_empty(), "room is made for the first");
    store.check().unwrap();
}

fn refused(store: &KvStore<Cpu>, id: SeqId, expected: &str) {
    let mut bytes = Vec::new();
    let error = store.save_to("a file", &mut bytes, id, Compress::None).unwrap_err();
    assert!(matches!(error, Error::Sequence { .. }) && error.to_string().contains(expected), "{error}");
    assert!(bytes.is_empty(), "nothing is written");
}

#[test]
fn open_prompts_steps_in_the_middle_and_unknown_ids_are_refused() {
    let store = store(&evicting(&packed(), &policy("snapkv", &json!({"budget": 44}))));
    let id = store.create(1).unwrap()[0];
    store.begin_prompt(&[id]).unwrap();
    refused(&store, id, "whose prompt is open");
    store.end_prompt(&[id]).unwrap();
    feed(&store, id, 1, 1).unwrap();
    let dtype = kvrs::Dtype::F16;
    let x = kvrs_testkit::Tensor::zeros(dtype, [1, 2, 1, 32]);
    let queries = kvrs::Queries::new(x.view());
    store.append_with(0, &[id], &kvrs::Tokens::new(x.view(), x.view()), &queries).unwrap();
    refused(&store, id, "layers have 1 to 2 tokens");
    store.free(id).unwrap();
    refused(&store, id, "not in this store");
}
