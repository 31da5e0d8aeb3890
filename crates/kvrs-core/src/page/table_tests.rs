use super::testing::{Bytes, Counting};
use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

type Handle = Arc<Bytes>;
const RAW: u32 = 1024;
const PACKED: u32 = 4096;
const GROUP: usize = 32;

/// What stands in the slots of pages: the memory behind a table.
#[derive(Default)]
struct Memory(HashMap<(u64, usize), [u64; PACKED_SLOTS]>);

impl Memory {
    fn slots(&mut self, page: &Page<Handle>) -> &mut [u64; PACKED_SLOTS] {
        self.0.entry((page.chunk().id(), page.offset())).or_insert([0; PACKED_SLOTS])
    }
}

struct Model {
    arena: Arena<Counting>,
    table: Table<Handle>,
    memory: Memory,
    /// Value of each live token.
    tokens: BTreeMap<usize, u64>,
    length: usize,
    next_value: u64,
}

impl Model {
    fn new() -> Self {
        let arena = Arena::new(Counting::new(u64::MAX), None).unwrap();
        let (table, memory, tokens) = Default::default();
        Self { arena, table, memory, tokens, length: 0, next_value: 0 }
    }

    fn page(&self, bytes: u32) -> Page<Handle> {
        self.arena.reserve("test", &[(bytes, 1)]).unwrap().take(bytes)
    }

    fn append(&mut self, count: usize, sinks: usize, class: u8) {
        for _ in 0..count {
            let zone = if self.length < sinks { Zone::Sinks } else { Zone::Window };
            let spare = self.page(RAW);
            let (page, slot) = self.table.push_raw(zone, self.length, || spare, unshared);
            self.memory.slots(page)[slot] = self.next_value;
            self.tokens.insert(self.length, self.next_value);
            self.next_value += 1;
            self.length += 1;
            if self.table.window().iter().map(Entry::count).sum::<usize>() == 2 * GROUP {
                self.seal(class);
            }
        }
    }

    fn seal(&mut self, class: u8) {
        let spare = self.page(PACKED);
        let memory = &mut self.memory;
        let freed = self.table.seal(
            class,
            GROUP,
            PACKED_SLOTS,
            || spare,
            unshared,
            |raw, _, page, slot| {
                for (i, from) in raw.iter().enumerate() {
                    let values = memory.slots(from)[..RAW_SLOTS].to_vec();
                    memory.slots(page)[slot + i * RAW_SLOTS..][..RAW_SLOTS].copy_from_slice(&values);
                }
            },
        );
        assert_eq!(freed.len(), GROUP / RAW_SLOTS);
    }

    fn compact(&mut self, class: u8) -> usize {
        let memory = &mut self.memory;
        self.table.compact(class, PACKED_SLOTS, |from, s, to, t| {
            memory.slots(to)[t] = memory.slots(from)[s];
            memory.slots(from)[s] = u64::MAX;
        })
    }

    /// Drops sealed tokens, then merges thin neighbours.
    fn thin(&mut self, seed: u64, of: u64, sinks: usize) {
        let raw = self.table.window().front().map_or(self.length, |entry| entry.index(0));
        let before = self.table.sealed().len();
        let kept: Vec<usize> = (0..self.length).filter(|&index| wanted(seed, of, index)).collect();
        let mut freed = self.table.evict_sealed(&kept).len();
        self.tokens.retain(|&index, _| index < sinks || index >= raw || wanted(seed, of, index));
        let memory = &mut self.memory;
        freed += self
            .table
            .compact_near(1, PACKED_SLOTS, |from, s, to, t| memory.slots(to)[t] = memory.slots(from)[s])
            .len();
        assert_eq!(freed, before - self.table.sealed().len());
        for pages in 2..=4 {
            for near in self.table.sealed().windows(pages).filter(|near| near.iter().all(|e| e.class() == 1))
            {
                let live: usize = near.iter().map(|entry| entry.live_slots().count()).sum();
                assert!(live > (pages - 1) * PACKED_SLOTS, "{live} tokens in {pages} pages");
            }
        }
    }

    /// Moves some tokens of the window to gathered pages; the others die, and sinks move as they are.
    fn gather(&mut self, seed: u64, of: u64) {
        let mut left = Vec::new();
        for (zone, entry) in self.table.take_raw() {
            for (slot, index) in entry.live_slots() {
                let value = self.memory.slots(entry.page())[slot];
                if zone == Zone::Sinks {
                    let spare = self.page(RAW);
                    let (page, slot) = self.table.push_raw(zone, index, || spare, unshared);
                    self.memory.slots(page)[slot] = value;
                } else if wanted(seed, of, index) {
                    left.push((index as u32, value));
                } else {
                    self.tokens.remove(&index);
                }
            }
            assert!(entry.into_page().is_some(), "no other table has the page");
        }
        for part in left.chunks(PACKED_SLOTS) {
            let page = self.page(PACKED);
            part.iter().zip(self.memory.slots(&page)).for_each(|((_, value), slot)| *slot = *value);
            self.table.push_gathered(1, page, &part.iter().map(|(index, _)| *index).collect::<Vec<_>>());
        }
    }

