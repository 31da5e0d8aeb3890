//! What a plan will cost, before anything is run.

use crate::compile::{LayerPlan, PACKED, RAW, scale_bytes, tile_code_bytes, token_raw_bytes};
use crate::plan::Plan;
use crate::stats::{bits_per_element, visible_elements};
use kvrs_codec::Dtype;
use kvrs_core::page::{ENTRY_BYTES, PACKED_SLOTS, RAW_SLOTS, footprint};
use kvrs_core::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes of a store; the fields mean the same as in [`crate::Stats`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Memory {
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
    /// Allocated and not used.
    pub bytes_slack: u64,
    /// Matrices and tables of the plan, not counted in the total.
    pub bytes_constants: u64,
    /// A 16-bit cache of the same tokens; sliding layers hold their window only.
    pub bytes_fp16: u64,
    /// `bytes_fp16 / bytes_total`.
    pub ratio: f64,
    /// `8 * bytes_total` over the elements of all visible tokens.
    pub bits_per_element: f64,
}

/// Tokens and pages of one head in one layer.
struct HeadCount {
    raw_tokens: u64,
    raw_pages: u64,
    packed_tokens: u64,
    packed_pages: u64,
}

impl Memory {
    pub(crate) fn of(plan: &Plan, tokens: usize, batch: usize) -> Result<Self> {
        const MOST: usize = 1 << 30;
        for (name, n) in [("tokens", tokens), ("batch", batch)] {
            if n > MOST {
                return Err(Error::argument(name, n, format!("0..={MOST}")));
            }
        }
        let compiled = plan.compiled(Dtype::F16)?;
        let mut memory = Self { bytes_constants: compiled.constant_bytes, ..Self::default() };
        let (mut pages, mut elements) = (BTreeMap::new(), 0);
        for layer in &compiled.layers {
            let kept = layer.evict.as_ref().map(|evict| evict.kept(&compiled.layers, tokens)).transpose()?;
            memory.add(layer, &HeadCount::kept(layer, tokens, kept), batch as u64, &mut pages);
            elements += visible_elements(layer, tokens) * batch as u64;
        }
        let owned: u64 = pages.values().sum();
        memory.bytes_tables = owned * ENTRY_BYTES;
        let pages: Vec<(u32, u64)> = pages.into_iter().collect();
        memory.bytes_total = footprint(&pages) + memory.bytes_tables;
        let used = memory.bytes_codes + memory.bytes_scales + memory.bytes_window + memory.bytes_tables;
        memory.bytes_slack = memory.bytes_total.saturating_sub(used);
        memory.bytes_fp16 = elements * 2;
        memory.bits_per_element = bits_per_element(memory.bytes_total, elements);
        if memory.bytes_total > 0 {
            memory.ratio = memory.bytes_fp16 as f64 / memory.bytes_total as f64;
        }
        Ok(memory)
    }

    fn add(&mut self, layer: &LayerPlan, count: &HeadCount, batch: u64, pages: &mut BTreeMap<u32, u64>) {
        let heads = layer.codec.shape.kv_heads as u64 * batch;
        self.bytes_window += heads * count.raw_tokens * token_raw_bytes(&layer.codec.shape);
        *pages.entry(layer.raw_page_bytes()).or_default() += heads * count.raw_pages;
        if count.packed_pages == 0 {
            return;
        }
        for group in 0..layer.codec.classes.len() {
            let desc = &layer.class(group, PACKED).desc;
            self.bytes_codes += batch * count.packed_tokens.div_ceil(16) * tile_code_bytes(desc);
            self.bytes_scales += batch * scale_bytes(desc, count.packed_tokens);
            *pages.entry(desc.page_bytes).or_default() += batch * count.packed_pages;
        }
    }
}

/// Bytes of a page's token indices once its tokens are gathered.
const GATHERED_BYTES: u64 = 4 * PACKED_SLOTS as u64;

/// Bytes of the pages and tables of a sequence of `length` tokens whose evicting layers keep `kept` tokens in each head.
pub(crate) fn sequence_bytes(layers: &[LayerPlan], length: usize, kept: usize) -> u64 {
    let mut pages = BTreeMap::new();
    let mut memory = Memory::default();
    for layer in layers {
        let count = match &layer.evict {
            Some(_) => HeadCount::kept(layer, usize::MAX, Some(kept)),
            None => HeadCount::of(layer, length),
        };
        memory.add(layer, &count, 1, &mut pages);
    }
    let owned: u64 = pages.values().sum();
    let rows: u64 = pages.iter().map(|(bytes, count)| u64::from(*bytes) * count).sum();
    rows + owned * (ENTRY_BYTES + GATHERED_BYTES)
}

impl HeadCount {
    /// After a prompt of `tokens` tokens of which a policy keeps `kept`.
    fn kept(layer: &LayerPlan, tokens: usize, kept: Option<usize>) -> Self {
        let Some(kept) = kept.filter(|kept| *kept < tokens) else { return Self::of(layer, tokens) };
        let (sinks, pages) =
            (layer.rule.sinks.min(kept), |tokens: usize, slots| tokens.div_ceil(slots) as u64);
        let window = layer.rule.recent.min(kept - sinks);
        let moved = kept - sinks - window;
        let raw = layer.target() == RAW;
        let gathered = if raw { (pages(moved, RAW_SLOTS), 0) } else { (0, pages(moved, PACKED_SLOTS)) };
        Self {
            raw_tokens: (sinks + window + if raw { moved } else { 0 }) as u64,
            raw_pages: pages(sinks, RAW_SLOTS) + pages(window, RAW_SLOTS) + gathered.0,
            packed_tokens: if raw { 0 } else { moved as u64 },
            packed_pages: gathered.1,
        }
    }

    fn of(layer: &LayerPlan, tokens: usize) -> Self {
        let rule = &layer.rule;
        let sinks = rule.sinks.min(tokens);
        let sealed = rule.sealed_end(rule.sinks, tokens).min(tokens).max(sinks);
        let gone = rule.first_kept(tokens);
        let zone = |from: usize, to: usize, slots: usize| {
            let first_page = gone.saturating_sub(from) / slots;
            let from = (from + first_page * slots).min(to);
            ((to - from) as u64, (to - from).div_ceil(slots) as u64)
        };
        let (sink_tokens, sink_pages) =
            if gone >= sinks && sinks > 0 && gone > 0 { (0, 0) } else { zone(0, sinks, RAW_SLOTS) };
        let (window_tokens, window_pages) = zone(sealed, tokens, RAW_SLOTS);
        let (packed_tokens, packed_pages) = zone(sinks, sealed, PACKED_SLOTS);
        if layer.target() == RAW {
            let (raw_tokens, raw_pages) = zone(sinks, sealed, RAW_SLOTS);
            return Self {
                raw_tokens: sink_tokens + raw_tokens + window_tokens,
                raw_pages: sink_pages + raw_pages + window_pages,
                packed_tokens: 0,
                packed_pages: 0,
            };
        }
        Self {
            raw_tokens: sink_tokens + window_tokens,
            raw_pages: sink_pages + window_pages,
            packed_tokens,
            packed_pages,
        }
    }
}
