//! What a store holds, counted to the byte.

use crate::compile::{Compiled, LayerPlan, RAW, scale_bytes, tile_code_bytes, token_raw_bytes};
use crate::evict::report::{self, PolicyStats};
use crate::locks::broken;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::desc::TILE;
use kvrs_core::Result;
use kvrs_core::page::{ENTRY_BYTES, Entry, Table};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// One layer over all sequences.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LayerStats {
    /// Packed codes.
    pub bytes_codes: u64,
    /// Scales of packed tokens.
    pub bytes_scales: u64,
    /// 16-bit rows of sinks, window and raw layers.
    pub bytes_window: u64,
    /// Tokens kept, summed over sequences and heads.
    pub tokens_kept: u64,
    /// `dot`, `tile` or `raw`.
    pub path: &'static str,
    /// Whether every token stays 16-bit.
    pub raw: bool,
    /// Why, where a codec was asked for.
    pub note: Option<String>,
}

/// A store's bytes and tokens. `bytes_total` is everything allocated for tokens, those of snapshots and published
/// prefixes too: codes + scales + window + tables + statistics + slack. A page that several share counts once.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Everything allocated for tokens.
    pub bytes_total: u64,
    /// Packed codes.
    pub bytes_codes: u64,
    /// Scales of packed tokens.
    pub bytes_scales: u64,
    /// 16-bit rows.
    pub bytes_window: u64,
    /// Page tables.
    pub bytes_tables: u64,
    /// Statistics that policies keep.
    pub bytes_statistics: u64,
    /// Allocated and not used: tails of pages, free pages, reserved pages.
    pub bytes_slack: u64,
    /// Matrices and tables of the plan, not counted in the total.
    pub bytes_constants: u64,
    /// Host memory of sequences after `to_host`, not counted in the total.
    pub bytes_parked: u64,
    /// The hard limit.
    pub bytes_capacity: Option<u64>,
    /// Pages cut from memory.
    pub pages_total: u64,
    /// Of these, free ones.
    pub pages_free: u64,
    /// One entry a layer.
    pub per_layer: Vec<LayerStats>,
    /// Tokens appended, summed over sequences.
    pub tokens_logical: u64,
    /// Tokens kept, summed over layers, heads and the sequences that are not parked.
    pub tokens_kept: u64,
    /// Encodings ever done, summed over layers and heads.
    pub tokens_encoded: u64,
    /// Policies that wait for the end of a prompt.
    pub waiting: Vec<String>,
    /// Tiles of 16 values per head that queries with top-k attention could have read.
    pub value_tiles_seen: u64,
    /// Tiles of these that were read.
    pub value_tiles_read: u64,
    /// What each policy did, by name.
    pub policies: Vec<PolicyStats>,
    /// `dot`, `tile` or `raw`: the slowest path of any layer.
    pub path: &'static str,
    /// Whether memory lies on huge pages.
    pub huge_pages: bool,
    /// Live sequences.
    pub sequences: usize,
    /// `8 * bytes_total` over the elements of all visible logical tokens that are not parked.
    pub bits_per_element: f64,
}

impl<B: Backend> KvStore<B> {
    /// Counts what the store holds.
    ///
    /// # Errors
    /// [`kvrs_core::Error::Internal`] after a panic.
    pub fn stats(&self) -> Result<Stats> {
        let plan = self.compiled()?;
        let mut layers: Vec<LayerStats> = plan.layers.iter().map(LayerStats::new).collect();
        let (mut logical, mut elements, mut parked) = (0, 0, 0);
        let (mut policies, mut held) = (BTreeMap::new(), Held::default());
        let map = self.sequences.read().map_err(broken)?;
        for sequence in map.values() {
            let sequence = sequence.read().map_err(broken)?;
            logical += sequence.length() as u64;
            if let Some(pages) = &sequence.parked {
                parked += pages.bytes();
                continue;
            }
            report::add(plan, &sequence, &mut policies);
            held.add(plan, &sequence, &mut layers);
            for ((state, plan), stats) in sequence.layers.iter().zip(&plan.layers).zip(&mut layers) {
                stats.tokens_kept += state.tables.iter().map(Table::kept).sum::<usize>() as u64;
                elements += visible_elements(plan, state.length);
            }
        }
        let sequences = map.len();
        drop(map);
        for snapshot in self.snapshots.get()? {
            held.add(plan, &snapshot.sequence, &mut layers);
        }
        let mut stats = Stats { tokens_logical: logical, sequences, ..Stats::sum(layers) };
        (stats.bytes_statistics, stats.bytes_parked) = (held.statistics, parked);
        stats.policies = policies.into_values().collect();
        stats.waiting = report::waiting(&stats.policies);
        stats.add_memory(&self.arena.stats(), held.gathered);
        stats.bytes_constants = plan.constant_bytes;
        stats.tokens_encoded = self.encoded.load(Ordering::Relaxed);
        [stats.value_tiles_seen, stats.value_tiles_read] = self.value_tiles.get();
        stats.huge_pages = self.backend.huge_pages();
        stats.bits_per_element = bits_per_element(stats.bytes_total, elements);
        Ok(stats)
    }
}

