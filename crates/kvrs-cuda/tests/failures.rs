//! Launches that fail: the call that they belong to says so, and what was lost is never taken for a token.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod unreliable;

use kvrs::{Error, Queries, Result, SeqId, Tokens, View, ViewMut};
use kvrs_codec::backend::Backend;
use unreliable::{Home, geometry, numbers};

impl Home {
    fn fail(&self, kernel: &'static str) {
        *self.device.launcher().fails.lock().unwrap() = Some(kernel);
    }

    /// The output for one query, as bytes.
    fn attend(&self, id: SeqId) -> Result<Vec<u8>> {
        let (q, mut out) = (numbers(1), numbers(1));
        let queries = Queries::new(View::new("q", &q, geometry(1))?);
        self.store.attend(0, &[id], &queries, &mut ViewMut::new("out", &mut out, geometry(1))?, None)?;
        Ok(out)
    }

    fn extend(&self, id: SeqId) -> Result<()> {
        let (x, mut out) = (numbers(1), numbers(1));
        let view = View::new("x", &x, geometry(1))?;
        let mut out = ViewMut::new("out", &mut out, geometry(1))?;
        self.store.extend(0, &[id], &Queries::new(view), &Tokens::new(view, view), &mut out, None)
    }
}

#[test]
fn attention_that_fails_is_told_to_its_call_and_nothing_has_changed() {
    let home = Home::new();
    let (before, whole) = (home.attend(home.id).unwrap(), home.saved().unwrap());
    for kernel in ["kvrs_prepare", "kvrs_merge"] {
        home.fail(kernel);
        assert!(matches!(home.attend(home.id), Err(Error::Device { .. })), "{kernel}");
        home.device.flush().unwrap();
        home.fail(kernel);
        assert!(matches!(home.extend(home.id), Err(Error::Device { .. })), "{kernel}");
        home.device.flush().unwrap();
    }
    assert_eq!(home.store.length(home.id, None).unwrap(), 150);
    assert!(home.attend(home.id).unwrap() == before && home.saved().unwrap() == whole);
    home.extend(home.id).unwrap();
}

#[test]
fn what_was_not_written_is_told_to_every_later_call() {
    for kernel in ["kvrs_store_raw", "kvrs_encode"] {
        let home = Home::new();
        let other = home.store.create(1).unwrap()[0];
        home.fail(kernel);
        let first = home.append(home.id, 40).unwrap_err().to_string();
        assert!(first.contains("lost what was written to it") && first.contains("cuda:0"), "{first}");
        let later = [
            home.append(other, 3).unwrap_err(),
            home.attend(home.id).unwrap_err(),
            home.saved().map(drop).unwrap_err(),
            home.store.decode(0, home.id, 0).map(drop).unwrap_err(),
        ];
        assert!(later.iter().all(|error| error.to_string() == first), "{later:?}");
        home.store.free(home.id).unwrap();
    }
}

#[test]
fn whoever_starts_what_another_left_waiting_both_are_told() {
    let home = Home::new();
    home.fail("kvrs_store_raw");
    std::thread::scope(|scope| {
        // The other's attention and this append: whichever launches the rows first, neither may go on as if they were there.
        let other = scope.spawn(|| while home.attend(home.id).is_ok() {});
        assert!(home.append(home.id, 1).is_err());
        other.join().unwrap();
    });
    assert!(home.device.flush().is_err());
}
