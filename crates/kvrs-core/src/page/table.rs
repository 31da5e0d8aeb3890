//! A page table: where the tokens of one sequence, layer and head group lie.

use super::entry::Entry;
use super::supply::Page;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Slots of a raw page.
pub const RAW_SLOTS: usize = 16;
/// Slots of a packed page.
pub const PACKED_SLOTS: usize = 64;

/// A part of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zone {
    /// Raw pages of the first tokens.
    Sinks,
    /// Encoded pages.
    Sealed,
    /// Raw pages of recent tokens.
    Window,
}

/// Page table of one sequence, layer and head group: three zones, each ascending by token index.
#[derive(Debug)]
pub struct Table<C> {
    pub(super) sinks: Vec<Entry<C>>,
    pub(super) sealed: Vec<Entry<C>>,
    pub(super) window: VecDeque<Entry<C>>,
}

impl<C> Default for Table<C> {
    fn default() -> Self {
        Self { sinks: Vec::new(), sealed: Vec::new(), window: VecDeque::new() }
    }
}

impl<C> Table<C> {
    /// All entries: sinks, sealed pages, window.
    #[must_use]
    pub fn entries(&self) -> impl DoubleEndedIterator<Item = &Entry<C>> + '_ {
        self.sinks.iter().chain(&self.sealed).chain(&self.window)
    }

    /// Raw pages of the first tokens.
    #[must_use]
    pub fn sinks(&self) -> &[Entry<C>] {
        &self.sinks
    }

    /// Encoded pages.
    #[must_use]
    pub fn sealed(&self) -> &[Entry<C>] {
        &self.sealed
    }

    /// Raw pages of recent tokens.
    #[must_use]
    pub fn window(&self) -> &VecDeque<Entry<C>> {
        &self.window
    }

    /// A live slot for token `index` at the end of the sinks or the window: the next one of the last page, or the
    /// first of `page()` if that one is full, shared, or ends elsewhere.
    ///
    /// # Panics
    /// For [`Zone::Sealed`]: its slots are filled by [`Table::seal`].
    pub fn push_raw(
        &mut self,
        zone: Zone,
        index: usize,
        page: impl FnOnce() -> Page<C>,
    ) -> (&mut Page<C>, usize) {
        let (page, slots) = self.push_raw_run(zone, index, 1, page);
        (page, slots.start)
    }

    /// Live slots for tokens from `index` on: as many of `most` as fit the page of the first of them, which is that
    /// of [`Table::push_raw`].
    ///
    /// # Panics
    /// As [`Table::push_raw`].
    pub fn push_raw_run(
        &mut self,
        zone: Zone,
        index: usize,
        most: usize,
        page: impl FnOnce() -> Page<C>,
    ) -> (&mut Page<C>, Range<usize>) {
        let last = match zone {
            Zone::Sinks => self.sinks.last_mut(),
            Zone::Window => self.window.back_mut(),
            Zone::Sealed => panic!("internal error: raw tokens do not go into sealed pages"),
        };
        if !continues(last, 0, index, 1, RAW_SLOTS) {
            let entry = Entry::open(page(), 0, index);
            if zone == Zone::Sinks { self.sinks.push(entry) } else { self.window.push_back(entry) }
        }
        let last = if zone == Zone::Sinks { self.sinks.last_mut() } else { self.window.back_mut() };
        let last = last.expect("a page was opened");
        let count = most.min(RAW_SLOTS - last.count());
        let (page, slot) = last.extend(count);
        (page, slot..slot + count)
    }

    /// Encodes the oldest `group` tokens of the window behind the last sealed page, or into `page()` if that one
    /// has another class, no room for them all, or is closed or shared; returns the freed raw pages.
    ///
    /// `encode(raw pages, first index, page, slot)` moves the bytes. A page has `slots` slots. Slots that are dead
    /// in the window are encoded with the others and stay dead.
    ///
    /// # Panics
    /// If the window does not start with `group / 16` full pages of consecutive tokens.
    pub fn seal(
        &mut self,
        class: u8,
        group: usize,
        slots: usize,
        page: impl FnOnce() -> Page<C>,
        encode: impl FnOnce(&[&Page<C>], usize, &mut Page<C>, usize),
    ) -> Vec<Page<C>> {
        let (first, live) = self.oldest(group);
        if !continues(self.sealed.last_mut(), class, first, group, slots) {
            self.sealed.push(Entry::open(page(), class, first));
        }
        let entry = self.sealed.last_mut().expect("a page was opened");
        let raw: Vec<_> = self.window.range(..group / RAW_SLOTS).map(Entry::page).collect();
        let (target, slot) = entry.extend(group);
        encode(&raw, first, target, slot);
        entry.live &= !(super::entry::ones(group) << slot) | (live << slot);
        self.window.drain(..group / RAW_SLOTS).filter_map(|entry| Arc::into_inner(entry.page)).collect()
    }

    /// First index and live bits of the oldest `group` tokens of the window.
    fn oldest(&self, group: usize) -> (usize, u64) {
        let first = self.window.front().map_or(0, |entry| entry.index(0));
        let mut live = 0;
        for i in 0..group / RAW_SLOTS {
            let whole = |e: &&Entry<C>| e.count() == RAW_SLOTS && e.index(0) == first + i * RAW_SLOTS;
            let entry = self.window.get(i).filter(whole);
            live |= entry.expect("the window starts with full pages of consecutive tokens").live
                << (i * RAW_SLOTS);
        }
        (first, live)
    }

    /// Kills the tokens from `n` on and returns the number of pages that this emptied.
    ///
    /// A packed page that is cut keeps its codes, its dead slots masked, and is closed; a raw page that is cut is
    /// refilled from `n` on.
    pub fn truncate(&mut self, n: usize) -> usize {
        self.entries_mut().for_each(|entry| entry.cut(n));
        self.drop_empty()
    }

    /// Takes out the pages whose last live token is before `first`, in all zones; a page that another table
    /// shares is not among the returned ones.
    pub fn take_before(&mut self, first: usize) -> Vec<Page<C>> {
        self.remove_before(first).into_iter().filter_map(|entry| Arc::into_inner(entry.page)).collect()
    }

    /// Frees the pages whose last live token is before `first`, in all zones, and returns their number.
    pub fn drop_before(&mut self, first: usize) -> usize {
        self.remove_before(first).len()
    }

    fn remove_before(&mut self, first: usize) -> Vec<Entry<C>> {
        fn old<'a, C: 'a>(entries: impl Iterator<Item = &'a Entry<C>>, first: usize) -> usize {
            entries.take_while(|entry| entry.last_index().is_none_or(|last| last < first)).count()
        }
        let (sinks, sealed) = (old(self.sinks.iter(), first), old(self.sealed.iter(), first));
        let window = old(self.window.iter(), first);
        let sinks = self.sinks.drain(..sinks).chain(self.sealed.drain(..sealed));
        sinks.chain(self.window.drain(..window)).collect()
    }

    /// Kills the tokens of `zones` that `keep(index)` does not want and returns the number of pages that this
    /// emptied; the other tokens stay where they are.
    ///
    /// A window page that goes this way leaves a gap: the tokens before it can no longer be sealed with those
    /// behind it.
    pub fn retain(&mut self, keep: impl Fn(usize) -> bool, zones: &[Zone]) -> usize {
        let kill = |entry: &mut Entry<C>| {
            let dead = entry.live_slots().filter(|(_, index)| !keep(*index));
            let dead = dead.fold(0u64, |bits, (slot, _)| bits | 1 << slot);
            entry.live &= !dead;
        };
        for zone in zones {
            match zone {
                Zone::Sinks => self.sinks.iter_mut().for_each(kill),
                Zone::Sealed => self.sealed.iter_mut().for_each(kill),
                Zone::Window => self.window.iter_mut().for_each(kill),
            }
        }
        self.drop_empty()
    }

    fn drop_empty(&mut self) -> usize {
        let before = self.len();
        self.sinks.retain(|entry| entry.live != 0);
        self.sealed.retain(|entry| entry.live != 0);
        self.window.retain(|entry| entry.live != 0);
        before - self.len()
    }

    fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry<C>> {
        self.sinks.iter_mut().chain(&mut self.sealed).chain(&mut self.window)
    }

    fn len(&self) -> usize {
        self.sinks.len() + self.sealed.len() + self.window.len()
    }

    /// Live tokens.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.entries().map(|entry| entry.live.count_ones() as usize).sum()
    }

    /// Pages of a class.
    #[must_use]
    pub fn pages(&self, class: usize) -> usize {
        self.entries().filter(|entry| entry.class() == class).count()
    }

    /// Indices of the live tokens, ascending.
    #[must_use]
    pub fn live_indices(&self) -> Vec<usize> {
        self.entries().flat_map(Entry::live_slots).map(|(_, index)| index).collect()
    }

    /// Bytes of bookkeeping.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.entries().map(Entry::table_bytes).sum()
    }

    /// Checks that live tokens ascend, live bits are filled slots, and every zone has its classes.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the first fault.
    pub fn check(&self) -> Result<()> {
        for (entry, raw) in self
            .sinks
            .iter()
            .chain(&self.window)
            .map(|e| (e, true))
            .chain(self.sealed.iter().map(|e| (e, false)))
        {
            if raw && entry.class != 0 {
                return Err(Error::Internal(format!("a page of class {} in the wrong zone", entry.class)));
            }
            entry.check(if entry.class == 0 { RAW_SLOTS } else { PACKED_SLOTS })?;
        }
        let indices = self.live_indices();
        if !indices.is_sorted_by(|a, b| a < b) {
            return Err(Error::Internal(format!("live tokens do not ascend: {indices:?}")));
        }
        Ok(())
    }
}

/// Whether `more` tokens from `index` on go behind the entry's own; a shared page is closed instead.
fn continues<C>(entry: Option<&mut Entry<C>>, class: u8, index: usize, more: usize, slots: usize) -> bool {
    entry.is_some_and(|entry| {
        let fits = entry.accepts(class, index, more, slots);
        entry.closed |= fits && entry.shared();
        fits && !entry.closed
    })
}
