//! Appending tokens: check everything, reserve pages for all layers, then change.

use crate::columns;
use crate::compile::{LayerPlan, PACKED, RAW};
use crate::input::Tokens;
use crate::sequence::{LayerState, Sequence, Want};
use crate::store::{KvStore, Types};
use kvrs_codec::Dtype;
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_core::page::{Supply, Table, Zone};
use kvrs_core::{Error, Result, SeqId};
use rayon::prelude::*;
use std::ops::DerefMut;
use std::sync::atomic::Ordering;

/// Longest sequence: indices are u32 in page tables.
const MAX_TOKENS: usize = 1 << 30;
/// Below this many tokens in a call, waking other threads costs more than it saves.
const SERIAL_TOKENS: usize = 64;

/// Tokens that passed every check.
#[derive(Debug)]
pub(crate) struct Checked<'a> {
    pub(crate) tokens: Tokens<'a>,
    /// Columns with tokens, per row.
    pub(crate) columns: Vec<Vec<usize>>,
    /// First position of each row that has tokens and positions.
    positions: Vec<Option<i64>>,
    types: Types,
}

/// The growing of one page table by one row of a call.
struct Job<'a, C> {
    group: usize,
    row: usize,
    length: usize,
    /// End of the sinks.
    sinks: usize,
    /// First index of the window.
    window_first: usize,
    start: i64,
    table: &'a mut Table<C>,
    supply: &'a mut Supply<C>,
}

impl<B: Backend> KvStore<B> {
    /// Appends tokens to one layer: they are encoded before the call returns.
    ///
    /// # Errors
    /// Shape, dtype, position, non-finite, sequence and capacity errors name the argument; nothing has changed.
    pub fn append(&self, layer: usize, seqs: &[SeqId], tokens: &Tokens<'_>) -> Result<()> {
        let checked = self.check_tokens(layer, seqs.len(), tokens)?;
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        self.prepare(layer, &mut rows, &checked)?;
        self.commit(layer, &mut rows, &checked)
    }

    /// Takes the pages for `tokens` more tokens in every layer.
    ///
    /// # Errors
    /// [`Error::Capacity`] if they are not there.
    pub fn reserve(&self, seqs: &[SeqId], tokens: usize) -> Result<()> {
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        let targets = rows.iter().map(|s| grown(s.length(), tokens)).collect::<Result<Vec<_>>>()?;
        self.reserve_to(&mut rows, &targets)
    }