    fn check(&mut self) {
        self.table.check().unwrap();
        assert_eq!(self.table.live_indices(), self.tokens.keys().copied().collect::<Vec<_>>());
        assert_eq!(self.table.kept(), self.tokens.len());
        for entry in self.table.entries() {
            let slots = self.memory.slots(entry.page());
            assert!(entry.live_slots().all(|(slot, index)| slots[slot] == self.tokens[&index]));
        }
        let stats = self.arena.stats();
        assert_eq!(stats.pages_total - stats.pages_free, self.table.entries().count() as u64);
        self.arena.check().unwrap();
    }

    /// Pages that the sealed zone needs at least, with each run of one class packed by itself, if that helps.
    fn packed_pages(&self, class: usize) -> usize {
        let runs = self.table.sealed().chunk_by(|a, b| a.class() == b.class());
        let live = |run: &[Entry<Handle>]| run.iter().map(|e| e.live_slots().count()).sum::<usize>();
        runs.map(|run| if run[0].class() == class { live(run).div_ceil(PACKED_SLOTS) } else { run.len() })
            .sum()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Append(usize, bool),
    Truncate(usize),
    DropBefore(usize),
    Retain(u64, u64),
    Compact(bool),
    Thin(u64, u64),
    Gather(u64, u64),
    SealRaw,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1usize..400, prop::bool::weighted(0.2)).prop_map(|(n, other)| Op::Append(n, other)),
        1 => (0usize..200).prop_map(Op::Truncate),
        1 => (0usize..1000).prop_map(Op::DropBefore),
        2 => (any::<u64>(), 1u64..8).prop_map(|(seed, of)| Op::Retain(seed, of)),
        2 => prop::bool::weighted(0.2).prop_map(Op::Compact),
        2 => (any::<u64>(), 1u64..8).prop_map(|(seed, of)| Op::Thin(seed, of)),
        1 => (any::<u64>(), 1u64..8).prop_map(|(seed, of)| Op::Gather(seed, of)),
        1 => Just(Op::SealRaw),
    ];
    prop::collection::vec(op, 1..25)
}

/// No other table uses the page.
fn unshared(_: &Page<Handle>, _: &mut Page<Handle>) {
    panic!("nobody shares the page");
}

