//! Which tokens are raw, which are sealed, which go, and how many pages that takes: pure rules by token index.

use crate::page::{Entry, PACKED_SLOTS, RAW_SLOTS, Table};

/// Tokens behind a sliding window that are kept, so that a short truncate (speculative decoding) is exact.
pub const SLIDING_MARGIN: usize = 64;

/// How a layer divides its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowRule {
    /// First tokens that stay raw.
    pub sinks: usize,
    /// Latest tokens that stay raw.
    pub recent: usize,
    /// Tokens that are sealed together: 16, 32 or 64.
    pub group: usize,
    /// Key `j` is visible to query `i` if `i - j < sliding`.
    pub sliding: Option<usize>,
    /// Whether tokens are ever encoded; false: the layer stays raw.
    pub seals: bool,
}

/// What a table holds, as far as the next tokens' need of pages depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holding {
    /// Tokens so far, dropped ones included.
    pub length: usize,
    /// Index from which groups count: the sinks at first, `n` after a truncate to `n` inside sealed tokens.
    pub origin: usize,
    /// Raw pages of the sinks.
    pub sink_pages: usize,
    /// Raw pages of the window.
    pub window_pages: usize,
    /// Whether another table uses the raw page that the next token goes to, which is copied then.
    pub copies_raw: bool,
    /// Whether the sinks' page that the next token would go to was emptied and has left.
    pub lost_sink: bool,
    /// Pages of the sinks that other tables use too and that leave without becoming free, counted from the first one.
    pub lent_sinks: Vec<usize>,
    /// Such pages of the window.
    pub lent: Vec<usize>,
    /// Index of the window's first slot; ignored if it has no page.
    pub window_first: usize,
    /// Slots left in the last sealed page; 0 if it is closed.
    pub sealed_room: usize,
    /// Whether another table uses the last sealed page, which is copied before more is written into it.
    pub copies_sealed: bool,
}

/// Pages to reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    /// Raw pages.
    pub raw_pages: usize,
    /// Packed pages.
    pub packed_pages: usize,
}

impl WindowRule {
    /// What `table` holds after `length` tokens, with groups counted from `origin`.
    #[must_use]
    pub fn holding<C>(&self, table: &Table<C>, length: usize, origin: usize) -> Holding {
        let window_first = table.window().front().map_or(origin.max(length), |entry| entry.index(0));
        let last = if length < self.sinks { table.sinks().last() } else { table.window().back() };
        let open = last.filter(|entry| entry.room(length, RAW_SLOTS) > 0);
        let sealed = table.sealed().last().filter(|entry| entry.room(window_first, PACKED_SLOTS) > 0);
        let lent = |(_, entry): &(usize, &Entry<C>)| {
            entry.shared() && open.is_none_or(|open| !std::ptr::eq(*entry, open))
        };
        let leaves = self.sliding.is_some() || !self.stays_raw();
        let sinks = table.sinks().iter().enumerate().filter(|_| self.sliding.is_some()).filter(lent);
        let window = table.window().iter().enumerate().filter(|_| leaves).filter(lent);
        Holding {
            length,
            origin,
            sink_pages: table.sinks().len(),
            window_pages: table.window().len(),
            copies_raw: open.is_some_and(Entry::shared),
            lost_sink: length < self.sinks && !length.is_multiple_of(RAW_SLOTS) && open.is_none(),
            lent_sinks: sinks.map(|(page, _)| page).collect(),
            lent: window.map(|(page, _)| page).collect(),
            window_first,
            sealed_room: sealed.map_or(0, |entry| entry.room(window_first, PACKED_SLOTS)),
            copies_sealed: sealed.is_some_and(Entry::shared),
        }
    }

    /// Whether nothing is ever sealed: the layer does not encode, or its sliding window is not longer than the
    /// raw tokens.
    #[must_use]
    pub fn stays_raw(&self) -> bool {
        !self.seals || self.sliding.is_some_and(|sliding| sliding <= self.recent + self.group)
    }

    /// First index behind the sealed tokens of a sequence of `length` tokens that was never truncated below.
    #[must_use]
    pub fn sealed_end(&self, origin: usize, length: usize) -> usize {
        if self.stays_raw() {
            return origin;
        }
        origin + length.saturating_sub(origin + self.recent) / self.group * self.group
    }

