//! A sequence file, with checksums as they are and with checksums that fit.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = kvrs_testkit::fuzz::sequence_file(bytes);
    let mut fixed = bytes.to_vec();
    kvrs_testkit::hostile::fix_checksums(&mut fixed);
    let _accepted = kvrs_testkit::fuzz::sequence_file(&fixed);
});