fn wanted(seed: u64, of: u64, index: usize) -> bool {
    (index as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & 7 < of
}

fn apply(model: &mut Model, sinks: usize, op: &Op) {
    match *op {
        Op::Append(count, other) => model.append(count, sinks, 1 + u8::from(other)),
        Op::Truncate(back) => {
            model.length = model.length.saturating_sub(back);
            model.table.truncate(model.length);
            model.tokens.retain(|&index, _| index < model.length);
        }
        Op::DropBefore(percent) => {
            let first = model.length * percent / 2000;
            model.table.drop_before(first);
            let left = model.table.live_indices();
            assert!(model.tokens.keys().all(|index| *index < first || left.contains(index)));
            assert!(model.table.entries().all(|entry| entry.index(entry.count() - 1) >= first));
            model.tokens.retain(|index, _| left.contains(index));
        }
        Op::Retain(seed, of) => {
            let raw = model.table.window().front().map_or(model.length, |entry| entry.index(0));
            model.table.retain(|index| wanted(seed, of, index), &[Zone::Sealed]);
            model.tokens.retain(|&index, _| index < sinks || index >= raw || wanted(seed, of, index));
        }
        Op::Compact(other) => {
            let class = 1 + u8::from(other);
            let (before, least) = (model.table.sealed().len(), model.packed_pages(class.into()));
            assert_eq!(model.compact(class), before - least);
            assert_eq!(model.table.sealed().len(), least);
        }
        Op::Thin(seed, of) => model.thin(seed, of, sinks),
        Op::Gather(seed, of) => model.gather(seed, of),
        Op::SealRaw => {
            while model.table.window().front().is_some_and(|entry| entry.count() == RAW_SLOTS) {
                model.table.seal_raw();
            }
        }
    }
}

proptest! {
    #[test]
    fn a_table_holds_what_a_list_would(sinks in 0usize..40, ops in ops()) {
        let mut model = Model::new();
        for op in ops {
            apply(&mut model, sinks, &op);
            model.check();
        }
        drop(std::mem::take(&mut model.table));
        prop_assert_eq!(model.arena.stats().chunk_bytes, 0);
    }
}

fn filled(tokens: usize) -> Model {
    let mut model = Model::new();
    model.append(tokens, 4, 1);
    model
}

#[test]
fn a_cut_packed_page_is_closed_and_a_cut_raw_page_is_refilled() {
    let mut model = filled(4 + 4 * GROUP);
    assert_eq!((model.table.sealed().len(), model.table.window().len()), (2, 2));
    apply(&mut model, 4, &Op::Truncate(12));
    assert_eq!((model.table.window().len(), model.table.window()[1].count()), (2, 4));
    model.append(5, 4, 1);
    assert_eq!((model.table.window().len(), model.table.window()[1].count()), (2, 9));
    apply(&mut model, 4, &Op::Truncate(75));
    let sealed = model.table.sealed();
    assert_eq!((sealed.len(), sealed[0].count(), sealed[0].live_slots().count()), (1, 64, 46));
    model.append(2 * GROUP, 4, 1);
    let sealed = model.table.sealed();
    assert_eq!((sealed.len(), sealed[1].index(0)), (2, 50), "nothing is written into the cut page");
    model.check();
}

#[test]
fn a_truncate_to_nothing_frees_every_page_and_one_to_the_length_none() {
    let mut model = filled(300);
    let pages = model.table.entries().count();
    assert_eq!(model.table.truncate(300), 0);
    assert_eq!(model.table.truncate(1000), 0);
    assert_eq!(model.table.truncate(0), pages);
    assert_eq!(model.arena.stats().chunk_bytes, 0);
}

#[test]
fn taken_pages_can_be_used_again() {
    let mut model = filled(300);
    let pages = model.table.take_before(200);
    assert!(!pages.is_empty() && pages.iter().any(|page| page.bytes() == PACKED as usize));
    let stats = model.arena.stats();
    drop(pages);
    assert!(model.arena.stats().page_bytes_used < stats.page_bytes_used);
}

#[test]
fn a_run_of_tokens_fills_the_slots_that_single_tokens_would() {
    for (length, most) in [(0, 1), (0, 16), (0, 40), (5, 11), (5, 12), (15, 3), (16, 3)] {
        let (mut one, mut run) = (filled(4), filled(4));
        one.append(length, 4, 1);
        run.append(length, 4, 1);
        let spare = run.page(RAW);
        let (_, slots) = run.table.push_raw_run(Zone::Window, 4 + length, most, || spare, unshared);
        assert_eq!(slots, length % 16..16.min(length % 16 + most));
        one.append(slots.len(), 4, 1);
        assert_eq!(run.table.live_indices(), one.table.live_indices());
        let counts = |model: &Model| model.table.window().iter().map(Entry::count).collect::<Vec<_>>();
        assert_eq!(counts(&run), counts(&one));
        run.table.check().unwrap();
    }
}

/// A second table with the same pages.
fn share(model: &Model) -> Table<Handle> {
    let mut grant = model.arena.grant("share", model.table.entry_count() as u64).unwrap();
    model.table.share(&mut grant)
}

/// What a table holds: token and value.
fn held(table: &Table<Handle>, memory: &mut Memory) -> Vec<(usize, u64)> {
    let slots = table.entries().flat_map(|entry| entry.live_slots().map(move |slot| (entry, slot)));
    slots.map(|(entry, (slot, index))| (index, memory.slots(entry.page())[slot])).collect()
}

#[test]
fn whichever_table_writes_first_copies_a_shared_page_and_the_other_one_keeps_its_own() {
    let mut model = filled(4 + 3 * GROUP + 5);
    let other = share(&model);
    let before = held(&other, &mut model.memory);
    model.table.retain(|index| index % 3 == 0, &[Zone::Sealed]);
    assert_eq!(model.compact(1), 0, "shared pages are not packed");
    let spare = model.page(RAW);
    let memory = &mut model.memory;
    let copy = |from: &Page<Handle>, to: &mut Page<Handle>| *memory.slots(to) = *memory.slots(from);
    let (page, slot) = model.table.push_raw(Zone::Window, model.length, || spare, copy);
    model.memory.slots(page)[slot] = u64::MAX;
    assert_eq!(slot, 5, "behind the tokens that were copied");
    assert_eq!(held(&other, &mut model.memory), before);
    let mine = held(&model.table, &mut model.memory);
    assert!(mine.ends_with(&[before[before.len() - 5..].to_vec(), vec![(model.length, u64::MAX)]].concat()));
    assert_eq!((model.table.check(), other.check()), (Ok(()), Ok(())));
}

#[test]
fn a_group_sealed_behind_a_shared_page_goes_to_a_copy_of_it() {
    let mut model = filled(4 + 3 * GROUP - 1);
    let mut other = share(&model);
    let before = held(&other, &mut model.memory);
    let spares = [model.page(RAW), model.page(PACKED)];
    let [raw, packed] = spares;
    let memory = std::cell::RefCell::new(std::mem::take(&mut model.memory));
    let copy = |from: &Page<Handle>, to: &mut Page<Handle>| {
        let slots = *memory.borrow_mut().slots(from);
        *memory.borrow_mut().slots(to) = slots;
    };
    other.push_raw(Zone::Window, model.length, || raw, copy);
    let freed = other.seal(
        1,
        GROUP,
        PACKED_SLOTS,
        || packed,
        copy,
        |_, _, page, slot| {
            memory.borrow_mut().slots(page)[slot..slot + GROUP].fill(7);
        },
    );
    assert!(freed.is_empty(), "the raw pages stay with the other table");
    model.memory = memory.into_inner();
    assert_eq!((other.sealed().len(), other.sealed()[0].count()), (1, 2 * GROUP));
    assert_eq!(held(&model.table, &mut model.memory), before);
    let mine = held(&other, &mut model.memory);
    assert_eq!(mine[..4 + GROUP], before[..4 + GROUP]);
    assert!(mine[4 + GROUP..4 + 2 * GROUP].iter().all(|(_, value)| *value == 7));
    assert_eq!((model.table.check(), other.check()), (Ok(()), Ok(())));
}

#[test]
fn shared_pages_are_freed_with_their_last_table_in_any_order() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let mut model = filled(300);
        let entries = model.table.entry_count() as u64;
        let mut tables = [Some(share(&model)), Some(share(&model)), None];
        tables[2] = Some(std::mem::take(&mut model.table));
        assert_eq!(model.arena.stats().table_bytes, 3 * entries * ENTRY_BYTES);
        for (left, table) in order.into_iter().zip([2, 1, 0]).map(|(table, left)| (left, table)) {
            tables[table] = None;
            let stats = model.arena.stats();
            assert_eq!(stats.pages_total - stats.pages_free, if left > 0 { entries } else { 0 });
            assert_eq!(stats.table_bytes, left * entries * ENTRY_BYTES);
        }
        assert_eq!(model.arena.stats().chunk_bytes, 0);
    }
}