    /// Tokens before this index are kept no longer: 0 with full attention.
    ///
    /// Pages go whole, so a few more may still be there.
    #[must_use]
    pub fn first_kept(&self, length: usize) -> usize {
        self.sliding.map_or(0, |sliding| length.saturating_sub(sliding + SLIDING_MARGIN))
    }

    /// First index that a query may see after `length` tokens, itself being the next: everything from here on
    /// must be present for attention to be exact.
    #[must_use]
    pub fn oldest_exact(&self, length: usize) -> usize {
        self.sliding.map_or(0, |sliding| (length + 1).saturating_sub(sliding))
    }

    /// Whether truncating to `n` tokens is exact: all that the next query sees is still there.
    ///
    /// `length` is the largest length since the sequence was last empty; tokens before `first_kept(length)` may
    /// be gone. With full attention always true; a sliding layer can go back by [`SLIDING_MARGIN`] tokens and one more,
    /// since the next query is itself part of its window, or to 0, where nothing is left to see.
    #[must_use]
    pub fn can_truncate(&self, length: usize, n: usize) -> bool {
        n == 0 || self.oldest_exact(n) >= self.first_kept(length)
    }

    /// Raw pages that a window adds to its `held` ones at most, at any moment, while it takes in one token after
    /// the other: from `window_len` to `window_to` tokens, counted from its first slot on, sealing and dropping
    /// pages as soon as they may go and reusing them.
    #[must_use]
    pub fn raw_pages(&self, held: usize, window_len: usize, window_to: usize) -> usize {
        if window_to <= window_len {
            return 0;
        }
        let state = Holding { length: window_len, window_pages: held, ..Holding::default() };
        Self { sinks: 0, ..*self }.raw_need(&state, 0, window_to)
    }

    /// Pages that suffice for growing to `target` tokens, one token after the other, if freed ones are reused.
    ///
    /// Raw pages are counted exactly. Packed pages too with full attention; a sliding layer's may be fewer, as
    /// old packed pages that leave meanwhile are not counted on.
    #[must_use]
    pub fn need(&self, state: &Holding, target: usize) -> Need {
        if target <= state.length {
            return Need::default();
        }
        let window = if state.window_pages > 0 { state.window_first } else { state.origin.max(state.length) };
        Need {
            raw_pages: self.raw_need(state, window, target),
            packed_pages: self.packed_need(state, window, target),
        }
    }

    fn raw_need(&self, state: &Holding, window: usize, target: usize) -> usize {
        let sinks_before = state.length.min(self.sinks).div_ceil(RAW_SLOTS);
        let front = sinks_before.saturating_sub(state.sink_pages + usize::from(state.lost_sink));
        let lent = |i: usize| {
            let (sinks, pages) = (self.sinks_gone(i), self.window_gone(window, i));
            let sinks = state.lent_sinks.iter().filter(|page| **page + front >= sinks).count();
            sinks + state.lent.len() - state.lent.partition_point(|page| *page < pages)
        };
        let held = |i: usize| self.sink_pages(front, i) + self.window_pages(window, i) - lent(i);
        // From `steady` on the count repeats with the group, or only grows without a sliding window.
        let leaving = self.sliding.map_or(0, |sliding| sliding + SLIDING_MARGIN);
        let any = !(state.lent.is_empty() && state.lent_sinks.is_empty());
        let last_lent = if any { state.length + leaving } else { 0 };
        let steady = state.length.max(self.sinks.max(window) + leaving).max(last_lent);
        let steady = steady + self.recent + 2 * self.group;
        let peak = (state.length..target.min(steady + RAW_SLOTS)).chain([target - 1]).map(held).max();
        let own = (state.sink_pages + state.window_pages)
            .saturating_sub(state.lent_sinks.len() + state.lent.len() + usize::from(state.copies_raw));
        peak.unwrap_or(0).saturating_sub(own)
    }

    /// Raw pages of the sinks just after token `i` came and before anything leaves for it.
    fn sink_pages(&self, front: usize, i: usize) -> usize {
        let gone = self.sinks_gone(i);
        (i + 1).min(self.sinks).div_ceil(RAW_SLOTS).saturating_sub(front.max(gone))
    }

