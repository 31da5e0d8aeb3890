//! Constants of codecs that layers and heads share.

use super::{SideContext, side_name};
use crate::desc::Side;
use crate::offset::{KeyOffset, phase_table};
use crate::phasor::Phasors;
use crate::rng;
use kvrs_core::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// The constant that a side loses before it is encoded: a stage that works with every codec.
#[derive(Debug, Default)]
pub(super) struct Centre {
    pub(super) offset: Option<KeyOffset>,
    pub(super) mean: Option<Arc<[f32]>>,
}

impl Centre {
    pub(super) fn base_pairs(&self) -> usize {
        self.offset.as_ref().map_or(0, KeyOffset::base_pairs)
    }
}

/// Constants that layers and heads share.
#[derive(Debug, Default)]
pub struct ConstantCache {
    floats: HashMap<(u64, u64, Side, usize), Arc<[f32]>>,
    levels: HashMap<Vec<i8>, Arc<[i8]>>,
    tables: HashMap<Vec<u64>, Arc<[f32]>>,
    own_bytes: usize,
}

impl ConstantCache {
    /// Bytes of everything that was built through this cache.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let floats = self.floats.values().chain(self.tables.values()).map(|c| size_of_val(&**c));
        (floats.sum::<usize>() + self.levels.keys().map(Vec::len).sum::<usize>() + self.own_bytes) as u64
    }

    /// The constant of a random stream, made once.
    pub(super) fn floats(
        &mut self,
        purpose: u64,
        context: &SideContext<'_>,
        make: impl FnOnce(u64) -> Vec<f32>,
    ) -> Arc<[f32]> {
        let SideContext { seed, side, d, .. } = *context;
        let values = || make(rng::stream(seed, purpose, side, d)).into();
        self.floats.entry((seed, purpose, side, d)).or_insert_with(values).clone()
    }

    pub(super) fn levels(&mut self, levels: Vec<i8>) -> Arc<[i8]> {
        self.levels.entry(levels).or_insert_with_key(|key| key.as_slice().into()).clone()
    }

    /// The key constant or the value mean of a side.
    pub(super) fn centre(&mut self, context: &SideContext<'_>) -> Result<Centre> {
        let Some(constant) = &context.constant else { return Ok(Centre::default()) };
        if constant.len() != context.d {
            let what = format!("{} offset of layer {}", side_name(context.side), context.layer);
            return Err(Error::plan(what, format!("{} numbers", constant.len()), context.d));
        }
        if context.side == Side::Value {
            self.own_bytes += size_of_val(&**constant);
            return Ok(Centre { mean: Some(constant.clone()), offset: None });
        }
        let phasors = match context.rope {
            Some(rope) => Phasors::new(rope, context.d)?,
            None => Phasors::still(context.d),
        };
        let mut table = |turns: &[u64]| {
            self.tables.entry(turns.to_vec()).or_insert_with_key(|turns| phase_table(turns).into()).clone()
        };
        let offset = KeyOffset::with_table(constant, &phasors, &mut table);
        self.own_bytes += offset.bytes();
        Ok(Centre { offset: (offset.base_pairs() > 0).then_some(offset), mean: None })
    }
}
