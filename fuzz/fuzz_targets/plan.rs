//! A plan file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = kvrs_testkit::fuzz::plan_file(bytes);
});
