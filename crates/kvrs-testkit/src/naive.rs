//! A store that keeps every token as it came, in plain vectors, with the verbs of the real one.

use crate::attention::Head;
use crate::tensor::Tensor;
use half::{bf16, f16};
use kvrs::{Dtype, LayerShape, PlanSpec, SeqId};
use kvrs_codec::offset::KeyOffset;
use kvrs_codec::phasor::Phasors;
use std::collections::{BTreeMap, BTreeSet};

/// Tokens behind a sliding window that a truncate may bring back.
const MARGIN: usize = 64;

/// One token of one head.
#[derive(Debug, Clone)]
pub struct Token {
    /// 0 .. length - 1.
    pub index: usize,
    /// Whether the real store has encoded it.
    pub sealed: bool,
    /// The key, rounded to the window's type.
    pub key: Vec<f32>,
    /// The value, rounded to the window's type.
    pub value: Vec<f32>,
}

/// One layer of a sequence.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Tokens appended.
    pub length: usize,
    /// Longest since the layer was empty.
    pub longest: usize,
    /// Where the window starts: sealed tokens lie between the sinks and here.
    pub origin: usize,
    /// Tokens of each head; those behind a sliding window stay.
    pub heads: Vec<Vec<Token>>,
}

/// One sequence.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Position of index 0.
    pub start: i64,
    /// Its layers.
    pub layers: Vec<Layer>,
}

/// The naive store.
#[derive(Debug)]
pub struct Naive {
    spec: PlanSpec,
    group: usize,
    window: Dtype,
    /// Its sequences.
    pub sequences: BTreeMap<SeqId, Sequence>,
}

impl Naive {
    /// An empty store; `group` is the number of tokens that the plan encodes together.
    #[must_use]
    pub fn new(spec: &PlanSpec, group: usize, window: Dtype) -> Self {
        Self { spec: spec.clone(), group, window, sequences: BTreeMap::new() }
    }

    /// The shape of a layer.
    #[must_use]
    pub fn shape(&self, layer: usize) -> &LayerShape {
        &self.spec.shape.layers[layer]
    }

    /// Whether a layer keeps every token 16-bit.
    #[must_use]
    pub fn raw(&self, layer: usize) -> bool {
        let codecs = [&self.spec.keys[layer], &self.spec.values[layer]];
        let short = self.shape(layer).sliding.is_some_and(|s| s <= self.spec.recent + self.group);
        short || codecs.iter().all(|c| c.name == "raw16")
    }

    /// A key and a value of a head less the plan's constants: the part of them that codecs see.
    ///
    /// # Panics
    /// If the layer's rotary embedding is not one.
    #[must_use]
    pub fn residual(&self, layer: usize, head: usize, position: i64, kv: [&[f32]; 2]) -> [Vec<f32>; 2] {
        let [mut key, mut value] = kv.map(<[f32]>::to_vec);
        let shape = self.shape(layer);
        let of_head = |offset: &Option<Vec<Option<Vec<f32>>>>, dim: usize| -> Vec<f32> {
            let all = offset.as_ref().and_then(|layers| layers[layer].as_ref());
            all.map_or_else(|| vec![0.0; dim], |all| all[head * dim..(head + 1) * dim].to_vec())
        };
        let k0 = of_head(&self.spec.key_offset, shape.key_dim);
        match &shape.rope {
            Some(rope) => {
                let phasors = Phasors::new(rope, shape.key_dim).expect("a rotary embedding");
                KeyOffset::new(&k0, &phasors).subtract(position, &mut key);
            }
            None => key.iter_mut().zip(&k0).for_each(|(x, c)| *x -= c),
        }
        let mean = of_head(&self.spec.value_offset, shape.value_dim);
        value.iter_mut().zip(&mean).for_each(|(x, c)| *x -= c);
        [key, value]
    }

