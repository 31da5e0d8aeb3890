//! A table entry: which tokens stand in which slots of one page.

use super::link::{Grant, Link};
use super::pool::ENTRY_BYTES;
use super::supply::Page;
use crate::error::{Error, Result};

/// Token index of each slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slots {
    /// Slot `s` holds token `first + s`.
    Run {
        /// Index of slot 0.
        first: u32,
    },
    /// Slot `s` holds token `[s]`; ascending.
    Gathered(Box<[u32]>),
}

/// One page of a table and what is alive in it.
///
/// Live bits and indices belong to the entry, so tables that share a page may keep different tokens of it.
#[derive(Debug)]
pub struct Entry<C> {
    pub(super) page: Link<C>,
    pub(super) class: u8,
    pub(super) count: u8,
    pub(super) closed: bool,
    pub(super) live: u64,
    pub(super) slots: Slots,
}

/// The lowest `n` bits.
pub(super) fn ones(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

/// The set bits, ascending.
pub(super) fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros() as usize;
        (mask != 0).then(|| {
            mask &= mask - 1;
            bit
        })
    })
}

pub(super) fn token(index: usize) -> u32 {
    u32::try_from(index).expect("token indices stay below 2^32")
}

impl<C> Entry<C> {
    pub(super) fn open(page: Page<C>, class: u8, first: usize) -> Self {
        let slots = Slots::Run { first: token(first) };
        Self { page: Link::new(page), class, count: 0, closed: false, live: 0, slots }
    }

    /// The page.
    #[must_use]
    pub fn page(&self) -> &Page<C> {
        self.page.page()
    }

    /// Page class: 0 for raw 16-bit pages, above for the layer's codecs.
    #[must_use]
    pub fn class(&self) -> usize {
        self.class.into()
    }

    /// Slots that were filled, live or not.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.into()
    }

    /// Bit `s` is set if slot `s` holds a token that is still there.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.live
    }

    /// Token index of each slot.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Token index of a filled slot.
    #[must_use]
    pub fn index(&self, slot: usize) -> usize {
        match &self.slots {
            Slots::Run { first } => *first as usize + slot,
            Slots::Gathered(indices) => indices[slot] as usize,
        }
    }

    /// `(slot, token index)` of the live slots, ascending.
    pub fn live_slots(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        bits(self.live).map(|slot| (slot, self.index(slot)))
    }

    /// Token index of the last live slot.
    #[must_use]
    pub fn last_index(&self) -> Option<usize> {
        self.live.checked_ilog2().map(|slot| self.index(slot as usize))
    }

    /// Whether all tokens lie before `first`; those that have gone count while more may be written behind them.
    pub(super) fn behind(&self, first: usize) -> bool {
        let filled = || self.count().checked_sub(1).map(|slot| self.index(slot));
        let last = if self.closed { self.last_index() } else { filled() };
        last.is_none_or(|last| last < first)
    }

    /// Kills the tokens that `gone(index)` names.
    pub(super) fn kill(&mut self, mut gone: impl FnMut(usize) -> bool) {
        let dead = bits(self.live).filter(|&slot| gone(self.index(slot)));
        self.live &= !dead.fold(0u64, |bits, slot| bits | 1 << slot);
    }

    /// Whether another table uses the page too.
    #[must_use]
    pub fn shared(&self) -> bool {
        self.page.shared()
    }

    /// Whether nothing more is written behind the filled slots.
    #[must_use]
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// The same tokens of the same page, for another table.
    pub(super) fn share(&self, grant: &mut Grant<C>) -> Self {
        let Self { class, count, closed, live, .. } = *self;
        Self { page: self.page.share(grant), class, count, closed, live, slots: self.slots.clone() }
    }

    /// Gives the entry a page of its own, filled by `copy(old, new)`, if another table uses its page too.
    pub(super) fn own(&mut self, page: impl FnOnce() -> Page<C>, copy: impl FnOnce(&Page<C>, &mut Page<C>)) {
        if self.shared() {
            let mut own = page();
            copy(self.page(), &mut own);
            self.page = Link::new(own);
        }
    }

    /// The page; `None` if another table shares it.
    #[must_use]
    pub fn into_page(self) -> Option<Page<C>> {
        self.page.into_page()
    }

    /// Whether `more` tokens from `index` on may be written behind the filled slots of `slots`.
    pub(super) fn accepts(&self, class: u8, index: usize, more: usize, slots: usize) -> bool {
        let next = match self.slots {
            Slots::Run { first } => first as usize + self.count(),
            Slots::Gathered(_) => return false,
        };
        !self.closed && self.class == class && next == index && self.count() + more <= slots
    }

    /// Slots left for tokens from `index` on; 0 if the page is closed or ends elsewhere.
    pub(crate) fn room(&self, index: usize, slots: usize) -> usize {
        if self.accepts(self.class, index, 0, slots) { slots - self.count() } else { 0 }
    }

    /// The page to write `more` live slots into, and the first of them.
    ///
    /// # Panics
    /// If the page is shared.
    pub(super) fn extend(&mut self, more: usize) -> (&mut Page<C>, usize) {
        let slot = self.count();
        self.count += more as u8;
        self.live |= ones(slot + more) & !ones(slot);
        (self.page.page_mut().expect("only unshared pages are written"), slot)
    }

    /// Kills tokens from `n` on: a raw page may be refilled from there, a packed one is closed.
    pub(super) fn cut(&mut self, n: usize) {
        let left = (0..self.count()).take_while(|&slot| self.index(slot) < n).count();
        if left == self.count() {
            return;
        }
        self.live &= ones(left);
        if self.class == 0 && matches!(self.slots, Slots::Run { .. }) {
            self.count = left as u8;
        } else {
            self.closed = true;
        }
    }

    /// Bytes of bookkeeping for the entry.
    pub(super) fn table_bytes(&self) -> u64 {
        match &self.slots {
            Slots::Run { .. } => ENTRY_BYTES,
            Slots::Gathered(indices) => ENTRY_BYTES + size_of_val::<[u32]>(indices) as u64,
        }
    }

    pub(super) fn check(&self, slots: usize, may_be_dead: bool) -> Result<()> {
        let fault = |what: String| Err(Error::Internal(format!("table entry: {what}")));
        let dead = self.live == 0 && !may_be_dead;
        if self.count == 0 || self.count() > slots || dead || self.live & !ones(self.count()) != 0 {
            return fault(format!("live bits {:x} with {} of {slots} slots", self.live, self.count));
        }
        match &self.slots {
            Slots::Gathered(indices)
                if indices.len() != self.count() || !indices.is_sorted_by(|a, b| a < b) =>
            {
                fault(format!("{} slots hold tokens {indices:?}", self.count))
            }
            _ => Ok(()),
        }
    }
}
