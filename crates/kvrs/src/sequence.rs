//! What the store knows of one sequence.

use crate::compile::{Compiled, LayerPlan, PACKED, RAW};
use kvrs_core::LayerShape;
use kvrs_core::page::{Supply, Table};
use kvrs_core::window::Holding;

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
}

/// Pages that a table lacks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub(crate) layer: usize,
    pub(crate) group: usize,
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
}

impl<C> Sequence<C> {
    pub(crate) fn new(shapes: &[LayerShape], sinks: usize) -> Self {
        let layers = shapes.iter().map(|shape| LayerState::new(shape.kv_heads, sinks)).collect();
        Self { start: None, layers, target: 0 }
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

    /// Pages that are missing so that every layer can grow to `target`.
    pub(crate) fn wants(&self, plan: &Compiled, target: usize) -> Vec<Want> {
        let layers = self.layers.iter().zip(&plan.layers).enumerate();
        let groups = layers.flat_map(|(i, (state, plan))| {
            (0..state.tables.len()).map(move |group| Want {
                layer: i,
                group,
                pages: state.wants(plan, group, target),
            })
        });
        groups.filter(|want| want.pages.iter().any(|(_, n)| *n > 0)).collect()
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
        }
    }

    fn wants(&self, plan: &LayerPlan, group: usize, target: usize) -> [(u32, usize); 2] {
        if target <= self.length {
            return [(0, 0); 2];
        }
        let need = plan.rule.need(&Holding::of(&self.tables[group], self.length, self.origin), target);
        let supply = &self.supplies[group];
        let missing = |class: u8, pages: usize| {
            let bytes = plan.page_bytes(class);
            (bytes, if pages == 0 { 0 } else { pages.saturating_sub(supply.count(bytes)) })
        };
        [missing(RAW, need.raw_pages), missing(PACKED, need.packed_pages)]
    }
}
