//! Table entries without their pages, as files hold them.

use super::entry::{Entry, Slots};
use super::link::Link;
use super::supply::Page;
use super::table::{Table, Zone};

/// What a table entry says of its page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryParts {
    /// Page class.
    pub class: u8,
    /// Filled slots.
    pub count: u8,
    /// Whether nothing more is written behind them.
    pub closed: bool,
    /// Bit `s` is set if slot `s` holds a token that is still there.
    pub live: u64,
    /// Token index of each slot.
    pub slots: Slots,
}

impl<C> Entry<C> {
    /// What the entry says of its page.
    #[must_use]
    pub fn parts(&self) -> EntryParts {
        let Self { class, count, closed, live, ref slots, .. } = *self;
        EntryParts { class, count, closed, live, slots: slots.clone() }
    }
}

impl<C> Table<C> {
    /// Adds an entry behind the others of its zone; whoever restores a table sees to it that [`Table::check`] holds
    /// and that raw pages end where the next token comes.
    pub fn restore(&mut self, zone: Zone, page: Page<C>, parts: EntryParts) {
        let EntryParts { class, count, closed, live, slots } = parts;
        let entry = Entry { page: Link::new(page), class, count, closed, live, slots };
        match zone {
            Zone::Sinks => self.sinks.push(entry),
            Zone::Sealed => self.sealed.push(entry),
            Zone::Window => self.window.push_back(entry),
        }
    }
}