#[test]
fn room_for_shared_entries_counts_against_the_capacity() {
    let arena = Arena::new(Counting::new(u64::MAX), Some(64 << 10)).unwrap();
    let most = (64 << 10) / ENTRY_BYTES;
    assert!(matches!(arena.grant("fork", most + 1), Err(crate::Error::Capacity { .. })));
    let grant = arena.grant("fork", most).unwrap();
    assert!(arena.grant("fork", 1).is_err() && arena.reserve("test", &[(RAW, 1)]).is_err());
    arena.check().unwrap();
    drop(grant);
    assert_eq!(arena.stats().table_bytes, 0);
}

#[test]
fn removed_tokens_die_where_they_are_and_groups_are_sealed_as_if_they_were_there() {
    let mut model = filled(4 + 2 * GROUP + 20);
    assert_eq!(model.table.remove(&(2..4 + GROUP)), 1, "the sealed page is empty");
    assert_eq!(model.table.remove(&(4 + GROUP..4 + 2 * GROUP)), 0, "window pages keep their place");
    model.tokens.retain(|&index, _| !(2..4 + 2 * GROUP).contains(&index));
    model.check();
    model.append(GROUP, 4, 1);
    let sealed = model.table.sealed();
    assert_eq!((sealed.len(), sealed[0].index(0), sealed[0].live()), (1, 4 + GROUP, 0));
    model.append(GROUP, 4, 1);
    assert_eq!(model.table.sealed()[0].live(), u64::from(u32::MAX) << GROUP);
    model.check();
}

#[test]
fn dead_slots_of_the_window_stay_dead_when_sealed() {
    let mut model = filled(4 + 2 * GROUP - 1);
    model.table.retain(|index| index != 10, &[Zone::Window]);
    model.tokens.remove(&10);
    model.append(1, 4, 1);
    assert_eq!(model.table.sealed()[0].live(), u64::from(u32::MAX) & !(1 << 6));
    model.check();
}

#[test]
fn compacting_counts_its_indices_as_table_bytes() {
    let mut model = filled(4 + 10 * GROUP);
    model.table.retain(|index| index % 4 == 0, &[Zone::Sealed]);
    model.tokens.retain(|index, _| index % 4 == 0 || *index < 4 || *index >= 4 + 9 * GROUP);
    assert_eq!(model.compact(1), 3);
    let entries = model.table.entries().count() as u64;
    assert_eq!(model.table.table_bytes(), entries * ENTRY_BYTES + 4 * 72);
    assert!(matches!(model.table.sealed()[0].slots(), Slots::Gathered(_)));
    model.check();
}
