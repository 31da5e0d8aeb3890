//! What the store knows of one sequence.

use crate::compile::LayerPlan;
use crate::evict::{EvictState, LayerEvict, Prompt};
use crate::park::Parked;
use kvrs_core::page::{Supply, Table};
use kvrs_core::{Error, LayerShape, Result, SeqId};

/// One layer of a sequence.
#[derive(Debug)]
pub(crate) struct LayerState<C> {
    /// Tokens appended: the logical length.
    pub(crate) length: usize,
    /// Index at which the window starts: everything from the sinks to here is sealed.
    pub(crate) origin: usize,
    /// Largest length since the layer was last empty: what lies behind a sliding window then has gone.
    pub(crate) longest: usize,
    /// Page tables, one per head group.
    pub(crate) tables: Vec<Table<C>>,
    /// Pages reserved for tokens to come, one supply per table.
    pub(crate) supplies: Vec<Supply<C>>,
    /// Pages for what stays of an open prompt, for all tables together.
    pub(crate) kept: Supply<C>,
    /// What a policy knows and did.
    pub(crate) evict: EvictState,
}

/// What pages are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// What stays of a layer's prompt.
    Kept(usize),
    /// The tokens of a layer and head group.
    Head(usize, usize),
    /// The raw tokens of a whole prompt, in one layer after the other.
    Shared,
}

/// Pages that are lacking.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub(crate) place: Place,
    /// `(page bytes, count)`, raw and packed.
    pub(crate) pages: [(u32, usize); 2],
}

/// One sequence.
#[derive(Debug)]
pub(crate) struct Sequence<C> {
    /// Position of index 0, given by the first append.
    pub(crate) start: Option<i64>,
    pub(crate) layers: Vec<LayerState<C>>,
    /// Length up to which every layer has its pages.
    pub(crate) target: usize,
    pub(crate) prompt: Prompt,
    /// Raw pages that the layers of a whole prompt use one after the other.
    pub(crate) shared: Supply<C>,
    /// What the tables held, while the pages are in host memory.
    pub(crate) parked: Option<Parked>,
}

impl<C> Sequence<C> {
    pub(crate) fn new(shapes: &[LayerShape], sinks: usize) -> Self {
        let layers = shapes.iter().map(|shape| LayerState::new(shape.kv_heads, sinks)).collect();
        let (prompt, shared) = (Prompt::Closed, Supply::default());
        Self { start: None, layers, target: 0, prompt, shared, parked: None }
    }

    /// Tokens that every layer has.
    pub(crate) fn length(&self) -> usize {
        self.layers.iter().map(|l| l.length).min().unwrap_or(0)
    }

    pub(crate) fn tables(&self) -> impl Iterator<Item = &Table<C>> {
        self.layers.iter().flat_map(|l| &l.tables)
    }

    /// Position of index 0.
    pub(crate) fn start(&self) -> i64 {
        self.start.unwrap_or(0)
    }

    /// Whether tokens of a layer stay raw because its policy waits for the end of the prompt.
    pub(crate) fn held(&self, plan: &LayerPlan) -> bool {
        self.prompt != Prompt::Closed && plan.evict.as_ref().is_some_and(LayerEvict::holds)
    }

    /// Gives back what was reserved and not used.
    pub(crate) fn release(&mut self) {
        for state in &mut self.layers {
            state.supplies.iter_mut().chain([&mut state.kept]).for_each(|supply| *supply = Supply::default());
        }
        self.shared = Supply::default();
        self.target = self.length();
    }

    /// Checks tables, and that statistics belong to tokens that are there.
    ///
    /// # Errors
    /// [`Error::Internal`] naming the invariant that is broken.
    pub(crate) fn check(&self) -> Result<()> {
        self.tables().try_for_each(Table::check)?;
        let mut facts = self.layers.iter().flat_map(|layer| layer.evict.heads.iter().zip(&layer.tables));
        if facts.any(|(facts, table)| !facts.fits(table.kept())) {
            return Err(Error::Internal("statistics of tokens that have gone".into()));
        }
        Ok(())
    }

    /// Checks that no prompt is open and that all layers have the same tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] naming the sequence.
    pub(crate) fn check_closed(&self, id: SeqId) -> Result<()> {
        if self.prompt != Prompt::Closed {
            return Err(Error::sequence(
                "seq",
                format!("{id}, whose prompt is open"),
                "a sequence after end_prompt",
            ));
        }
        self.check_even(id)
    }

    /// Checks that all layers have the same tokens.
    ///
    /// # Errors
    /// [`Error::Sequence`] naming the sequence.
    pub(crate) fn check_even(&self, id: SeqId) -> Result<()> {
        let (least, most) = (self.length(), self.layers.iter().map(|l| l.length).max().unwrap_or(0));
        if least == most {
            return Ok(());
        }
        let got = format!("{id}, whose layers have {least} to {most} tokens");
        Err(Error::sequence("seqs", got, "sequences between two steps"))
    }
}

impl<C> LayerState<C> {
    fn new(groups: usize, sinks: usize) -> Self {
        Self {
            length: 0,
            origin: sinks,
            longest: 0,
            tables: (0..groups).map(|_| Table::default()).collect(),
            supplies: (0..groups).map(|_| Supply::default()).collect(),
            kept: Supply::default(),
            evict: EvictState::new(groups),
        }
    }
}
