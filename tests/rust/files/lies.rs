//! Files that lie: each a typed error that says what is wrong, and the store is as it was.

use crate::common::{evicting, fed, loaded, packed, plan, policy, raw, saved, store};
use kvrs::{Compress, Cpu, Error, KvStore, Plan, PlanSpec, SeqId};
use kvrs_testkit::hostile::{cuts, fix_checksums, section, sections, with_header};
use serde_json::json;
use std::time::{Duration, Instant};

/// A store with one sequence, and its file.
fn setup(compress: Compress) -> (KvStore<Cpu>, SeqId, Vec<u8>) {
    let store = store(&evicting(&packed(), &policy("scissorhands", &json!({"budget": 60, "history": 20}))));
    let id = fed(&store, 150, 1);
    let file = saved(&store, id, compress);
    (store, id, file)
}

/// The error that a file gives, in time, with the store unchanged.
fn error(store: &KvStore<Cpu>, file: &[u8]) -> Error {
    let (before, began) = (store.stats().unwrap(), Instant::now());
    let error = loaded(store, file).expect_err("a file that lies");
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(store.stats().unwrap(), before);
    error
}

fn is_format(error: &Error, expected: &str) {
    assert!(matches!(error, Error::Format { .. }) && error.to_string().contains(expected), "{error}");
}

#[test]
fn every_byte_of_the_header_counts() {
    for compress in [Compress::None, Compress::Deflate] {
        let (store, _, file) = setup(compress);
        for at in section(&file, "") {
            for byte in [0, 0xFF, file[at].wrapping_add(1)] {
                let mut lie = file.clone();
                lie[at] = byte;
                if lie != file {
                    is_format(&error(&store, &lie), "a file");
                }
            }
        }
    }
}

#[test]
fn every_byte_of_the_sections_counts() {
    let (store, _, file) = setup(Compress::None);
    let header = section(&file, "").end;
    for at in (header..file.len()).step_by(41).chain(file.len() - 40..file.len()) {
        let mut lie = file.clone();
        lie[at] ^= 0x10;
        is_format(&error(&store, &lie), "checksum of ");
    }
}

#[test]
fn cuts_and_tails_are_refused() {
    for compress in [Compress::None, Compress::Deflate] {
        let (store, _, file) = setup(compress);
        for cut in cuts(&file) {
            is_format(&error(&store, &file[..cut]), "a file");
        }
        is_format(&error(&store, &[&file[..], &[0]].concat()), "bytes of header and sections");
    }
}

#[test]
fn metadata_that_is_of_another_kind_names_the_field_and_both_values() {
    let (store, _, file) = setup(Compress::None);
    let mine = store.plan().hash().to_owned();
    for (field, value, expected) in [
        ("format", "kvrs-plan", "format: found kvrs-plan; expected kvrs-sequence"),
        ("version", "2", "version: found 2; expected 1"),
        ("layout", "9", "layout: found 9; expected 1"),
        ("plan", "0123", &format!("plan: found 0123; expected {mine}")),
        ("tokens", "-1", "tokens: found -1; expected a whole number"),
        ("tokens", "0150", "tokens: found 0150; expected 150"),
        ("tokens", "149", "length: found 150; expected 149"),
        ("start", "-3", "start: found -3; expected none, or 0 up to 2^40"),
        ("start", "none", "none if there are no tokens, only then"),
        ("input", "int8", "input: found int8; expected float16, bfloat16 or float32"),
        ("window", "float32", "window: found float32; expected a 16-bit type"),
        ("compress", "zip", "compress: found zip; expected none or deflate"),
        ("colour", "red", "colour: found red; expected no such field"),
    ] {
        let lie = with_header(&file, |header| header["__metadata__"][field] = json!(value));
        is_format(&error(&store, &lie), expected);
    }
    let bare = with_header(&file, |header| drop(header.as_object_mut().unwrap().remove("__metadata__")));
    is_format(&error(&store, &bare), "format: found nothing");
}

#[test]
fn a_file_of_another_plan_or_window_type_is_refused() {
    let (_, _, file) = setup(Compress::None);
    let other = store(&evicting(&packed(), &policy("scissorhands", &json!({"budget": 61, "history": 20}))));
    is_format(&error(&other, &file), other.plan().hash());
    let spec = |dtype: &str| PlanSpec { window_dtype: Some(dtype.into()), ..plan(&raw()).spec().clone() };
    let [half, brain] = ["float16", "bfloat16"].map(|dtype| store(&Plan::new(spec(dtype)).unwrap()));
    let file = saved(&half, fed(&half, 30, 1), Compress::None);
    is_format(&error(&brain, &file), "window: found float16; expected bfloat16, that of the store");
}

#[test]
fn sections_that_overlap_leave_gaps_or_lie_outside_are_refused() {
    let (store, _, file) = setup(Compress::None);
    for name in sections(&file) {
        for (from, to) in [(0i64, 1i64), (1, 1), (-8, 0), (8, 8), (0, 1 << 31), (0, 1 << 60)] {
            let lie = with_header(&file, |header| {
                let offsets = header[&name]["data_offsets"].as_array_mut().unwrap();
                for (offset, by) in offsets.iter_mut().zip([from, to]) {
                    *offset = json!(offset.as_i64().unwrap() + by);
                }
            });
            is_format(&error(&store, &lie), "a file");
        }
        for count in [json!(1u64 << 31), json!(1u64 << 60), json!(-1), json!(u64::MAX)] {
            let lie = with_header(&file, |header| header[&name]["shape"][0] = count);
            is_format(&error(&store, &lie), "a file");
        }
        let gone = with_header(&file, |header| drop(header.as_object_mut().unwrap().remove(&name)));
        is_format(&error(&store, &gone), "a file");
    }
    let more = with_header(&file, |header| {
        header["pages.9.9.9"] = json!({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]});
    });
    is_format(&error(&store, &more), "a file");
}

