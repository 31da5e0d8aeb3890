//! A page that the tables of several sequences may use, and the count of the entries that do.

use super::arena::Shared;
use super::supply::Page;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page and the number of table entries that use it.
struct Linked<C> {
    page: Page<C>,
    links: AtomicU64,
}

/// One entry's use of a page; the page is freed with its last link.
pub(super) struct Link<C>(Option<Arc<Linked<C>>>);

/// Room for table entries that share pages, counted against the capacity; what is not used goes back when dropped.
#[derive(Debug)]
pub struct Grant<C> {
    entries: u64,
    home: Arc<Shared<C>>,
}

impl<C> Grant<C> {
    pub(super) fn new(entries: u64, home: Arc<Shared<C>>) -> Self {
        Self { entries, home }
    }
}

impl<C> Drop for Grant<C> {
    fn drop(&mut self) {
        self.home.unlink(self.entries);
    }
}

impl<C> Link<C> {
    pub(super) fn new(page: Page<C>) -> Self {
        Self(Some(Arc::new(Linked { page, links: AtomicU64::new(1) })))
    }

    fn linked(&self) -> &Arc<Linked<C>> {
        self.0.as_ref().expect("a link has its page until it is dropped")
    }

    pub(super) fn page(&self) -> &Page<C> {
        &self.linked().page
    }

    /// The page, if no other entry uses it.
    pub(super) fn page_mut(&mut self) -> Option<&mut Page<C>> {
        Arc::get_mut(self.0.as_mut()?).map(|linked| &mut linked.page)
    }

    /// Whether another entry uses the page too; only a holder of one of its links can make more of them.
    pub(super) fn shared(&self) -> bool {
        Arc::strong_count(self.linked()) > 1
    }

    /// One more link, which takes its room out of `grant`.
    ///
    /// # Panics
    /// If the grant is used up.
    pub(super) fn share(&self, grant: &mut Grant<C>) -> Self {
        grant.entries = grant.entries.checked_sub(1).expect("a grant has room for each shared page");
        self.linked().links.fetch_add(1, Ordering::Relaxed);
        Self(Some(Arc::clone(self.linked())))
    }

    /// The page; `None` if another entry uses it.
    pub(super) fn into_page(mut self) -> Option<Page<C>> {
        let linked = self.0.take()?;
        linked.leave();
        Arc::into_inner(linked).map(|linked| linked.page)
    }
}

impl<C> Linked<C> {
    /// Counts one entry less; that of the last one is counted with the page.
    fn leave(&self) {
        if self.links.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.page.home().unlink(1);
        }
    }
}

impl<C> Drop for Link<C> {
    fn drop(&mut self) {
        if let Some(linked) = &self.0 {
            linked.leave();
        }
    }
}

impl<C: std::fmt::Debug> std::fmt::Debug for Link<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.page().fmt(f)
    }
}
