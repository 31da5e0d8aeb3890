//! Jobs that move bytes, gathered into few launches.
//!
//! A store writes page by page; a device wants all pages of a call at once. A job waits in the first wave in which
//! everything that it reads has been written, and nothing that it writes is read or written by another job; waves are
//! launched one after the other, the jobs of a wave side by side.

use crate::args::{CopySlots, Encode, PageCopies, Plain, RawRow, SlotCopy, StoreRaw, TileJob, View};
use crate::launcher::{Kernel, Launcher};
use crate::memory::{Allocation, Parcel};
use kvrs_core::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

const STORE_RAW: Kernel = Kernel { name: "kvrs_store_raw", threads: 32 };
const ENCODE: Kernel = Kernel { name: "kvrs_encode", threads: 128 };
const COPY_SLOTS: Kernel = Kernel { name: "kvrs_copy_slots", threads: 32 };

/// Tensors that raw rows come from, and what is stored of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) k: View,
    pub(crate) v: View,
    /// Largest magnitude that is stored; vectors beyond it become zeros.
    pub(crate) limit: f32,
}

/// A group to encode.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    /// Raw pages of 16 tokens.
    pub(crate) raw: &'a [u64],
    pub(crate) page: u64,
    pub(crate) slot: usize,
    pub(crate) positions: &'a [i64],
    /// Sides of the raw class and of the target's, and the target's encoders.
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) encoders: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Store,
    Seal,
    Copy,
}

/// Waves in which a page was last read and last written.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    read: usize,
    written: usize,
    by: Option<Kind>,
    /// Slots that this wave writes.
    slots: u64,
}

/// Jobs side by side.
#[derive(Debug, Default)]
struct Wave {
    rows: Vec<(Source, Vec<RawRow>)>,
    tiles: Vec<TileJob>,
    /// `[tile][16]`.
    positions: Vec<i64>,
    /// Slots that move, by target page: those share bytes and go one after the other.
    copies: Vec<Copies>,
}

/// A page, its sides, and the slots that move there.
type Copies = (u64, u64, Vec<SlotCopy>);

/// How many of these pages one launch takes.
fn together(all: &[Copies]) -> usize {
    let mut bytes = 64;
    let fits = all.iter().take_while(|(_, _, slots)| {
        bytes += size_of::<PageCopies>() + size_of_val(&slots[..]);
        bytes <= JOBS
    });
    fits.count().max(1)
}

/// Bytes of the positions of a tile.
const TILE_POSITIONS: usize = 16 * size_of::<i64>();

/// Bytes of jobs in one launch: their memory is taken once, so that a full device still takes what it has pages for.
const JOBS: usize = 1 << 20;

/// Waves that wait, the first first.
#[derive(Debug)]
pub(crate) struct Queue<L: Launcher> {
    waves: Vec<Wave>,
    uses: HashMap<u64, Use>,
    jobs: Allocation<L>,
    /// Why something that was to be written is not.
    lost: Option<Error>,
}

impl<L: Launcher> Queue<L> {
    /// An empty one.
    pub(crate) fn new(launcher: &Arc<L>) -> Result<Self> {
        let jobs = Allocation::new(launcher, JOBS)?;
        Ok(Self { waves: Vec::new(), uses: HashMap::new(), jobs, lost: None })
    }

    /// Remembers that something was not written, and why.
    pub(crate) fn lose(&mut self, error: &Error) {
        self.lost.get_or_insert_with(|| match error {
            Error::Internal(_) => error.clone(),
            _ => Error::device(
                "the store",
                format_args!("a device that lost what was written to it ({error})"),
                "a new store",
            ),
        });
    }

    /// Writes tokens into a raw page.
    pub(crate) fn store_raw(&mut self, source: Source, rows: &[RawRow]) {
        let Some(page) = rows.first().map(|row| row.page) else { return };
        let slots = rows.iter().fold(0, |slots, row| slots | 1 << row.slot);
        let wave = self.wave(Kind::Store, &[], (page, slots));
        let all = &mut self.waves[wave].rows;
        match all.iter_mut().find(|(other, _)| other.k == source.k && other.v == source.v) {
            Some((_, jobs)) => jobs.extend_from_slice(rows),
            None => all.push((source, rows.to_vec())),
        }
    }

    /// Encodes a group.
    pub(crate) fn seal(&mut self, group: &Group<'_>) {
        let slots = (u64::MAX >> (64 - group.positions.len())) << group.slot;
        let wave = self.wave(Kind::Seal, group.raw, (group.page, slots));
        let wave = &mut self.waves[wave];
        for (i, &raw) in group.raw.iter().enumerate() {
            wave.tiles.push(TileJob {
                raw,
                page: group.page,
                positions: 0,
                from: group.from,
                to: group.to,
                encoders: group.encoders,
                slot: (group.slot + 16 * i) as u32,
                pad: 0,
            });
        }
        wave.positions.extend_from_slice(group.positions);
    }

