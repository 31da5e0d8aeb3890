//! The real store and the naive one side by side: the same calls to both, and every answer compared.

use crate::attention::{Head, Scoring, relative_error, tolerance};
use crate::naive::{Naive, Token};
use crate::tensor::{Noise, Tensor};
use kvrs::{Cpu, Decoded, Dtype, Isa, KvStore, Plan, Queries, SeqId, Tokens};
use kvrs_codec::backend::Backend;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Sequence, layer, head and index.
type Place = (SeqId, usize, usize, usize);

/// Both stores.
#[derive(Debug)]
pub struct Pair<B: Backend = Cpu> {
    /// The store under test.
    pub store: KvStore<B>,
    /// What it ought to hold.
    pub naive: Naive,
    /// What each sealed token decoded to at first: it never changes again.
    pub(crate) sealed: BTreeMap<Place, (Vec<f32>, Vec<f32>)>,
    /// Snapshots that are alive: all but one of its handles.
    pub(crate) frozen: Arc<()>,
    noise: Noise,
    rounding: Rounding,
}

/// What a backend's attention makes of queries and weights where keys and values are codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// They stay f32.
    F32,
    /// They become integer digits.
    Digits,
}

impl Rounding {
    fn of(isa: Isa) -> Self {
        if isa == Isa::Scalar { Self::F32 } else { Self::Digits }
    }

    /// What rounding may add to [`tolerance`]: an error of 2 % in the scores, and some more.
    fn allowed(self, largest_logit: f64) -> f64 {
        if self == Self::F32 { 0.0 } else { 0.05 + 0.02 * largest_logit }
    }
}

/// One step of a model: `tokens` columns for each sequence in every layer.
#[derive(Debug, Clone)]
pub struct Step {
    /// The rows.
    pub seqs: Vec<SeqId>,
    /// Columns.
    pub tokens: usize,
    /// `[rows * tokens]`: `false` is padding.
    pub mask: Vec<bool>,
    /// `extend` instead of `append`.
    pub extend: bool,
}

impl Pair {
    /// Two empty stores for one plan; seeds choose the numbers and, by turns, the instruction set.
    ///
    /// # Panics
    /// If the store cannot be made.
    #[must_use]
    pub fn new(plan: &Plan, capacity: Option<u64>, seed: u64) -> Self {
        Self::on(plan, capacity, seed, |cpu| cpu)
    }
}

impl<B: Backend> Pair<B> {
    /// As [`Pair::new`], on the backend that `wrap` makes of the CPU.
    ///
    /// # Panics
    /// If the store cannot be made.
    #[must_use]
    pub fn on(plan: &Plan, capacity: Option<u64>, seed: u64, wrap: impl FnOnce(Cpu) -> B) -> Self {
        let isas: Vec<Isa> = Isa::available().collect();
        let isa = isas[(seed % isas.len() as u64) as usize];
        let cpu = Cpu::new(None).and_then(|cpu| cpu.with_isa(isa)).expect("an instruction set of this CPU");
        Self::with(plan, capacity, seed, wrap(cpu), Rounding::of(isa))
    }

    /// As [`Pair::new`], on any backend, of which `rounding` says what to expect.
    ///
    /// # Panics
    /// If the store cannot be made.
    #[must_use]
    pub fn with(plan: &Plan, capacity: Option<u64>, seed: u64, backend: B, rounding: Rounding) -> Self {
        let store = KvStore::new(plan.clone(), Arc::new(backend), capacity).expect("a store");
        let naive = Naive::new(plan.spec(), plan.describe()[0].group, Dtype::F16);
        let (sealed, frozen, noise) = (BTreeMap::new(), Arc::new(()), Noise::new(seed));
        Self { store, naive, sealed, frozen, noise, rounding }
    }

