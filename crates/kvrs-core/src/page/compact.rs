//! Packs what eviction left of sealed pages together, in place.

use super::entry::{Entry, Slots, bits, ones, token};
use super::supply::Page;
use super::table::Table;
use std::ops::Range;

impl<C> Table<C> {
    /// Packs the live slots of sealed pages of `class` together and returns the number of pages that this emptied.
    ///
    /// Each run of neighbouring unshared pages of the class is packed into `ceil(live / slots)` pages, unless that
    /// frees none; shared pages stay as they are. `copy(from, slot, to, slot)` copies a slot as codes. Tokens keep
    /// their order; entries that changed become [`Slots::Gathered`] and closed. No page is needed: the pages'
    /// own dead slots hold what is in the way, so a token moves more than once at times.
    pub fn compact(
        &mut self,
        class: u8,
        slots: usize,
        mut copy: impl FnMut(&Page<C>, usize, &mut Page<C>, usize),
    ) -> usize {
        let before = self.sealed.len();
        let movable = |entry: &Entry<C>| entry.class == class && !entry.shared();
        let mut end = before;
        while let Some(last) = self.sealed[..end].iter().rposition(movable) {
            let start = self.sealed[..last].iter().rposition(|entry| !movable(entry)).map_or(0, |i| i + 1);
            self.compact_run(start..last + 1, slots, &mut copy);
            end = start;
        }
        before - self.sealed.len()
    }

    /// Packs a run of unshared pages of one class and returns what became free.
    pub(super) fn compact_run(
        &mut self,
        run: Range<usize>,
        slots: usize,
        copy: &mut impl FnMut(&Page<C>, usize, &mut Page<C>, usize),
    ) -> Vec<Page<C>> {
        let entries = &mut self.sealed[run.clone()];
        let live: usize = entries.iter().map(|entry| entry.live.count_ones() as usize).sum();
        let pages = live.div_ceil(slots);
        if pages == entries.len() {
            return Vec::new();
        }
        let mut mover = Mover::new(entries, slots, copy);
        for page in 0..pages {
            let count = mover.fill(page);
            let indices = mover.tokens[page * slots..][..count].iter().map(|token| token.index).collect();
            let entry = &mut mover.entries[page];
            if !mover.untouched[page] {
                let (live, slots) = (ones(count), Slots::Gathered(indices));
                (entry.count, entry.closed, entry.live, entry.slots) = (count as u8, true, live, slots);
            }
        }
        self.sealed.drain(run.start + pages..run.end).filter_map(Entry::into_page).collect()
    }
}

/// A live token and where it is now.
struct Token {
    index: u32,
    page: usize,
    slot: usize,
}

const NOBODY: usize = usize::MAX;

struct Mover<'a, C, F> {
    entries: &'a mut [Entry<C>],
    copy: &'a mut F,
    slots: usize,
    /// Ascending by index; token `i` is to end in slot `i % slots` of page `i / slots`.
    tokens: Vec<Token>,
    /// Token in each slot of each page, or `NOBODY`.
    owners: Vec<usize>,
    untouched: Vec<bool>,
    /// Pages behind this one have no dead slot, as far as known.
    hole: usize,
}

impl<'a, C, F: FnMut(&Page<C>, usize, &mut Page<C>, usize)> Mover<'a, C, F> {
    fn new(entries: &'a mut [Entry<C>], slots: usize, copy: &'a mut F) -> Self {
        let mut tokens = Vec::new();
        let mut owners = vec![NOBODY; entries.len() * slots];
        for (page, entry) in entries.iter().enumerate() {
            for slot in bits(entry.live) {
                owners[page * slots + slot] = tokens.len();
                tokens.push(Token { index: token(entry.index(slot)), page, slot });
            }
        }
        let (untouched, hole) = (vec![true; entries.len()], entries.len() - 1);
        Self { entries, copy, slots, tokens, owners, untouched, hole }
    }

    /// Brings the page's tokens into place, in order, and returns their number.
    ///
    /// Whatever else is in the page goes to dead slots behind it. There are enough: the pages from here on have
    /// one page's worth of dead slots, since packing them frees one.
    fn fill(&mut self, page: usize) -> usize {
        let first = page * self.slots;
        let count = self.slots.min(self.tokens.len() - first);
        let placed = (0..count).take_while(|slot| self.owners[first + slot] == first + slot).count();
        if placed == count && self.owners[first + placed..first + self.slots].iter().all(|&o| o == NOBODY) {
            return count;
        }
        self.untouched[page] = false;
        for slot in placed..self.slots {
            let owner = self.owners[first + slot];
            if owner != NOBODY {
                let (to, at) = self.find_hole(page);
                self.move_token(owner, to, at);
            }
        }
        for slot in placed..count {
            self.move_token(first + slot, page, slot);
        }
        count
    }

    /// A dead slot behind `page`, in the last page that has one.
    fn find_hole(&mut self, page: usize) -> (usize, usize) {
        let last = self.entries.len() - 1;
        for _ in 0..=last {
            if self.hole <= page {
                self.hole = last;
            }
            let owners = &self.owners[self.hole * self.slots..][..self.slots];
            if let Some(slot) = owners.iter().position(|&owner| owner == NOBODY) {
                return (self.hole, slot);
            }
            self.hole -= 1;
        }
        panic!("internal error: no dead slot behind page {page} of {}", self.entries.len());
    }

    fn move_token(&mut self, owner: usize, page: usize, slot: usize) {
        let token = &mut self.tokens[owner];
        let pair = [token.page, page];
        let [from, to] = self.entries.get_disjoint_mut(pair).expect("a token moves to another page");
        let target = to.page.page_mut().expect("only unshared pages are packed");
        (self.copy)(from.page(), token.slot, target, slot);
        self.owners[token.page * self.slots + token.slot] = NOBODY;
        self.owners[page * self.slots + slot] = owner;
        (token.page, token.slot) = (page, slot);
    }
}
