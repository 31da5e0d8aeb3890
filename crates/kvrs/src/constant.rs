//! Notices keys whose energy is mostly one constant, which encoding without an offset would waste its bits on.
//!
//! Keys with a projection bias are `R(pos) (k0 + delta)`: normalising and rotating then spends the codes on
//! `k0`. The first 128 sealed tokens of each head are turned back by their positions and averaged, once a store.

use crate::compile::{LayerPlan, PACKED, RAW, RAW_CODEC};
use crate::plan::Plan;
use crate::store::KvStore;
use kvrs_codec::Side;
use kvrs_codec::backend::Backend;
use kvrs_codec::phasor::Phasors;
use kvrs_core::page::Table;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tokens that are looked at.
pub(crate) const TOKENS: usize = 128;
/// Share of the energy in a constant above which a warning is given.
const SHARE: f64 = 0.9;

/// One head's running mean of keys turned back to position 0.
#[derive(Debug, Default)]
struct Mean {
    sum: Vec<f64>,
    energy: f64,
    tokens: usize,
}

/// Which heads are still to be looked at.
#[derive(Debug)]
pub(crate) struct ConstantWatch {
    heads: Vec<Vec<Mutex<Mean>>>,
    waiting: AtomicUsize,
}

impl ConstantWatch {
    pub(crate) fn new(plan: &Plan) -> Self {
        let spec = plan.spec();
        let watched = |i: usize| {
            let offset = spec.key_offset.as_ref().is_some_and(|o| o[i].is_some());
            spec.keys[i].name != RAW_CODEC && !offset
        };
        let heads = |i: usize| if watched(i) { spec.shape.layers[i].kv_heads } else { 0 };
        let heads: Vec<Vec<_>> =
            (0..spec.keys.len()).map(|i| (0..heads(i)).map(|_| Mutex::default()).collect()).collect();
        let waiting = AtomicUsize::new(heads.iter().map(Vec::len).sum());
        Self { heads, waiting }
    }

    /// Looks at a group of a table's window, counted from the oldest, which is about to be sealed.
    pub(crate) fn look<B: Backend>(
        &self,
        store: &KvStore<B>,
        plan: &LayerPlan,
        (layer, head): (usize, usize),
        (table, group): (&Table<B::Chunk>, usize),
        start: i64,
    ) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let Some(Ok(mut mean)) = self.heads[layer].get(head).map(Mutex::lock) else { return };
        if mean.tokens >= TOKENS {
            return;
        }
        let shape = &plan.codec.shape;
        let back = shape.rope.as_ref().and_then(|rope| Phasors::new(rope, shape.key_dim).ok());
        let mut keys = Vec::new();
        let pages = plan.rule.group / kvrs_core::page::RAW_SLOTS;
        for entry in table.window().iter().skip(group * pages).take(pages) {
            store.backend.decode_live(plan.class(head, RAW), entry, start, (Side::Key, 0), &mut keys);
            for (k, (_, index)) in keys.chunks_exact_mut(shape.key_dim).zip(entry.live_slots()) {
                if let Some(back) = &back {
                    back.rotate(-(start + index as i64), k);
                }
                mean.add(k);
            }
        }
        if mean.tokens >= TOKENS {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            if let (true, Ok(mut warnings)) = (mean.share() > SHARE, store.warnings.lock()) {
                warnings.push(warning(layer, head, mean.share(), plan.class(head, PACKED).desc.key.n));
            }
        }
    }
}

impl Mean {
    fn add(&mut self, k: &[f32]) {
        self.sum.resize(k.len(), 0.0);
        self.sum.iter_mut().zip(k).for_each(|(s, x)| *s += f64::from(*x));
        self.energy += k.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        self.tokens += 1;
    }

    /// Share of the energy that lies in the mean.
    fn share(&self) -> f64 {
        let constant: f64 = self.sum.iter().map(|s| s * s).sum::<f64>() / self.tokens as f64;
        if self.energy > 0.0 { constant / self.energy } else { 0.0 }
    }
}

fn warning(layer: usize, head: usize, share: f64, channels: u32) -> String {
    format!(
        "layer {layer}, head {head}: {:.1} % of the energy of the keys lies in one constant ({channels} channels); \
         encoding spends its bits on it and generation may break. Give the plan a key_offset \
         (Plan.for_model(model, ...) takes the projection bias)",
        share * 100.0
    )
}