    pub(crate) fn check_tokens<'a>(
        &self,
        layer: usize,
        rows: usize,
        tokens: &Tokens<'a>,
    ) -> Result<Checked<'a>> {
        let plan = self.layer(layer)?;
        tokens.check_shapes(&plan.codec.shape, rows)?;
        let types = self.types_for(tokens.k.dtype())?;
        let width = tokens.k.shape()[2];
        let columns = columns::of_mask(tokens.mask, rows, width);
        let parallel = columns.iter().map(Vec::len).sum::<usize>() >= SERIAL_TOKENS;
        let check = || tokens.check_values(&columns, types.window, parallel);
        if parallel { self.backend.install(check) } else { check() }?;
        let positions =
            columns.iter().enumerate().map(|(b, columns)| first_position(tokens, b, width, columns));
        Ok(Checked { tokens: *tokens, positions: positions.collect::<Result<_>>()?, columns, types })
    }

    /// The store's types if this input fits them.
    fn types_for(&self, input: Dtype) -> Result<Types> {
        let asked = self.plan.spec().window()?;
        let own = if input == Dtype::F32 { Dtype::F16 } else { input };
        let types = Types { input, window: asked.unwrap_or(own) };
        if input != Dtype::F32 && types.window != input {
            let allowed = format!("float32 or the plan's window_dtype {}", types.window.name());
            return Err(Error::dtype("k", input.name(), allowed));
        }
        match self.types.get() {
            Some(fixed) if *fixed != types => {
                let allowed = format!("{}, that of this store's first append", fixed.input.name());
                Err(Error::dtype("k", input.name(), allowed))
            }
            _ => Ok(types),
        }
    }

    /// The checks that need the sequences, then the reservation: the last step that can fail.
    pub(crate) fn prepare(
        &self,
        layer: usize,
        rows: &mut [impl DerefMut<Target = Sequence<B::Chunk>>],
        checked: &Checked<'_>,
    ) -> Result<()> {
        for (b, sequence) in rows.iter().enumerate() {
            let next = sequence.start.map(|start| start + sequence.layers[layer].length as i64);
            if let (Some(got), Some(next)) = (checked.positions[b], next)
                && got != next
            {
                let what = format!("positions of row {b}");
                return Err(Error::sequence(
                    what,
                    format!("{got} on"),
                    format!("{next} on: no gap, no repetition"),
                ));
            }
        }
        let targets = rows
            .iter()
            .zip(&checked.columns)
            .map(|(s, columns)| grown(s.layers[layer].length, columns.len()))
            .collect::<Result<Vec<_>>>()?;
        self.reserve_to(rows, &targets)?;
        if *self.types.get_or_init(|| checked.types) != checked.types {
            return Err(Error::dtype("k", checked.types.input.name(), "that of this store's first append"));
        }
        Ok(())
    }

    /// Takes the pages that let every layer of each row grow to its target, all or none.
    fn reserve_to(
        &self,
        rows: &mut [impl DerefMut<Target = Sequence<B::Chunk>>],
        targets: &[usize],
    ) -> Result<()> {
        if rows.iter().zip(targets).all(|(s, target)| *target <= s.target) {
            return Ok(());
        }
        let plan = self.compiled()?;
        let wants: Vec<_> = rows.iter().zip(targets).map(|(s, t)| s.wants(plan, *t.max(&s.target))).collect();
        let pages = wants.iter().flatten().flat_map(|want| want.pages);
        let all: Vec<(u32, usize)> = pages.filter(|(_, n)| *n > 0).collect();
        if !all.is_empty() {
            let mut supply = self.arena.reserve("the tokens of this step, in all layers,", &all)?;
            for (sequence, wants) in rows.iter_mut().zip(wants) {
                for Want { layer, group, pages } in wants {
                    sequence.layers[layer].supplies[group].merge(supply.split(&pages));
                }
            }
        }
        for (sequence, target) in rows.iter_mut().zip(targets) {
            sequence.target = sequence.target.max(*target);
        }
        Ok(())
    }

    /// Writes and encodes; cannot fail.
    pub(crate) fn commit(
        &self,
        layer: usize,
        rows: &mut [impl DerefMut<Target = Sequence<B::Chunk>>],
        checked: &Checked<'_>,
    ) -> Result<()> {
        let plan = self.layer(layer)?;
        let mut jobs = Vec::new();
        for (row, sequence) in rows.iter_mut().enumerate() {
            if checked.columns[row].is_empty() {
                continue;
            }
            let start = *sequence.start.get_or_insert(checked.positions[row].unwrap_or(0));
            jobs.extend(sequence.layers[layer].jobs(plan, row, start));
        }
        let run = |job: Job<'_, B::Chunk>| self.grow(layer, plan, job, checked);
        if checked.columns.iter().map(Vec::len).sum::<usize>() < SERIAL_TOKENS {
            jobs.into_iter().for_each(run);
        } else {
            self.backend.install(|| jobs.into_par_iter().for_each(run));
        }
        for (sequence, columns) in rows.iter_mut().zip(&checked.columns) {
            sequence.grew(layer, plan, columns.len());
        }
        Ok(())
    }

    /// Writes one row's tokens into one table, page by page; seals groups and drops pages as they become due.
    fn grow(&self, layer: usize, plan: &LayerPlan, job: Job<'_, B::Chunk>, checked: &Checked<'_>) {
        let Job { group, row, length, sinks, mut window_first, start, table, supply } = job;
        let (raw, rule) = (plan.class(group, RAW), plan.rule);
        let rows = RawRows { k: checked.tokens.k, v: checked.tokens.v, row, head: group, columns: &[] };
        let (mut index, mut columns) = (length, &checked.columns[row][..]);
        while !columns.is_empty() {
            // Index behind which a group is sealed, and the end of the run before the next change of any kind.
            let due = if plan.raw() { usize::MAX } else { window_first + rule.recent + rule.group };
            let (zone, end) = if index < sinks { (Zone::Sinks, sinks) } else { (Zone::Window, due) };
            let most = columns.len().min(end - index);
            let (page, slots) = table.push_raw_run(zone, index, most, || supply.take(raw.desc.page_bytes));
            let (run, rest) = columns.split_at(slots.len());
            self.backend.store_raw(raw, page, slots.start, RawRows { columns: run, ..rows });
            (index, columns) = (index + run.len(), rest);
            if index == due {
                drop_old(plan, table, supply, index - 1);
                self.constants.look(self, plan, (layer, group), table, start);
                self.seal(plan, group, start, table, supply);
                window_first += rule.group;
            }
            drop_old(plan, table, supply, index);
        }
    }

    fn seal(
        &self,
        plan: &LayerPlan,
        group: usize,
        start: i64,
        table: &mut Table<B::Chunk>,
        supply: &mut Supply<B::Chunk>,
    ) {
        let (raw, packed) = (plan.class(group, RAW), plan.class(group, PACKED));
        let slots = packed.desc.slots as usize;
        let page = || supply.take(packed.desc.page_bytes);
        let freed = table.seal(PACKED, plan.rule.group, slots, page, |pages, first, page, slot| {
            self.backend.seal((raw, packed), pages, start + first as i64, page, slot);
        });
        for page in freed {
            supply.put(page);
        }
        self.encoded.fetch_add(plan.rule.group as u64, Ordering::Relaxed);
    }
}

