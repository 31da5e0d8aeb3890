//! Appending tokens: check everything, reserve pages for all layers, then change.

use crate::columns;
use crate::compile::{LayerPlan, PACKED, RAW};
use crate::evict::{Acting, Prompt, observe};
use crate::input::{Queries, Tokens};
use crate::reserve::budget_now;
use crate::sequence::{LayerState, Sequence};
use crate::store::{KvStore, Types};
use kvrs_codec::Dtype;
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_core::page::{RAW_SLOTS, Supply, Table, Zone};
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
    /// Whether tokens stay in the window until the prompt ends.
    held: bool,
    /// What acts when a group leaves the window.
    acting: Option<Acting<'a>>,
}

impl<B: Backend> KvStore<B> {
    /// Appends tokens to one layer: they are encoded before the call returns.
    ///
    /// # Errors
    /// Shape, dtype, position, non-finite, sequence and capacity errors name the argument; nothing has changed.
    /// [`Error::Argument`] naming q if a policy of the layer learns from queries now: [`KvStore::append_with`].
    pub fn append(&self, layer: usize, seqs: &[SeqId], tokens: &Tokens<'_>) -> Result<()> {
        let checked = self.check_tokens(layer, seqs.len(), tokens)?;
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        self.prepare(layer, &mut rows, &checked, None)?;
        let plan = self.layer(layer)?;
        let seen = observe::look(&*self.backend, plan, &rows, &checked, None)?;
        observe::take(layer, plan, &mut rows, &checked, None, (None, seen));
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
        let prompts: Vec<Prompt> = rows.iter().map(|s| s.prompt).collect();
        self.reserve_to(&mut rows, &targets, &prompts)
    }

