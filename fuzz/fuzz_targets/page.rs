//! A page descriptor and a page.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _accepted = kvrs_testkit::fuzz::page_descriptor(bytes);
});
