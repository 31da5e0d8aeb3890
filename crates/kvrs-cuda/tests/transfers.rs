//! Transfers that fail: a sequence that leaves a device or comes back arrives whole, or the call says that it did not.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod unreliable;

use kvrs::{Compress, Result};
use kvrs_codec::backend::Backend;
use std::io::Cursor;
use std::sync::atomic::Ordering::Relaxed;
use unreliable::Home;

impl Home {
    /// Runs `call` with each of its transfers made to fail in turn, and at last with none: `whole` looks at what is
    /// there after each. How many transfers there were.
    fn fail_each(&self, call: impl Fn() -> Result<()>, whole: impl Fn()) -> i64 {
        let launcher = self.device.launcher();
        for transfer in 0.. {
            launcher.left.store(transfer, Relaxed);
            let result = call();
            let all = launcher.left.swap(i64::MAX, Relaxed) >= 0;
            launcher.told.lock().unwrap().take();
            assert_eq!(result.is_ok(), all, "transfer {transfer}: {result:?}");
            let _late = self.device.flush();
            whole();
            if all {
                return transfer;
            }
        }
        unreachable!("transfers end");
    }
}

#[test]
fn a_page_that_could_not_be_read_is_an_error_of_the_save_that_asked_for_it_whoever_else_asks() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    for compress in [Compress::None, Compress::Deflate] {
        let save = || home.store.save_to("a file", &mut Vec::new(), home.id, compress);
        assert!(home.fail_each(save, || assert!(home.saved().unwrap() == whole)) > 4);
    }
}

#[test]
fn a_sequence_whose_pages_could_not_be_read_stays_on_the_device_as_it_was() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    let transfers = home.fail_each(
        || home.store.to_host(&[home.id]),
        || assert!(home.saved().unwrap() == whole, "on the device or parked, it is the same file"),
    );
    assert!(transfers > 4 && home.store.stats().unwrap().bytes_parked > 0);
}

#[test]
fn a_sequence_whose_pages_could_not_be_written_stays_parked_as_it_was() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    home.store.to_host(&[home.id]).unwrap();
    let transfers = home.fail_each(
        || home.store.to_device(&[home.id]),
        || assert!(home.saved().unwrap() == whole, "on the device or parked, it is the same file"),
    );
    assert!(transfers > 4 && home.store.stats().unwrap().bytes_parked == 0);
    home.append(home.id, 40).unwrap();
    home.store.check().unwrap();
}

#[test]
fn a_file_whose_pages_could_not_be_written_is_not_loaded() {
    let home = Home::new();
    let whole = home.saved().unwrap();
    let load = || home.store.load_from("a file", Cursor::new(&whole)).map(drop);
    assert!(home.fail_each(load, || ()) > 4);
    assert_eq!(home.store.stats().unwrap().sequences, 2, "only the load without a fault gave one");
}