    /// A new sequence in both, whose first token stands at position `start`.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn create(&mut self, start: i64) -> SeqId {
        let id = self.store.create(1).expect("one more sequence")[0];
        self.naive.create(id, start);
        id
    }

    /// Feeds random tokens to every layer of both, with rubbish where the mask is false.
    ///
    /// # Errors
    /// What the store answered; the naive store then did not change for that layer and the later ones.
    pub fn step(&mut self, step: &Step) -> kvrs::Result<()> {
        for layer in 0..self.store.plan().spec().shape.layers.len() {
            let shape = self.naive.shape(layer).clone();
            let mut random = |heads, dim| {
                Tensor::normal(Dtype::F32, [step.seqs.len(), heads, step.tokens, dim], &mut self.noise)
            };
            let q = random(shape.query_heads, shape.key_dim);
            let mut k = random(shape.kv_heads, shape.key_dim);
            let mut v = random(shape.kv_heads, shape.value_dim);
            spoil(&mut k, &step.mask);
            spoil(&mut v, &step.mask);
            let positions = self.positions(layer, step);
            let tokens =
                Tokens { k: k.view(), v: v.view(), mask: Some(&step.mask), positions: Some(&positions) };
            if step.extend {
                self.extend(layer, step, &q, &tokens, (&k, &v))?;
            } else {
                self.store.append(layer, &step.seqs, &tokens)?;
            }
            for (row, &id) in step.seqs.iter().enumerate() {
                let mask = &step.mask[row * step.tokens..(row + 1) * step.tokens];
                self.naive.append(layer, id, row, (&k, &v), mask);
            }
        }
        Ok(())
    }

    /// The positions of a step's tokens; anything at padding.
    fn positions(&self, layer: usize, step: &Step) -> Vec<i64> {
        let row = |(row, id): (usize, &SeqId)| {
            let sequence = &self.naive.sequences[id];
            let mut next = sequence.start + sequence.layers[layer].length as i64;
            let mask = step.mask[row * step.tokens..(row + 1) * step.tokens].to_vec();
            mask.into_iter().map(move |token| {
                next += i64::from(token);
                if token { next - 1 } else { -7 }
            })
        };
        step.seqs.iter().enumerate().flat_map(row).collect()
    }

    fn extend(
        &self,
        layer: usize,
        step: &Step,
        q: &Tensor,
        tokens: &Tokens<'_>,
        kv: (&Tensor, &Tensor),
    ) -> kvrs::Result<()> {
        let shape = self.naive.shape(layer);
        let past: Vec<Vec<Head>> = step.seqs.iter().map(|&id| self.heads(id, layer)).collect();
        let [rows, heads, columns, _] = q.shape();
        let mut out = Tensor::zeros(Dtype::F32, [rows, heads, columns, shape.value_dim]);
        self.store.extend(layer, &step.seqs, &Queries::new(q.view()), tokens, &mut out.view_mut(), None)?;
        for (row, past) in past.into_iter().enumerate() {
            let length = self.naive.sequences[&step.seqs[row]].layers[layer].length;
            let mask = &step.mask[row * columns..(row + 1) * columns];
            for (h, mut head) in past.into_iter().enumerate() {
                for (r, t) in (0..columns).filter(|t| mask[*t]).enumerate() {
                    head.push(length + r, kv.0.row([row, h, t]), kv.1.row([row, h, t]));
                }
                for query_head in h * shape.group()..(h + 1) * shape.group() {
                    check_row(self.rounding, &head, mask, length, shape.sliding, |t| {
                        (q.row([row, query_head, t]), out.row([row, query_head, t]))
                    });
                }
            }
        }
        Ok(())
    }

    /// Truncates both, or checks that the store refuses what cannot be exact.
    ///
    /// # Panics
    /// If the store truncates what it should refuse, or the other way round.
    pub fn truncate(&mut self, id: SeqId, n: usize) {
        let answer = self.store.truncate(id, n);
        assert_eq!(answer.is_ok(), self.naive.can_truncate(id, n), "truncate to {n}: {answer:?}");
        if answer.is_ok() {
            self.naive.truncate(id, n);
            self.sealed.retain(|place, _| place.0 != id || place.3 < n);
        }
    }

    /// Keeps one token of `every` in a layer, other ones in each head.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn keep(&mut self, id: SeqId, layer: usize, every: usize) {
        let start = self.naive.sequences[&id].start;
        let mut lists = Vec::new();
        for head in 0..self.naive.shape(layer).kv_heads {
            let kept = self.store.kept_positions(id, layer, head).expect("positions");
            lists.push(
                kept.into_iter().filter(|p| (*p as usize + head).is_multiple_of(every)).collect::<Vec<_>>(),
            );
        }
        self.store.keep(id, layer, &lists).expect("positions that are kept");
        let indices: Vec<BTreeSet<usize>> =
            lists.iter().map(|l| l.iter().map(|p| (p - start) as usize).collect()).collect();
        self.naive.keep(id, layer, &indices);
    }

    /// Frees a sequence in both; its id is dead from then on.
    ///
    /// # Panics
    /// If the store refuses, or takes the id once more.
    pub fn free(&mut self, id: SeqId) {
        self.store.free(id).expect("a live sequence");
        assert!(self.store.free(id).is_err() && self.store.length(id, None).is_err(), "{id} is freed");
        self.naive.sequences.remove(&id);
        self.sealed.retain(|place, _| place.0 != id);
    }

    /// Compares everything that can be asked.
    ///
    /// # Panics
    /// If the stores differ.
    pub fn verify(&mut self) {
        self.store.check().expect("sound pages and tables");
        let ids: Vec<SeqId> = self.naive.sequences.keys().copied().collect();
        for id in ids {
            self.verify_sequence(id);
        }
        let stats = self.store.stats().expect("stats");
        assert!(stats.bytes_capacity.is_none_or(|capacity| stats.bytes_total <= capacity), "{stats:?}");
        let held = !self.naive.sequences.is_empty() || Arc::strong_count(&self.frozen) > 1;
        assert!(held || stats.bytes_total == 0, "all freed: {stats:?}");
    }

    /// Compares everything that can be asked of one sequence.
    ///
    /// # Panics
    /// If the stores differ.
    pub fn verify_sequence(&mut self, id: SeqId) {
        let lengths: Vec<usize> = self.naive.sequences[&id].layers.iter().map(|l| l.length).collect();
        assert_eq!(
            self.store.length(id, None).expect("a length"),
            lengths.iter().copied().min().unwrap_or(0)
        );
        for (layer, &length) in lengths.iter().enumerate() {
            assert_eq!(self.store.length(id, Some(layer)).expect("a length"), length);
            for head in 0..self.naive.shape(layer).kv_heads {
                self.verify_head(id, layer, head);
            }
            self.verify_attention(id, layer, length);
        }
    }

    fn decoded(&self, id: SeqId, layer: usize, head: usize) -> Decoded {
        self.store.decode(layer, id, head).expect("a head")
    }

    /// The heads of a layer as the store decodes them.
    fn heads(&self, id: SeqId, layer: usize) -> Vec<Head> {
        let start = self.naive.sequences[&id].start;
        let head = |h| {
            let decoded = self.decoded(id, layer, h);
            let rows = decoded.keys.chunks(decoded.key_dim).zip(decoded.values.chunks(decoded.value_dim));
            let mut head = Head::default();
            for (position, (k, v)) in decoded.positions.iter().zip(rows) {
                head.push((position - start) as usize, k.to_vec(), v.to_vec());
            }
            head
        };
        (0..self.naive.shape(layer).kv_heads).map(head).collect()
    }

    fn verify_head(&mut self, id: SeqId, layer: usize, head: usize) {
        let got = self.heads(id, layer).swap_remove(head);
        let sequence = &self.naive.sequences[&id];
        let positions = self.store.kept_positions(id, layer, head).expect("positions");
        assert_eq!(positions, got.indices.iter().map(|i| sequence.start + *i as i64).collect::<Vec<_>>());
        let expected = &sequence.layers[layer].heads[head];
        let sliding = self.naive.shape(layer).sliding;
        let first = sliding.map_or(0, |s| (sequence.layers[layer].length + 1).saturating_sub(s));
        let present: BTreeSet<usize> = got.indices.iter().copied().collect();
        for token in expected.iter().filter(|t| t.index >= first) {
            assert!(present.contains(&token.index), "layer {layer}, head {head} lost token {}", token.index);
        }
        let by_index: BTreeMap<usize, &Token> = expected.iter().map(|t| (t.index, t)).collect();
        for ((index, k), v) in got.indices.iter().zip(&got.keys).zip(&got.values) {
            let token = by_index.get(index).unwrap_or_else(|| panic!("token {index} ought to be gone"));
            if token.sealed {
                let place = (id, layer, head, *index);
                let then = self.sealed.entry(place).or_insert_with(|| (k.clone(), v.clone()));
                assert_eq!((&then.0, &then.1), (k, v), "{place:?} was encoded again");
                let residual = |kv| self.naive.residual(layer, head, sequence.start + *index as i64, kv);
                let [got, given] = [residual([k, v]), residual([&token.key, &token.value])];
                for (got, given) in got.iter().zip(&given) {
                    let cosine = cosine(got, given);
                    assert!(cosine > 0.6, "{place:?} is another token: cosine {cosine}");
                }
            } else {
                assert_eq!((k, v), (&token.key, &token.value), "16-bit token {index} of layer {layer}");
            }
        }
    }

    fn verify_attention(&mut self, id: SeqId, layer: usize, length: usize) {
        let shape = self.naive.shape(layer).clone();
        let count = length.min(3);
        let q = Tensor::normal(Dtype::F32, [1, shape.query_heads, count, shape.key_dim], &mut self.noise);
        let mut out = Tensor::zeros(Dtype::F32, [1, shape.query_heads, count, shape.value_dim]);
        let queries = Queries::new(q.view());
        self.store.attend(layer, &[id], &queries, &mut out.view_mut(), None).expect("an answer");
        for (h, head) in self.heads(id, layer).iter().enumerate() {
            for query_head in h * shape.group()..(h + 1) * shape.group() {
                check_row(self.rounding, head, &vec![true; count], length - count, shape.sliding, |t| {
                    (q.row([0, query_head, t]), out.row([0, query_head, t]))
                });
            }
        }
    }
}

