//! A page, which goes back where it came from when dropped, and a supply of pages to draw on.

use super::arena::Shared;
use super::pool::Place;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Exclusive use of some bytes of a chunk; dropping it frees them.
pub struct Page<C> {
    /// `None` only while the page is being dropped.
    chunk: Option<C>,
    place: Place,
    home: Arc<Shared<C>>,
}

impl<C> Page<C> {
    pub(super) fn new(chunk: C, place: Place, home: Arc<Shared<C>>) -> Self {
        Self { chunk: Some(chunk), place, home }
    }

    pub(super) fn home(&self) -> &Shared<C> {
        &self.home
    }

    /// The chunk that holds the page.
    ///
    /// # Panics
    /// Never: a page has its chunk until it is dropped.
    #[must_use]
    pub fn chunk(&self) -> &C {
        self.chunk.as_ref().expect("a page has its chunk until it is dropped")
    }

    /// Byte offset of the page in its chunk, a multiple of 64.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.place.offset()
    }

    /// Bytes of the page, a multiple of 64.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.place.page_bytes as usize
    }
}

impl<C> Drop for Page<C> {
    fn drop(&mut self) {
        // The page's own handle goes first, so that a chunk that becomes free is really given back.
        self.chunk = None;
        self.home.put(self.place);
    }
}

impl<C: std::fmt::Debug> std::fmt::Debug for Page<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (at, bytes) = (self.offset(), self.bytes());
        f.debug_struct("Page")
            .field("chunk", &self.chunk)
            .field("offset", &at)
            .field("bytes", &bytes)
            .finish_non_exhaustive()
    }
}

/// Pages that are owned but not yet in a table, by size; dropping it frees them.
#[derive(Debug)]
pub struct Supply<C> {
    /// Taken from the end, so the end holds the lowest address.
    pages: BTreeMap<u32, Vec<Page<C>>>,
}

impl<C> Default for Supply<C> {
    fn default() -> Self {
        Self { pages: BTreeMap::new() }
    }
}

impl<C> Supply<C> {
    /// Takes a page of that size out.
    ///
    /// # Panics
    /// If there is none: whoever reserved counted too few, which is a bug.
    pub fn take(&mut self, page_bytes: u32) -> Page<C> {
        let page = self.pages.get_mut(&page_bytes).and_then(Vec::pop);
        page.unwrap_or_else(|| panic!("internal error: no page of {page_bytes} bytes was reserved"))
    }

    /// Adds a page; it is the next of its size to be taken.
    pub fn put(&mut self, page: Page<C>) {
        self.pages.entry(page.place.page_bytes).or_default().push(page);
    }

    /// Pages of that size.
    #[must_use]
    pub fn count(&self, page_bytes: u32) -> usize {
        self.pages.get(&page_bytes).map_or(0, Vec::len)
    }

    /// Adds all pages of `other`.
    pub fn merge(&mut self, other: Self) {
        for (bytes, pages) in other.pages {
            self.pages.entry(bytes).or_default().extend(pages);
        }
    }

    /// Takes `(page bytes, count)` out as a supply of their own.
    ///
    /// # Panics
    /// As [`Supply::take`].
    #[must_use = "dropping the part frees its pages"]
    pub fn split(&mut self, wants: &[(u32, usize)]) -> Self {
        let mut part = Self::default();
        for &(bytes, count) in wants {
            let mut pages: Vec<_> = (0..count).map(|_| self.take(bytes)).collect();
            pages.reverse();
            part.merge(Self { pages: BTreeMap::from([(bytes, pages)]) });
        }
        part
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|(bytes, pages)| u64::from(*bytes) * pages.len() as u64).sum()
    }

    /// Pages of all sizes.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages.values().map(Vec::len).sum()
    }
}