impl<C> LayerState<C> {
    fn jobs(&mut self, plan: &LayerPlan, row: usize, start: i64) -> impl Iterator<Item = Job<'_, C>> {
        let (length, window_first) = (self.length, self.origin);
        let tables = self.tables.iter_mut().zip(&mut self.supplies).enumerate();
        tables.map(move |(group, (table, supply))| Job {
            group,
            row,
            length,
            sinks: plan.rule.sinks,
            window_first,
            start,
            table,
            supply,
        })
    }
}

impl<C> Sequence<C> {
    /// Book-keeping after a layer grew; what was reserved and not needed goes back.
    fn grew(&mut self, layer: usize, plan: &LayerPlan, tokens: usize) {
        let target = self.target;
        let state = &mut self.layers[layer];
        state.length += tokens;
        state.origin = plan.rule.sealed_end(state.origin, state.length);
        state.longest = state.longest.max(state.length);
        if state.length >= target {
            state.supplies.iter_mut().for_each(|supply| drop(std::mem::take(supply)));
        }
    }
}

/// Keeps the pages for reuse that a sliding window has left behind after `length` tokens.
fn drop_old<C>(plan: &LayerPlan, table: &mut Table<C>, supply: &mut Supply<C>, length: usize) {
    if plan.rule.sliding.is_some() {
        table.take_before(plan.rule.first_kept(length)).into_iter().for_each(|page| supply.put(page));
    }
}

fn grown(length: usize, tokens: usize) -> Result<usize> {
    let allowed = || format!("a length of at most {MAX_TOKENS} tokens");
    let target = length.checked_add(tokens).filter(|n| *n <= MAX_TOKENS);
    target.ok_or_else(|| Error::sequence("tokens", format!("{length} + {tokens}"), allowed()))
}

/// The first position of a row, after checking that its tokens follow each other.
fn first_position(tokens: &Tokens<'_>, row: usize, width: usize, columns: &[usize]) -> Result<Option<i64>> {
    let Some(positions) = tokens.positions else { return Ok(None) };
    let row_positions = &positions[row * width..(row + 1) * width];
    let Some(first) = columns.first().map(|c| row_positions[*c]) else { return Ok(None) };
    for (r, column) in columns.iter().enumerate() {
        let (got, expected) = (row_positions[*column], first.saturating_add(r as i64));
        if got != expected {
            let what = format!("positions at row {row}, token {column}");
            return Err(Error::sequence(what, got, format!("{expected}: consecutive, no gap")));
        }
    }
    if !(0..1 << 40).contains(&first) {
        return Err(Error::sequence(format!("positions of row {row}"), first, "0 up to 2^40"));
    }
    Ok(Some(first))
}