/// Compares the outputs of a row's queries, the first of which stands at index `first`.
fn check_row(
    rounding: Rounding,
    head: &Head,
    mask: &[bool],
    first: usize,
    sliding: Option<usize>,
    row: impl Fn(usize) -> (Vec<f32>, Vec<f32>),
) {
    let mut at = first;
    for (t, token) in mask.iter().enumerate() {
        let (query, got) = row(t);
        if !token {
            assert!(got.iter().all(|x| *x == 0.0), "padding gives zeros");
            continue;
        }
        let scoring = Scoring { sliding, ..Scoring::default() };
        let expected = head.attend(&query, Some(at), got.len(), scoring);
        let error = relative_error(&got, &expected.out);
        let allowed = tolerance(expected.largest) + rounding.allowed(expected.largest);
        assert!(error <= allowed, "query at {at}, {rounding:?}: error {error:e} > {allowed:e}");
        at += 1;
    }
}

/// Puts numbers where there is no token, which no result may depend on.
fn spoil(x: &mut Tensor, mask: &[bool]) {
    let [rows, heads, columns, dim] = x.shape();
    for (i, _) in mask.iter().enumerate().filter(|(_, token)| !**token) {
        let rubbish = vec![if i % 2 == 0 { f32::NAN } else { 1e30 }; dim];
        assert!(i < rows * columns, "one flag per row and column");
        (0..heads).for_each(|h| x.set_row([i / columns, h, i % columns], &rubbish));
    }
}

/// Cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// A backend with threads of its own.
///
/// # Panics
/// If they cannot be started.
#[must_use]
pub fn threads(n: usize) -> Arc<Cpu> {
    Arc::new(Cpu::new(Some(n)).expect("threads"))
}
