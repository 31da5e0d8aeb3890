//! Constants of codecs that layers and heads share.

use super::{Settings, SideContext, side_name};
use crate::calibrated::Array;
use crate::desc::Side;
use crate::offset::{KeyOffset, phase_table};
use crate::phasor::Phasors;
use crate::rng;
use kvrs_core::{Error, Result};
use std::collections::{BTreeSet, HashMap};
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
    taken: BTreeSet<String>,
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

    /// The calibrated array `name` of a side.
    pub(super) fn array(
        &mut self,
        settings: &Settings<'_>,
        context: &SideContext<'_>,
        name: &str,
    ) -> Result<Array> {
        let full = context.array_name(name);
        let Some(array) = context.arrays.and_then(|arrays| arrays.get(&full)) else {
            return Err(settings.uncalibrated(&full));
        };
        if self.taken.insert(full) {
            self.own_bytes += size_of_val(&*array.values);
        }
        Ok(array.clone())
    }

    /// Names of the calibrated arrays that codecs were built from.
    #[must_use]
    pub fn taken(&self) -> &BTreeSet<String> {
        &self.taken
    }

    pub(super) fn levels(&mut self, levels: Vec<i8>) -> Arc<[i8]> {
        self.levels.entry(levels).or_insert_with_key(|key| key.as_slice().into()).clone()
    }

    /// The constant of keys that are coded without their rotary embedding, and the phasors that undo and restore it.
    pub(super) fn turned_centre(
        &mut self,
        context: &SideContext<'_>,
    ) -> Result<(Centre, Option<Arc<Phasors>>)> {
        let mean = constant(context)?;
        self.own_bytes += mean.as_ref().map_or(0, |mean| size_of_val(&**mean));
        let phasors = context.rope.map(|rope| Phasors::new(rope, context.d)).transpose()?;
        self.own_bytes += phasors.as_ref().map_or(0, Phasors::bytes);
        Ok((Centre { mean, offset: None }, phasors.map(Arc::new)))
    }

    /// The key constant or the value mean of a side.
    pub(super) fn centre(&mut self, context: &SideContext<'_>) -> Result<Centre> {
        let Some(constant) = constant(context)? else { return Ok(Centre::default()) };
        if context.side == Side::Value {
            self.own_bytes += size_of_val(&*constant);
            return Ok(Centre { mean: Some(constant), offset: None });
        }
        let phasors = match context.rope {
            Some(rope) => Phasors::new(rope, context.d)?,
            None => Phasors::still(context.d),
        };
        let mut table = |turns: &[u64]| {
            self.tables.entry(turns.to_vec()).or_insert_with_key(|turns| phase_table(turns).into()).clone()
        };
        let offset = KeyOffset::with_table(&constant, &phasors, &mut table);
        self.own_bytes += offset.bytes();
        Ok(Centre { offset: (offset.base_pairs() > 0).then_some(offset), mean: None })
    }
}

/// The constant of a side, of the right length.
fn constant(context: &SideContext<'_>) -> Result<Option<Arc<[f32]>>> {
    match &context.constant {
        Some(constant) if constant.len() != context.d => {
            let what = format!("{} offset of layer {}", side_name(context.side), context.layer);
            Err(Error::plan(what, format!("{} numbers", constant.len()), context.d))
        }
        constant => Ok(constant.clone()),
    }
}
