//! The fuzzers' corpus, and random lies: every file is an answer or a typed error, in time.

use crate::common::saved;
use kvrs::Compress;
use kvrs_testkit::{Noise, feeding, fuzz, hostile};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

type Target = fn(&[u8]) -> bool;

const TARGETS: [(&str, Target); 3] =
    [("sequence", fuzz::sequence_file), ("plan", fuzz::plan_file), ("page", fuzz::page_descriptor)];

fn folder(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/fuzz").join(target)
}

/// Lies of a target in any case.
const LEAST: usize = 1000;

/// How long a target goes on telling lies: `KVRS_FUZZ_SECONDS`.
fn seconds() -> Duration {
    let seconds = std::env::var("KVRS_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

fn in_time(target: Target, bytes: &[u8]) -> bool {
    let began = Instant::now();
    let accepted = target(bytes);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    accepted
}

/// Files that are sound, and that the corpus starts from.
fn sound(target: &str) -> Vec<Vec<u8>> {
    match target {
        "sequence" => {
            [(0, Compress::None), (1, Compress::None), (90, Compress::None), (150, Compress::Deflate)]
                .map(|(tokens, compress)| {
                    let store = fuzz::store();
                    let id = store.create(1).unwrap()[0];
                    if tokens > 0 {
                        feeding::feed(&store, id, tokens, 7).unwrap();
                    }
                    saved(&store, id, compress)
                })
                .into()
        }
        "plan" => {
            let path = std::env::temp_dir().join(format!("kvrs-fuzz-{}.kvplan", std::process::id()));
            fuzz::plan().save(&path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            vec![bytes]
        }
        _ => fuzz::descriptors(),
    }
}

#[test]
fn the_corpus_gives_answers_and_typed_errors_in_time() {
    for (name, target) in TARGETS {
        let files: Vec<_> =
            std::fs::read_dir(folder(name)).unwrap().map(|file| file.unwrap().path()).collect();
        let accepted = |path: &PathBuf| in_time(target, &std::fs::read(path).unwrap());
        let sound = files.iter().filter(|path| path.to_str().unwrap().contains("sound"));
        for path in sound {
            assert!(accepted(path), "{} is a sound file", path.display());
        }
        assert!(files.len() > 8 && files.iter().any(|path| !accepted(path)), "{name}");
    }
}

#[test]
fn random_lies_are_answers_or_typed_errors_in_time() {
    for (i, (name, target)) in TARGETS.into_iter().enumerate() {
        let (mut noise, began) = (Noise::new(i as u64), Instant::now());
        let sound = sound(name);
        assert!(sound.iter().all(|file| target(file)), "{name}");
        let (mut runs, mut refused) = (0, 0);
        while runs < LEAST || began.elapsed() < seconds() {
            let lie = hostile::mutant(&sound[runs % sound.len()], &mut noise);
            refused += usize::from(!in_time(target, &lie));
            runs += 1;
        }
        println!("{name}: {runs} lies, {refused} refused");
        assert!(refused * 2 > runs, "{refused} of {runs} {name} lies were refused");
    }
}

/// Writes the corpus anew: `cargo test -p kvrs-testkit --test files -- --ignored corpus`.
#[test]
#[ignore = "writes tests/data/fuzz"]
fn write_the_corpus() {
    for (name, _) in TARGETS {
        let (folder, mut noise) = (folder(name), Noise::new(1));
        std::fs::create_dir_all(&folder).unwrap();
        for (i, file) in sound(name).iter().enumerate() {
            std::fs::write(folder.join(format!("sound-{i}")), file).unwrap();
        }
        for i in 0..12 {
            let sound = sound(name);
            let lie = hostile::mutant(&sound[i % sound.len()], &mut noise);
            std::fs::write(folder.join(format!("lie-{i:02}")), lie).unwrap();
        }
    }
}