    /// Copies a slot as codes; `sides` are those of both pages.
    pub(crate) fn copy_slot(&mut self, copy: SlotCopy, sides: u64) {
        let wave = self.wave(Kind::Copy, &[copy.from], (copy.to, 1 << copy.to_slot));
        let all = &mut self.waves[wave].copies;
        match all.iter_mut().find(|(page, _, _)| *page == copy.to) {
            Some((_, _, copies)) => copies.push(copy),
            None => all.push((copy.to, sides, vec![copy])),
        }
    }

    /// The wave of a job, whose uses are noted; waves count from 1 so that 0 is before all of them.
    fn wave(&mut self, kind: Kind, reads: &[u64], (writes, slots): (u64, u64)) -> usize {
        let target = self.uses.get(&writes).copied().unwrap_or_default();
        // Jobs of a kind may share a target where they write different slots, or go one after the other. A page that was
        // given back and taken again within a call is written twice.
        let apart = kind == Kind::Copy || target.slots & slots == 0;
        let after = if target.by == Some(kind) && apart { target.written } else { target.written + 1 };
        let sources = reads.iter().filter_map(|page| self.uses.get(page)).map(|page| page.written + 1);
        let wave = sources.chain([after, target.read + 1, 1]).max().unwrap_or(1);
        for &page in reads {
            let page = self.uses.entry(page).or_default();
            page.read = page.read.max(wave);
        }
        let target = self.uses.entry(writes).or_default();
        let before = if target.written == wave { target.slots } else { 0 };
        (target.written, target.by, target.slots) = (wave, Some(kind), before | slots);
        if self.waves.len() < wave {
            self.waves.resize_with(wave, Wave::default);
        }
        wave - 1
    }

    /// Launches everything that waits.
    pub(crate) fn flush(&mut self, launcher: &Arc<L>, refused: u64) -> Result<()> {
        self.uses.clear();
        for wave in std::mem::take(&mut self.waves) {
            if self.lost.is_none()
                && let Err(error) = self.run(launcher, refused, wave)
            {
                self.lose(&error);
            }
        }
        self.lost.clone().map_or(Ok(()), Err)
    }

    fn run(&self, launcher: &Arc<L>, refused: u64, mut wave: Wave) -> Result<()> {
        for (source, rows) in &wave.rows {
            for rows in rows.chunks(JOBS / size_of::<RawRow>()) {
                let mut parcel = Parcel::default();
                let part = parcel.add(rows);
                let base = self.send(&parcel)?;
                let Source { k, v, limit } = *source;
                let args = StoreRaw { rows: part.at(base), k, v, refused, limit, pad: 0 };
                launch(launcher, STORE_RAW, [rows.len(), 2, 1], &args)?;
            }
        }
        let most = (JOBS - 64) / (size_of::<TileJob>() + TILE_POSITIONS);
        for (tiles, positions) in wave.tiles.chunks_mut(most).zip(wave.positions.chunks(16 * most)) {
            self.encode(launcher, tiles, positions)?;
        }
        let mut copies = &wave.copies[..];
        while !copies.is_empty() {
            let (some, rest) = copies.split_at(together(copies));
            self.copy(launcher, some)?;
            copies = rest;
        }
        Ok(())
    }

    /// Sends jobs to where the last launch's were.
    fn send(&self, parcel: &Parcel) -> Result<u64> {
        self.jobs.fill(parcel.bytes())?;
        Ok(self.jobs.address)
    }

    fn encode(&self, launcher: &Arc<L>, tiles: &mut [TileJob], positions: &[i64]) -> Result<()> {
        let mut parcel = Parcel::default();
        let part = parcel.add(positions);
        for (tile, job) in tiles.iter_mut().enumerate() {
            job.positions = part.at(self.jobs.address) + (TILE_POSITIONS * tile) as u64;
        }
        let part = parcel.add(tiles);
        let base = self.send(&parcel)?;
        launch(launcher, ENCODE, [tiles.len(), 2, 1], &Encode { jobs: part.at(base) })
    }

    fn copy(&self, launcher: &Arc<L>, all: &[Copies]) -> Result<()> {
        let (mut copies, mut pages) = (Vec::new(), Vec::new());
        for (_, sides, slots) in all {
            let (first, count) = (copies.len() as u32, slots.len() as u32);
            pages.push(PageCopies { first, copies: count, sides: *sides });
            copies.extend_from_slice(slots);
        }
        let mut parcel = Parcel::default();
        let (copies, part) = (parcel.add(&copies), parcel.add(&pages));
        let base = self.send(&parcel)?;
        let args = CopySlots { copies: copies.at(base), pages: part.at(base) };
        launch(launcher, COPY_SLOTS, [pages.len(), 2, 1], &args)
    }
}

