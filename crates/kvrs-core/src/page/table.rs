//! A page table: where the tokens of one sequence, layer and head group lie.

use super::entry::Entry;
use super::link::Grant;
use super::supply::Page;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::ops::Range;

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

    /// Table entries.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.sinks.len() + self.sealed.len() + self.window.len()
    }

    /// A table with the same tokens in the same pages; whichever writes into one of them first copies it.
    ///
    /// # Panics
    /// If `grant` has not room for [`Table::entry_count`] entries.
    #[must_use]
    pub fn share(&self, grant: &mut Grant<C>) -> Self {
        Self {
            sinks: self.sinks.iter().map(|entry| entry.share(grant)).collect(),
            sealed: self.sealed.iter().map(|entry| entry.share(grant)).collect(),
            window: self.window.iter().map(|entry| entry.share(grant)).collect(),
        }
    }

    /// A live slot for token `index` at the end of the sinks or the window: the next one of the last page, or the
    /// first of `page()` if that one is full or ends elsewhere. If another table uses the page too, its tokens go to
    /// `page()` first, by `copy(old, new)`.
    ///
    /// # Panics
    /// For [`Zone::Sealed`]: its slots are filled by [`Table::seal`].
    pub fn push_raw(
        &mut self,
        zone: Zone,
        index: usize,
        page: impl FnOnce() -> Page<C>,
        copy: impl FnOnce(&Page<C>, &mut Page<C>),
    ) -> (&mut Page<C>, usize) {
        let (page, slots) = self.push_raw_run(zone, index, 1, page, copy);
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
        copy: impl FnOnce(&Page<C>, &mut Page<C>),
    ) -> (&mut Page<C>, Range<usize>) {
        let last = match zone {
            Zone::Sinks => self.sinks.last_mut(),
            Zone::Window => self.window.back_mut(),
            Zone::Sealed => panic!("internal error: raw tokens do not go into sealed pages"),
        };
        match last.filter(|entry| entry.accepts(0, index, 1, RAW_SLOTS)) {
            Some(entry) => entry.own(page, copy),
            None if zone == Zone::Sinks => self.sinks.push(Entry::open(page(), 0, index)),
            None => self.window.push_back(Entry::open(page(), 0, index)),
        }
        let last = if zone == Zone::Sinks { self.sinks.last_mut() } else { self.window.back_mut() };
        let last = last.expect("a page was opened");
        let count = most.min(RAW_SLOTS - last.count());
        let (page, slot) = last.extend(count);
        (page, slot..slot + count)
    }

    /// Encodes the oldest `group` tokens of the window behind those of the last sealed page, or into `page()` if that
    /// one has another class, no room for them all, or is closed; returns the freed raw pages. If another table uses
    /// the page too, its tokens go to `page()` first, by `copy(old, new)`.
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
        copy: impl FnOnce(&Page<C>, &mut Page<C>),
        encode: impl FnOnce(&[&Page<C>], usize, &mut Page<C>, usize),
    ) -> Vec<Page<C>> {
        let (first, live) = self.oldest(group);
        let mut freed = Vec::new();
        let open = self.sealed.last_mut().filter(|entry| entry.accepts(class, first, group, slots));
        if let Some(entry) = open {
            entry.own(page, copy);
        } else {
            freed.extend(self.sealed.pop_if(|entry| entry.live == 0).and_then(Entry::into_page));
            self.sealed.push(Entry::open(page(), class, first));
        }
        let entry = self.sealed.last_mut().expect("a page was opened");
        let raw: Vec<_> = self.window.range(..group / RAW_SLOTS).map(Entry::page).collect();
        let (target, slot) = entry.extend(group);
        encode(&raw, first, target, slot);
        entry.live &= !(super::entry::ones(group) << slot) | (live << slot);
        freed.extend(self.window.drain(..group / RAW_SLOTS).filter_map(Entry::into_page));
        freed
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

    /// Kills the tokens from `n` on and returns the number of pages that this emptied. Pages before stay untouched.
    ///
    /// A packed page that is cut keeps its codes, its dead slots masked, and is closed; a raw page that is cut is
    /// refilled from `n` on.
    pub fn truncate(&mut self, n: usize) -> usize {
        let before = self.entry_count();
        // Raw pages whose tokens have gone one by one keep the place of what follows them.
        let raw = |entry: &mut Entry<C>| {
            entry.cut(n);
            entry.count == 0 || entry.index(0) >= n
        };
        while self.sinks.last_mut().is_some_and(raw) {
            self.sinks.pop();
        }
        while self.window.back_mut().is_some_and(raw) {
            self.window.pop_back();
        }
        let sealed = |entry: &mut Entry<C>| {
            entry.cut(n);
            entry.live == 0
        };
        while self.sealed.last_mut().is_some_and(sealed) {
            self.sealed.pop();
        }
        before - self.entry_count()
    }

    /// Kills the tokens of `range` in all zones and returns the number of sealed pages that this emptied.
    ///
    /// Raw pages of sinks and window stay, empty or not: what follows them is placed and sealed as if nothing had gone.
    pub fn remove(&mut self, range: &Range<usize>) -> usize {
        let before = self.entry_count();
        self.entries_mut().for_each(|entry| entry.kill(|index| range.contains(&index)));
        self.sealed.retain(|entry| entry.live != 0);
        before - self.entry_count()
    }

    /// Takes out the pages whose last live token is before `first`, in all zones; a page that another table
    /// shares is not among the returned ones.
    pub fn take_before(&mut self, first: usize) -> Vec<Page<C>> {
        self.remove_before(first).into_iter().filter_map(Entry::into_page).collect()
    }

    /// Frees the pages whose last live token is before `first`, in all zones, and returns their number.
    pub fn drop_before(&mut self, first: usize) -> usize {
        self.remove_before(first).len()
    }

    fn remove_before(&mut self, first: usize) -> Vec<Entry<C>> {
        fn old<'a, C: 'a>(entries: impl Iterator<Item = &'a Entry<C>>, first: usize) -> usize {
            entries.take_while(|entry| entry.behind(first)).count()
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
        let kill = |entry: &mut Entry<C>| entry.kill(|index| !keep(index));
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
        let before = self.entry_count();
        self.sinks.retain(|entry| entry.live != 0);
        self.sealed.retain(|entry| entry.live != 0);
        self.window.retain(|entry| entry.live != 0);
        before - self.entry_count()
    }

    fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry<C>> {
        self.sinks.iter_mut().chain(&mut self.sealed).chain(&mut self.window)
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
        let mut indices = Vec::with_capacity(self.kept());
        for entry in self.entries() {
            indices.extend(entry.live_slots().map(|(_, index)| index));
        }
        indices.sort_unstable(); // pages of two packed classes may lie one behind the other
        indices
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
            // The last sealed page may still be filled.
            let last = self.sealed.last().is_some_and(|last| std::ptr::eq(last, entry));
            entry.check(if entry.class == 0 { RAW_SLOTS } else { PACKED_SLOTS }, raw || last)?;
        }
        let indices = self.live_indices();
        if !indices.is_sorted_by(|a, b| a < b) {
            return Err(Error::Internal(format!("a token lies twice in {indices:?}")));
        }
        let classes = self.entries().map(Entry::class).max().unwrap_or(0);
        (1..=classes).try_for_each(|class| self.check_order(class))
    }

    /// Checks that the raw tokens and those of one packed class ascend.
    fn check_order(&self, class: usize) -> Result<()> {
        let entries = self.entries().filter(|entry| [0, class].contains(&entry.class()));
        let indices: Vec<usize> = entries.flat_map(Entry::live_slots).map(|(_, index)| index).collect();
        if !indices.is_sorted() {
            return Err(Error::Internal(format!("live tokens do not ascend: {indices:?}")));
        }
        Ok(())
    }
}