#[test]
fn a_header_that_says_it_is_long_is_not_read() {
    let (store, _, mut file) = setup(Compress::None);
    for length in [u64::MAX, 1 << 60, 1 << 31, file.len() as u64] {
        file[..8].copy_from_slice(&length.to_le_bytes());
        is_format(&error(&store, &file), "header: found ");
    }
}

/// Row `row` of `entries.0.0`, changed, with checksums that fit.
fn with_entry(file: &[u8], row: usize, change: impl FnOnce(&mut [u32])) -> Vec<u8> {
    let mut lie = file.to_vec();
    let at = section(file, "entries.0.0").start + row * 32;
    let bytes = &mut lie[at..at + 32];
    let mut words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    change(&mut words);
    bytes.copy_from_slice(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
    fix_checksums(&mut lie);
    lie
}

#[test]
fn entries_that_no_store_can_have_saved_are_refused_behind_good_checksums() {
    let (store, _, file) = setup(Compress::None);
    let rows = section(&file, "entries.0.0").len() / 32;
    let word = |row: usize, column: usize| {
        with_entry(&file, row, |_| {})[section(&file, "entries.0.0").start + row * 32 + column * 4]
    };
    for row in 0..rows {
        for (column, values) in [
            (0, vec![3, 7, u32::MAX]),
            (1, vec![2, 255, 256, u32::MAX]),
            (2, vec![0, 65, 255, u32::MAX]),
            (3, vec![2, u32::MAX]),
            (6, vec![2, u32::MAX]),
            (7, vec![u32::MAX, 1 << 31, 1 << 30]),
        ] {
            for value in values {
                if u32::from(word(row, column)) != value {
                    let lie = with_entry(&file, row, |words| words[column] = value);
                    is_format(&error(&store, &lie), "head 0");
                }
            }
        }
        let dead = with_entry(&file, row, |words| words[4..6].fill(u32::MAX));
        is_format(&error(&store, &dead), "a file");
    }
}

/// A word of a section, changed, with checksums that fit.
fn with_word(file: &[u8], name: &str, at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut lie = file.to_vec();
    let start = section(file, name).start + at * bytes.len();
    lie[start..start + bytes.len()].copy_from_slice(bytes);
    fix_checksums(&mut lie);
    lie
}

#[test]
fn layers_heads_and_statistics_that_cannot_be_are_refused() {
    let (store, _, file) = setup(Compress::None);
    for (column, value, expected) in [
        (0, 151, "length"),
        (0, 1 << 60, "length"),
        (1, 1, "origin"),
        (1, 151, "origin"),
        (1, 60, "origin"),
        (2, 149, "longest"),
        (2, 1 << 31, "longest"),
        (3, 2, "budget"),
        (3, 1 << 40, "budget"),
        (4, 3, "outcome"),
    ] {
        let lie = with_word(&file, "layers", column, &u64::to_le_bytes(value));
        is_format(&error(&store, &lie), &format!("layer 0: {expected}"));
    }
    for (column, value, expected) in
        [(0, 151, "evicted"), (1, 11, "seen"), (1, 1 << 40, "seen"), (1, u64::MAX, "history")]
    {
        let lie = with_word(&file, "heads", column, &u64::to_le_bytes(value));
        is_format(&error(&store, &lie), &format!("head 0: {expected}"));
    }
}

#[test]
fn statistics_that_are_no_numbers_are_refused() {
    let store = store(&evicting(&packed(), &policy("h2o", &json!({"budget": 60}))));
    let file = saved(&store, fed(&store, 150, 1), Compress::None);
    for number in [f32::NAN, f32::INFINITY, -1.0] {
        let lie = with_word(&file, "attention.0.1", 3, &number.to_le_bytes());
        is_format(&error(&store, &lie), "head 1: attention");
    }
}

#[test]
fn compressed_pages_that_are_too_few_too_many_or_no_stream_are_refused() {
    let (store, _, file) = setup(Compress::Deflate);
    let name = sections(&file).into_iter().find(|name| name.starts_with("pages.0.0.1")).unwrap();
    for at in [0, 1, 40, section(&file, &name).len() / 2, section(&file, &name).len() - 1] {
        let byte = file[section(&file, &name)][at] ^ 0x55;
        let lie = with_word(&file, &name, at, &[byte]);
        is_format(&error(&store, &lie), &name);
    }
    let plain = with_header(&file, |header| header["__metadata__"]["compress"] = json!("none"));
    is_format(&error(&store, &plain), "pages.0.0");
}

#[test]
fn a_folder_and_a_missing_file_are_errors_that_name_the_path() {
    let (store, id, _) = setup(Compress::None);
    let folder = std::env::temp_dir();
    for error in [store.load(&folder).unwrap_err(), store.save(&folder, id, Compress::None).unwrap_err()] {
        assert!(
            matches!(&error, Error::Io { what, .. } if what.contains(folder.to_str().unwrap())),
            "{error}"
        );
    }
    let missing = store.load(&folder.join("kvrs-no-such-file")).unwrap_err();
    assert!(matches!(&missing, Error::Io { what, .. } if what.contains("kvrs-no-such-file")), "{missing}");
}