/// Runs a kernel; a grid without blocks is nothing to do.
pub(crate) fn launch<L: Launcher, A: Plain>(
    launcher: &Arc<L>,
    kernel: Kernel,
    grid: [usize; 3],
    args: &A,
) -> Result<()> {
    if grid.contains(&0) {
        return Ok(());
    }
    let args = std::ptr::from_ref(args).cast();
    // SAFETY: `args` is the structure that the kernel takes (the callers pair them); its addresses are of buffers and
    // pages that live until later calls of the same launcher, which run in order.
    unsafe { launcher.launch(kernel, grid.map(|n| n as u32), args) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

    /// Counts launches and does nothing.
    #[derive(Debug, Default)]
    struct Counter(std::sync::Mutex<Vec<(&'static str, u32)>>);

    impl Launcher for Counter {
        fn allocate(&self, _: usize) -> Result<u64> {
            Ok(4096)
        }
        unsafe fn free(&self, _: u64, _: usize) {}
        unsafe fn upload(&self, _: &[u8], _: u64) -> Result<()> {
            Ok(())
        }
        unsafe fn download(&self, _: u64, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
        unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<()> {
            Ok(())
        }
        unsafe fn launch(&self, kernel: Kernel, grid: [u32; 3], _: *const c_void) -> Result<()> {
            self.0.lock().unwrap().push((kernel.name, grid[0]));
            Ok(())
        }
        fn synchronize(&self) -> Result<()> {
            Ok(())
        }
    }

    fn source() -> Source {
        Source { k: View::default(), v: View::default(), limit: 1.0 }
    }

    fn row(page: u64) -> RawRow {
        RawRow { page, ..RawRow::default() }
    }

    fn row_at(page: u64, slot: u32) -> RawRow {
        RawRow { slot, ..row(page) }
    }

    fn group(raw: &[u64], page: u64) -> Group<'_> {
        Group { raw, page, slot: 0, positions: &[0; 16], from: 0, to: 0, encoders: 0 }
    }

    fn launches(fill: impl FnOnce(&mut Queue<Counter>)) -> Vec<(&'static str, u32)> {
        let launcher = Arc::new(Counter::default());
        let mut queue = Queue::new(&launcher).unwrap();
        fill(&mut queue);
        queue.flush(&launcher, 0).unwrap();
        let done = launcher.0.lock().unwrap().clone();
        queue.flush(&launcher, 0).unwrap();
        assert_eq!(*launcher.0.lock().unwrap(), done, "nothing waits twice");
        done
    }

    #[test]
    fn one_step_of_many_tables_is_one_launch_of_each_kind() {
        let done = launches(|queue| {
            for table in 0..50 {
                queue.store_raw(source(), &[row(1000 + table)]);
                queue.seal(&group(&[1000 + table], 2000 + table));
            }
        });
        assert_eq!(done, [("kvrs_store_raw", 50), ("kvrs_encode", 50)]);
    }

    #[test]
    fn a_raw_page_is_written_again_only_after_it_was_sealed() {
        let done = launches(|queue| {
            queue.store_raw(source(), &[row(1)]);
            queue.seal(&group(&[1], 9));
            queue.store_raw(source(), &[row(1), row(1)]);
            queue.seal(&group(&[1], 9));
        });
        let stored = |rows| ("kvrs_store_raw", rows);
        assert_eq!(done, [stored(1), ("kvrs_encode", 1), stored(2), ("kvrs_encode", 1)]);
    }

    #[test]
    fn a_page_that_is_taken_again_in_a_call_is_written_in_order() {
        let done = launches(|queue| {
            queue.store_raw(source(), &[row_at(1, 0), row_at(1, 1)]);
            queue.store_raw(source(), &[row_at(1, 2)]);
            queue.store_raw(source(), &[row_at(1, 0)]);
        });
        assert_eq!(done, [("kvrs_store_raw", 3), ("kvrs_store_raw", 1)]);
    }

    #[test]
    fn copies_into_one_page_go_together_and_chains_of_copies_in_order() {
        let copy = |from, to| SlotCopy { from, to, from_slot: 0, to_slot: 0 };
        let done = launches(|queue| {
            queue.copy_slot(copy(1, 5), 0);
            queue.copy_slot(copy(2, 5), 0);
            queue.copy_slot(copy(3, 6), 0);
            queue.copy_slot(copy(5, 7), 0);
        });
        assert_eq!(done, [("kvrs_copy_slots", 2), ("kvrs_copy_slots", 1)]);
    }

    #[test]
    fn jobs_that_need_more_memory_than_a_launch_has_take_several_and_none_is_lost() {
        const MANY: u32 = 40_000;
        let done = launches(|queue| {
            for page in 0..u64::from(MANY) {
                queue.store_raw(source(), &[row(1 << 20 | page)]);
                queue.seal(&group(&[1 << 20 | page], 1 << 30 | page));
                let copy = SlotCopy { from: 1 << 30 | page, to: 1 << 40 | page, from_slot: 0, to_slot: 0 };
                queue.copy_slot(copy, 0);
            }
        });
        for kernel in ["kvrs_store_raw", "kvrs_encode", "kvrs_copy_slots"] {
            let counts: Vec<u32> = done.iter().filter(|(name, _)| *name == kernel).map(|(_, n)| *n).collect();
            assert!(counts.len() > 1 && counts.iter().sum::<u32>() == MANY, "{kernel}: {counts:?}");
        }
    }
}