/// What sequences and snapshots hold together.
#[derive(Default)]
struct Held {
    statistics: u64,
    gathered: u64,
    /// Filled slots of the shared pages that were counted so far, by the page's address.
    shared: HashMap<usize, usize>,
}

impl Held {
    fn add<C>(&mut self, plan: &Compiled, sequence: &Sequence<C>, layers: &mut [LayerStats]) {
        for ((state, plan), stats) in sequence.layers.iter().zip(&plan.layers).zip(layers) {
            self.statistics += state.evict.bytes();
            for (group, table) in state.tables.iter().enumerate() {
                self.gathered += gathered_bytes(table);
                for entry in table.entries() {
                    let counted = self.counted(entry);
                    stats.add(plan, group, entry.class(), counted..entry.count().max(counted));
                }
            }
        }
    }

    /// Slots of the page that another entry has counted already.
    fn counted<C>(&mut self, entry: &Entry<C>) -> usize {
        if !entry.shared() {
            return 0;
        }
        let counted = self.shared.entry(std::ptr::from_ref(entry.page()).addr()).or_default();
        let before = *counted;
        *counted = before.max(entry.count());
        before
    }
}

/// Bytes of a table beyond what the arena counts with each page: the indices of gathered pages.
fn gathered_bytes<C>(table: &Table<C>) -> u64 {
    table.table_bytes() - table.entries().count() as u64 * ENTRY_BYTES
}

/// Elements of the tokens that a layer's next query sees.
pub(crate) fn visible_elements(plan: &LayerPlan, length: usize) -> u64 {
    let shape = &plan.codec.shape;
    let visible = shape.sliding.map_or(length, |s| s.min(length));
    (visible * shape.kv_heads * (shape.key_dim + shape.value_dim)) as u64
}

/// Bits of memory per element; 0 for an empty store.
pub(crate) fn bits_per_element(bytes: u64, elements: u64) -> f64 {
    if elements == 0 { 0.0 } else { 8.0 * bytes as f64 / elements as f64 }
}

impl LayerStats {
    fn new(plan: &LayerPlan) -> Self {
        Self { path: plan.path(), raw: plan.raw(), note: plan.note.clone(), ..Self::default() }
    }

    /// Counts filled slots of a page.
    fn add(&mut self, plan: &LayerPlan, group: usize, class: usize, slots: Range<usize>) {
        if class == usize::from(RAW) {
            self.bytes_window += slots.len() as u64 * token_raw_bytes(&plan.codec.shape);
            return;
        }
        let desc = &plan.codec.classes[group][class].desc;
        let tiles = slots.end.div_ceil(TILE) - slots.start.div_ceil(TILE);
        self.bytes_codes += tiles as u64 * tile_code_bytes(desc);
        self.bytes_scales += scale_bytes(desc, slots.len() as u64);
    }
}

impl Stats {
    fn sum(per_layer: Vec<LayerStats>) -> Self {
        let total = |field: fn(&LayerStats) -> u64| per_layer.iter().map(field).sum();
        let path = ["tile", "dot"].into_iter().find(|p| per_layer.iter().any(|l| l.path == *p));
        Self {
            bytes_codes: total(|l| l.bytes_codes),
            bytes_scales: total(|l| l.bytes_scales),
            bytes_window: total(|l| l.bytes_window),
            tokens_kept: total(|l| l.tokens_kept),
            path: path.unwrap_or("raw"),
            per_layer,
            ..Self::default()
        }
    }

    fn add_memory(&mut self, arena: &kvrs_core::page::ArenaStats, gathered: u64) {
        self.bytes_tables = arena.table_bytes + gathered;
        self.bytes_total = arena.chunk_bytes + self.bytes_tables + self.bytes_statistics;
        let rows = self.bytes_codes + self.bytes_scales + self.bytes_window;
        let used = rows + self.bytes_tables + self.bytes_statistics;
        self.bytes_slack = self.bytes_total.saturating_sub(used);
        self.bytes_capacity = arena.capacity;
        self.pages_total = arena.pages_total;
        self.pages_free = arena.pages_free;
    }
}