    /// Adds an empty sequence whose first token will stand at position `start`.
    pub fn create(&mut self, id: SeqId, start: i64) {
        let layer = |shape: &LayerShape| Layer {
            length: 0,
            longest: 0,
            origin: self.spec.sinks,
            heads: vec![Vec::new(); shape.kv_heads],
        };
        let layers = self.spec.shape.layers.iter().map(layer).collect();
        self.sequences.insert(id, Sequence { start, layers });
    }

    /// Appends the columns of a row where `mask` is true.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn append(&mut self, layer: usize, id: SeqId, row: usize, (k, v): (&Tensor, &Tensor), mask: &[bool]) {
        let (raw, recent, sinks, group, window) =
            (self.raw(layer), self.spec.recent, self.spec.sinks, self.group, self.window);
        let state = &mut self.sequences.get_mut(&id).expect("a live sequence").layers[layer];
        for t in (0..mask.len()).filter(|t| mask[*t]) {
            for (h, head) in state.heads.iter_mut().enumerate() {
                let round = |x: Vec<f32>| x.into_iter().map(|x| rounded(window, x)).collect();
                let (key, value) = (round(k.row([row, h, t])), round(v.row([row, h, t])));
                head.push(Token { index: state.length, sealed: false, key, value });
            }
            state.length += 1;
        }
        state.longest = state.longest.max(state.length);
        if !raw {
            state.origin += state.length.saturating_sub(state.origin + recent) / group * group;
            let sealed = sinks..state.origin.max(sinks);
            let tokens = state.heads.iter_mut().flatten().filter(|t| sealed.contains(&t.index));
            tokens.for_each(|t| t.sealed = true);
        }
    }

    /// Whether the real store can go back to `n` tokens.
    #[must_use]
    pub fn can_truncate(&self, id: SeqId, n: usize) -> bool {
        let layers = self.sequences[&id].layers.iter().zip(&self.spec.shape.layers);
        layers.filter(|(state, _)| state.length > n).all(|(state, shape)| {
            let gone = |s: usize| state.longest.saturating_sub(s + MARGIN);
            n == 0 || shape.sliding.is_none_or(|s| (n + 1).saturating_sub(s) >= gone(s))
        })
    }

    /// Brings every layer to `n` tokens.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn truncate(&mut self, id: SeqId, n: usize) {
        let sinks = self.spec.sinks;
        let sequence = self.sequences.get_mut(&id).expect("a live sequence");
        for state in &mut sequence.layers {
            state.length = state.length.min(n);
            state.longest = if n == 0 { 0 } else { state.longest };
            state.origin = state.origin.min(n).max(sinks);
            state.heads.iter_mut().for_each(|head| head.retain(|t| t.index < n));
        }
    }

    /// Drops what may be dropped and is not in the lists: one ascending list of indices per head.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn keep(&mut self, id: SeqId, layer: usize, indices: &[BTreeSet<usize>]) {
        let (raw, sinks, recent) = (self.raw(layer), self.spec.sinks, self.spec.recent);
        let state = &mut self.sequences.get_mut(&id).expect("a live sequence").layers[layer];
        let end = if raw { state.length.saturating_sub(recent) } else { state.origin };
        for (head, keep) in state.heads.iter_mut().zip(indices) {
            head.retain(|t| t.index < sinks || t.index >= end || keep.contains(&t.index));
        }
    }

    /// Removes a range of tokens; length and indices stay.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn remove(&mut self, id: SeqId, range: &std::ops::Range<usize>) {
        let sequence = self.sequences.get_mut(&id).expect("a live sequence");
        let heads = sequence.layers.iter_mut().flat_map(|layer| &mut layer.heads);
        heads.for_each(|head| head.retain(|token| !range.contains(&token.index)));
    }

    /// What a head holds, as it came.
    #[must_use]
    pub fn head(&self, id: SeqId, layer: usize, head: usize) -> Head {
        let mut out = Head::default();
        for token in &self.sequences[&id].layers[layer].heads[head] {
            out.push(token.index, token.key.clone(), token.value.clone());
        }
        out
    }
}

/// `x` rounded to a type, as f32.
fn rounded(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}