    pub(crate) fn check_tokens<'a>(
        &self,
        layer: usize,
        rows: usize,
        tokens: &Tokens<'a>,
    ) -> Result<Checked<'a>> {
        let plan = self.layer(layer)?;
        tokens.check_shapes(&plan.codec.shape, rows, self.backend.place())?;
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
        queries: Option<&Queries<'_>>,
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
        let all = self.plan.compiled(checked.types.window)?;
        let counts = rows.iter().zip(&checked.columns);
        let prompts: Vec<Prompt> = counts.map(|(s, columns)| s.next_prompt(all, columns.len())).collect();
        for (b, sequence) in rows.iter().enumerate() {
            let row = (b, checked.columns[b].len());
            self.check_prompt(layer, sequence, prompts[b], row, queries.is_some())?;
        }
        self.backend.admit(&all.layers[layer].codec)?;
        self.reserve_to(rows, &targets, &prompts)?;
        for (sequence, target) in rows.iter_mut().zip(&targets) {
            self.lend(layer, &all.layers[layer], sequence, *target)?;
        }
        if *self.types.get_or_init(|| checked.types) != checked.types {
            return Err(Error::dtype("k", checked.types.input.name(), "that of this store's first append"));
        }
        Ok(())
    }

    /// Writes and encodes; fails only where the caller's own scores of a prompt do.
    pub(crate) fn commit(
        &self,
        layer: usize,
        rows: &mut [impl DerefMut<Target = Sequence<B::Chunk>>],
        checked: &Checked<'_>,
    ) -> Result<()> {
        let (all, plan) = (self.compiled()?, self.layer(layer)?);
        let mut jobs = Vec::new();
        for (row, sequence) in rows.iter_mut().enumerate() {
            if checked.columns[row].is_empty() {
                continue;
            }
            let start = *sequence.start.get_or_insert(checked.positions[row].unwrap_or(0));
            let held = sequence.held(plan);
            let state = &mut sequence.layers[layer];
            let budget = plan.evict.as_ref().filter(|_| !held).and_then(|e| budget_now(e, all, state));
            state.evict.budget = state.evict.budget.or(budget);
            jobs.extend(state.jobs(plan, row, start, held, budget));
        }
        let run = |job: Job<'_, B::Chunk>| self.grow(layer, plan, job, checked);
        if checked.columns.iter().map(Vec::len).sum::<usize>() < SERIAL_TOKENS {
            jobs.into_iter().for_each(run);
        } else {
            self.backend.install(|| jobs.into_par_iter().for_each(run));
        }
        for (sequence, columns) in rows.iter_mut().zip(&checked.columns) {
            sequence.grew(layer, plan, columns.len());
            if !columns.is_empty() {
                self.end_whole(layer, sequence)?;
            }
            sequence.give_back(layer, plan);
        }
        self.backend.flush()
    }

    /// Writes one row's tokens into one table, page by page; seals groups and drops pages as they become due.
    fn grow(&self, layer: usize, plan: &LayerPlan, job: Job<'_, B::Chunk>, checked: &Checked<'_>) {
        let Job { group, row, length, sinks, mut window_first, start, table, supply, held, mut acting } = job;
        let (raw, rule) = (plan.class(group, RAW), plan.rule);
        let rows = RawRows { k: checked.tokens.k, v: checked.tokens.v, row, head: group, columns: &[] };
        let (mut index, mut columns) = (length, &checked.columns[row][..]);
        while !columns.is_empty() {
            // Index behind which a group is sealed, and the end of the run before the next change of any kind.
            let stays = held || rule.stays_raw();
            let due = if stays { usize::MAX } else { window_first + rule.recent + rule.group };
            let (zone, end) = if index < sinks { (Zone::Sinks, sinks) } else { (Zone::Window, due) };
            let most = columns.len().min(end - index);
            let page = || supply.take(raw.desc.page_bytes);
            let copy = |from: &_, to: &mut _| self.backend.copy_page(from, to);
            let (page, slots) = table.push_raw_run(zone, index, most, page, copy);
            let (run, rest) = columns.split_at(slots.len());
            self.backend.store_raw(raw, page, slots.start, RawRows { columns: run, ..rows });
            (index, columns) = (index + run.len(), rest);
            if index == due {
                drop_old(plan, table, supply, index - 1);
                if plan.target() == PACKED {
                    self.constants.look(self, plan, (layer, group), (table, 0), start);
                    self.seal(plan, group, start, table, supply);
                } else {
                    (0..rule.group / RAW_SLOTS).for_each(|_| table.seal_raw());
                }
                window_first += rule.group;
                if let Some(acting) = &mut acting {
                    self.evict_group((layer, group), plan, (table, supply), acting, (start, index));
                }
            }
            drop_old(plan, table, supply, index);
        }
    }

    /// Encodes the oldest group of a table's window.
    pub(crate) fn seal(
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
        let copy = |from: &_, to: &mut _| self.backend.copy_page(from, to);
        let freed = table.seal(PACKED, plan.rule.group, slots, page, copy, |pages, first, page, slot| {
            let positions: Vec<i64> = (start + first as i64..).take(plan.rule.group).collect();
            self.backend.seal((raw, packed), pages, &positions, page, slot);
        });
        for page in freed {
            supply.put(page);
        }
        self.encoded.fetch_add(plan.rule.group as u64, Ordering::Relaxed);
    }
}

impl<C> LayerState<C> {
    fn jobs(
        &mut self,
        plan: &LayerPlan,
        row: usize,
        start: i64,
        held: bool,
        budget: Option<usize>,
    ) -> impl Iterator<Item = Job<'_, C>> {
        let (length, window_first) = (self.length, self.origin);
        let tables = self.tables.iter_mut().zip(&mut self.supplies).zip(&mut self.evict.heads).enumerate();
        tables.map(move |(group, ((table, supply), facts))| Job {
            group,
            row,
            length,
            sinks: plan.rule.sinks,
            window_first,
            start,
            table,
            supply,
            held,
            acting: budget.map(|budget| Acting { budget, facts }),
        })
    }
}

impl<C> Sequence<C> {
    /// Book-keeping after a layer grew.
    fn grew(&mut self, layer: usize, plan: &LayerPlan, tokens: usize) {
        let held = self.held(plan);
        let state = &mut self.layers[layer];
        state.length += tokens;
        if !held {
            state.origin = plan.rule.sealed_end(state.origin, state.length);
        }
        state.longest = state.longest.max(state.length);
    }

    /// What was reserved for a layer and not needed goes back.
    fn give_back(&mut self, layer: usize, plan: &LayerPlan) {
        let open = matches!(self.prompt, Prompt::Open { .. }) && self.held(plan);
        let state = &mut self.layers[layer];
        if state.length >= self.target && !open {
            state
                .supplies
                .iter_mut()
                .chain([&mut state.kept])
                .for_each(|supply| drop(std::mem::take(supply)));
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
