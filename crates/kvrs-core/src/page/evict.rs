//! What eviction does to a table: tokens die, pages thin out and merge, and what is kept moves to gathered pages.

use super::entry::{Entry, Slots, ones};
use super::link::Link;
use super::supply::Page;
use super::table::{Table, Zone};

/// Most neighbouring pages that are packed together at once.
const NEAR: usize = 4;

impl<C> Table<C> {
    /// Kills the sealed tokens that are not among the ascending `kept`; returns the pages that this emptied, without
    /// those that another table shares.
    pub fn evict_sealed(&mut self, kept: &[usize]) -> Vec<Page<C>> {
        let mut at = 0;
        let mut gone = |index: usize| {
            // Tokens mostly ascend from page to page, so most are found where the last was.
            at = match kept.get(at) {
                Some(&next) if next == index => at,
                _ => kept.partition_point(|&next| next < index),
            };
            let stays = kept.get(at) == Some(&index);
            at += usize::from(stays);
            !stays
        };
        self.sealed.iter_mut().for_each(|entry| entry.kill(&mut gone));
        let empty = self.sealed.extract_if(.., |entry| entry.live == 0);
        empty.filter_map(Entry::into_page).collect()
    }

    /// Packs neighbouring sealed pages of `class` together wherever two to four of them have a page's worth of dead
    /// slots, and returns the freed pages: few slots move, and the pages stay at least three quarters full.
    ///
    /// `copy(from, slot, to, slot)` copies a slot as codes.
    pub fn compact_near(
        &mut self,
        class: u8,
        slots: usize,
        mut copy: impl FnMut(&Page<C>, usize, &mut Page<C>, usize),
    ) -> Vec<Page<C>> {
        let mut freed = Vec::new();
        let mut first = 0;
        while first < self.sealed.len() {
            let run = self.sealed[first..].iter().take(NEAR);
            let run = run.take_while(|entry| entry.class == class && !entry.shared());
            let live = run.map(|entry| entry.live.count_ones() as usize);
            let sums = live.scan(0, |sum, live| {
                *sum += live;
                Some(*sum)
            });
            match sums.enumerate().position(|(i, live)| i > 0 && live <= i * slots) {
                Some(last) => freed.extend(self.compact_run(first..first + last + 1, slots, &mut copy)),
                None => first += 1,
            }
        }
        freed
    }

    /// Makes the oldest page of the window a sealed one, as it is.
    ///
    /// # Panics
    /// If the window is empty.
    pub fn seal_raw(&mut self) {
        let mut entry = self.window.pop_front().expect("a page leaves the window");
        entry.closed = true;
        if entry.live != 0 {
            self.sealed.push(entry);
        }
    }

    /// Kills the tokens of sinks and window that are `gone`; their pages stay, empty or not.
    pub fn kill_raw(&mut self, gone: impl Fn(usize) -> bool) {
        self.sinks.iter_mut().chain(&mut self.window).for_each(|entry| entry.kill(&gone));
    }

    /// Takes all raw pages of sinks and window out.
    pub fn take_raw(&mut self) -> Vec<(Zone, Entry<C>)> {
        let sinks = self.sinks.drain(..).map(|entry| (Zone::Sinks, entry));
        sinks.chain(self.window.drain(..).map(|entry| (Zone::Window, entry))).collect()
    }

    /// Adds a closed sealed page whose first slots hold the tokens `indices`, behind the others.
    ///
    /// # Panics
    /// If there are no indices, or more than 64.
    pub fn push_gathered(&mut self, class: u8, page: Page<C>, indices: &[u32]) {
        assert!((1..=64).contains(&indices.len()), "1 to 64 tokens, not {}", indices.len());
        let consecutive = indices.iter().zip(indices[0]..).all(|(&index, expected)| index == expected);
        let slots =
            if consecutive { Slots::Run { first: indices[0] } } else { Slots::Gathered(indices.into()) };
        let (count, live) = (indices.len() as u8, ones(indices.len()));
        self.sealed.push(Entry { page: Link::new(page), class, count, closed: true, live, slots });
    }
}