    /// Pages of the sinks, counted from index 0, that have left when token `i` comes.
    fn sinks_gone(&self, i: usize) -> usize {
        let first = self.first_kept(i);
        if first >= self.sinks { usize::MAX } else { first / RAW_SLOTS }
    }

    /// Pages of a window that started at index `window` that have left when token `i` comes.
    fn window_gone(&self, window: usize, i: usize) -> usize {
        if self.stays_raw() {
            return self.first_kept(i).saturating_sub(window) / RAW_SLOTS;
        }
        (i + 1).saturating_sub(window.max(self.sinks) + self.recent + 1) / self.group * self.group / RAW_SLOTS
    }

    /// Raw pages of a window that starts at index `window`, just after token `i` came.
    fn window_pages(&self, window: usize, i: usize) -> usize {
        let Some(last) = i.checked_sub(window.max(self.sinks)) else { return 0 };
        if self.stays_raw() {
            return last / RAW_SLOTS + 1 - self.window_gone(window, i);
        }
        (last + 1).div_ceil(RAW_SLOTS) - self.window_gone(window, i)
    }

    fn packed_need(&self, state: &Holding, window: usize, target: usize) -> usize {
        let raw = target.saturating_sub(window);
        if self.stays_raw() || raw < self.recent + self.group {
            return 0;
        }
        let tokens = (raw - self.recent) / self.group * self.group;
        let room = state.sealed_room / self.group * self.group;
        let copies = usize::from(state.copies_sealed && room > 0);
        let pages = tokens.saturating_sub(room).div_ceil(PACKED_SLOTS) + copies;
        // A page that a sliding layer opens leaves again, and is reused, once all of it is out of sight.
        let visible =
            |sliding: usize| (sliding + SLIDING_MARGIN + PACKED_SLOTS - self.recent).div_ceil(PACKED_SLOTS);
        self.sliding.map_or(pages, |sliding| pages.min(visible(sliding)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::testing::Counting;
    use crate::page::{Arena, Supply, Zone};
    use proptest::prelude::*;

    const RAW: u32 = 1024;
    const PACKED: u32 = 2048;

    /// The append loop of a store for one head, which draws on no more than `need` says.
    struct Head {
        rule: WindowRule,
        arena: Arena<Counting>,
        table: Table<<Counting as crate::page::ChunkSource>::Chunk>,
        /// Tables that share pages, with length, longest length and origin.
        others: Vec<(Table<<Counting as crate::page::ChunkSource>::Chunk>, [usize; 3])>,
        length: usize,
        longest: usize,
        origin: usize,
    }

    impl Head {
        fn new(rule: WindowRule) -> Self {
            let arena = Arena::new(Counting::new(u64::MAX), None).unwrap();
            let table = Table::default();
            Self { rule, arena, table, others: Vec::new(), length: 0, longest: 0, origin: rule.sinks }
        }

        /// Shares all pages with another table, changes places with one, or drops one.
        fn fork(&mut self, what: usize) {
            match what {
                0 => {
                    let mut grant = self.arena.grant("fork", self.table.entry_count() as u64).unwrap();
                    let state = [self.length, self.longest, self.origin];
                    self.others.push((self.table.share(&mut grant), state));
                }
                1 if !self.others.is_empty() => {
                    let mine = [self.length, self.longest, self.origin];
                    let (table, state) = self.others.remove(0);
                    self.others.push((std::mem::replace(&mut self.table, table), mine));
                    [self.length, self.longest, self.origin] = state;
                }
                2 => drop(self.others.pop()),
                _ => {}
            }
        }

        /// Appends, and returns the fewest raw and packed pages that were left of the reserved ones.
        fn append(&mut self, tokens: usize) -> (usize, usize) {
            let need = self
                .rule
                .need(&self.rule.holding(&self.table, self.length, self.origin), self.length + tokens);
            let wants = [(RAW, need.raw_pages), (PACKED, need.packed_pages)];
            let mut supply = self.arena.reserve("append", &wants).unwrap();
            let mut low = (need.raw_pages, need.packed_pages);
            for _ in 0..tokens {
                self.step(&mut supply, &mut low);
            }
            low
        }

        fn step(
            &mut self,
            supply: &mut Supply<<Counting as crate::page::ChunkSource>::Chunk>,
            low: &mut (usize, usize),
        ) {
            let rule = self.rule;
            let zone = if self.length < rule.sinks { Zone::Sinks } else { Zone::Window };
            self.table.push_raw(zone, self.length, || supply.take(RAW), |_, _| {});
            low.0 = low.0.min(supply.count(RAW));
            self.length += 1;
            self.longest = self.longest.max(self.length);
            let first = self.table.window().front().map_or(self.length, |entry| entry.index(0));
            if !rule.stays_raw() && self.length - first == rule.recent + rule.group {
                let freed = self.table.seal(
                    1,
                    rule.group,
                    PACKED_SLOTS,
                    || supply.take(PACKED),
                    |_, _| {},
                    |_, _, _, _| {},
                );
                low.1 = low.1.min(supply.count(PACKED));
                for page in freed {
                    supply.put(page);
                }
            }
            for page in self.table.take_before(rule.first_kept(self.length)) {
                supply.put(page);
            }
        }

        fn truncate(&mut self, n: usize) {
            let sealed_end = self.table.window().front().map_or(self.length, |entry| entry.index(0));
            if n < sealed_end {
                self.origin = n.max(self.rule.sinks);
            }
            self.table.truncate(n);
            self.length = n;
            if n == 0 {
                self.longest = 0;
            }
        }

        fn check(&self) {
            self.table.check().unwrap();
            let indices = self.table.live_indices();
            let seen = self.rule.oldest_exact(self.length).min(self.length);
            assert_eq!(
                indices[indices.len() - (self.length - seen)..],
                (seen..self.length).collect::<Vec<_>>()
            );
            if self.rule.sliding.is_none() {
                assert_eq!(indices.len(), self.length);
            }
        }
    }

    fn rules() -> impl Strategy<Value = WindowRule> {
        let sliding = prop_oneof![Just(None), (1usize..400).prop_map(Some)];
        let group = prop_oneof![Just(16usize), Just(32), Just(64)];
        (0usize..70, 0usize..150, group, sliding, prop::bool::weighted(0.8)).prop_map(
            |(sinks, recent, group, sliding, seals)| WindowRule { sinks, recent, group, sliding, seals },
        )
    }

    proptest! {
        #[test]
        fn need_is_never_short_and_raw_pages_are_exact(
            rule in rules(),
            steps in prop::collection::vec((any::<bool>(), 1usize..700, 0usize..80, 0usize..7), 1..12),
        ) {
            let mut head = Head::new(rule);
            for (single, tokens, back, fork) in steps {
                head.fork(fork);
                let low = head.append(if single { 1 + tokens % 3 } else { tokens });
                prop_assert_eq!(low.0, 0, "a raw page more than needed was reserved");
                if rule.sliding.is_none() {
                    prop_assert_eq!(low.1, 0, "a packed page more than needed was reserved");
                }
                head.check();
                let n = head.length.saturating_sub(back);
                if rule.can_truncate(head.longest, n) {
                    head.truncate(n);
                    head.check();
                }
                head.others.iter().for_each(|(table, _)| table.check().unwrap());
            }
            head.table = Table::default();
            head.others.clear();
            let stats = head.arena.stats();
            prop_assert_eq!((stats.chunk_bytes, stats.table_bytes), (0, 0));
        }

        #[test]
        fn raw_pages_are_what_need_counts_for_a_window_without_sinks(
            rule in rules(), length in 0usize..900, more in 1usize..900,
        ) {
            let mut head = Head::new(WindowRule { sinks: 0, ..rule });
            head.append(length);
            let state = head.rule.holding(&head.table, length, 0);
            let (from, to) = (length - state.window_first, length + more - state.window_first);
            let pages = head.rule.raw_pages(state.window_pages, from, to);
            prop_assert_eq!(pages, head.rule.need(&state, length + more).raw_pages);
        }

        #[test]
        fn sealed_tokens_depend_on_the_length_only(rule in rules(), sizes in prop::collection::vec(1usize..300, 1..6)) {
            let rule = WindowRule { sliding: None, ..rule };
            let mut head = Head::new(rule);
            for size in sizes {
                head.append(size);
                let sealed: usize = head.table.sealed().iter().map(|entry| entry.live_slots().count()).sum();
                prop_assert_eq!(sealed, rule.sealed_end(rule.sinks, head.length) - rule.sinks);
                let raw: usize = head.table.window().iter().map(crate::page::Entry::count).sum();
                prop_assert!(rule.stays_raw() || raw < rule.recent + rule.group);
            }
        }
    }

    const RULE: WindowRule = WindowRule { sinks: 0, recent: 128, group: 32, sliding: None, seals: true };

    #[test]
    fn the_window_drains_whatever_the_sizes_of_the_calls() {
        for sizes in [vec![100, 100, 100], vec![129], vec![1; 4096], [vec![200], vec![1; 500]].concat()] {
            let mut head = Head::new(RULE);
            for size in sizes {
                head.append(size);
                assert!(head.table.window().iter().map(crate::page::Entry::count).sum::<usize>() < 128 + 32);
            }
        }
        let short = WindowRule { recent: 32, ..RULE };
        assert_eq!(short.sealed_end(0, 200), 160);
    }

    #[test]
    fn no_sinks_and_no_recent_tokens_seal_every_group_at_once() {
        let mut head = Head::new(WindowRule { recent: 0, group: 16, ..RULE });
        head.append(16);
        assert_eq!((head.table.window().len(), head.table.sealed().len()), (0, 1));
        assert_eq!(
            head.rule.need(&head.rule.holding(&head.table, 16, 0), 17),
            Need { raw_pages: 1, packed_pages: 0 }
        );
        assert_eq!(
            head.rule.need(&head.rule.holding(&head.table, 16, 0), 81),
            Need { raw_pages: 1, packed_pages: 1 }
        );
    }

    #[test]
    fn a_short_sliding_window_stays_raw_and_peaks_at_its_span() {
        let rule = WindowRule { sliding: Some(100), ..RULE };
        assert!(rule.stays_raw());
        assert_eq!(rule.raw_pages(0, 0, 100_000), (100usize + 64 + 16).div_ceil(16));
        assert_eq!(RULE.raw_pages(3, 40, 100_000), (128 + 32) / 16 - 3);
        assert_eq!(WindowRule { seals: false, ..RULE }.raw_pages(0, 0, 100_000), 100_000 / 16);
        assert!(!WindowRule { sliding: Some(161), ..RULE }.stays_raw());
        assert!(WindowRule { sliding: Some(160), ..RULE }.stays_raw());
    }

    #[test]
    fn a_sliding_layer_goes_back_by_its_margin_only() {
        let rule = WindowRule { sliding: Some(8), ..RULE };
        assert!(rule.can_truncate(20, 15), "the margin still holds what the eight tokens before 15 are");
        assert!(rule.can_truncate(300, 300 - SLIDING_MARGIN - 1));
        assert!(!rule.can_truncate(300, 300 - SLIDING_MARGIN - 2));
        assert!(!rule.can_truncate(300, 1) && rule.can_truncate(300, 0));
        assert!(RULE.can_truncate(300, 1));
    }

    #[test]
    fn visible_tokens_of_a_sliding_window_are_all_there() {
        let mut head = Head::new(WindowRule { sliding: Some(8), recent: 0, group: 16, ..RULE });
        for size in [6, 1, 1, 1, 11, 500] {
            head.append(size);
            head.check();
            assert!(head.table.kept() < 8 + SLIDING_MARGIN + 16);
        }
    }

    #[test]
    fn a_truncate_into_sealed_tokens_moves_the_origin_of_the_groups() {
        let mut head = Head::new(WindowRule { sinks: 4, ..RULE });
        head.append(1000);
        head.truncate(500);
        assert_eq!(head.origin, 500);
        head.append(300);
        assert_eq!(head.table.window()[0].index(0), head.rule.sealed_end(500, 800));
        head.truncate(2);
        head.append(10);
        assert_eq!((head.origin, head.table.sinks().len(), head.table.window()[0].index(0)), (4, 1, 4));
        head.check();
    }
}
