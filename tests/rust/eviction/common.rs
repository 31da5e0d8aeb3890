//! One input fed in any pieces, and what a policy keeps of it by the definition.

use kvrs::policy::{Facts, Fold, History, Queries as Which, Reduce, Scissorhands, When, droppable, select};
use kvrs::{
    CodecSpec, Cpu, Dtype, KvStore, LayerShape, ModelShape, Plan, PlanSpec, PolicySpec, Queries, Rope, SeqId,
    Tokens,
};
use kvrs_testkit::pair::threads;
use kvrs_testkit::{Noise, Tensor};
use serde_json::{Value, json};

pub(crate) const SEQ: SeqId = SeqId(0);

/// Layers of full attention with two key-value heads.
pub(crate) fn shape(layers: usize) -> ModelShape {
    let layer = LayerShape {
        query_heads: 4,
        kv_heads: 2,
        key_dim: 32,
        value_dim: 32,
        rope: Some(Rope::new(1e4)),
        sliding: None,
    };
    ModelShape::uniform(layers, layer)
}

/// A policy by its name and settings.
pub(crate) fn policy(name: &str, params: &Value) -> PolicySpec {
    serde_json::from_value(json!({"name": name, "params": params})).unwrap()
}

/// A plan with one codec and one policy in every layer.
pub(crate) fn spec(codec: &CodecSpec, policy: &PolicySpec, sinks: usize, recent: usize) -> PlanSpec {
    let shape = shape(2);
    PlanSpec {
        sinks,
        recent,
        evict: vec![Some(policy.clone()); shape.layers.len()],
        ..PlanSpec::uniform(shape, codec.clone(), codec.clone())
    }
}

/// Queries, keys and values of every layer.
pub(crate) struct Input {
    pub(crate) layers: Vec<[Tensor; 3]>,
    pub(crate) tokens: usize,
}

impl Input {
    /// Random tokens of a shape; queries are long, so that attention is uneven.
    pub(crate) fn new(shape: &ModelShape, tokens: usize, seed: u64) -> Self {
        let mut noise = Noise::new(seed);
        let mut random = |heads, dim, size: f32| {
            let values: Vec<f32> = (0..heads * tokens * dim).map(|_| size * noise.normal()).collect();
            Tensor::new(Dtype::F16, [1, heads, tokens, dim], &values)
        };
        let layers = shape.layers.iter().map(|l| {
            [
                random(l.query_heads, l.key_dim, 2.0),
                random(l.kv_heads, l.key_dim, 1.0),
                random(l.kv_heads, l.value_dim, 1.0),
            ]
        });
        Self { layers: layers.collect(), tokens }
    }

    /// Extends every layer of sequence 0 by the columns.
    pub(crate) fn extend(&self, store: &KvStore<Cpu>, from: usize, to: usize) -> kvrs::Result<Vec<Tensor>> {
        let one = |(layer, x): (usize, &[Tensor; 3])| {
            let [q, k, v] = [0, 1, 2].map(|i| x[i].columns(from, to));
            let mut out = Tensor::zeros(Dtype::F32, [1, q.shape()[1], to - from, v.shape()[3]]);
            let (queries, tokens) = (Queries::new(q.view()), Tokens::new(k.view(), v.view()));
            store.extend(layer, &[SEQ], &queries, &tokens, &mut out.view_mut(), None).map(|()| out)
        };
        self.layers.iter().enumerate().map(one).collect()
    }

    /// Appends the columns to every layer, with their queries.
    pub(crate) fn append(&self, store: &KvStore<Cpu>, from: usize, to: usize) {
        for (layer, x) in self.layers.iter().enumerate() {
            let [q, k, v] = [0, 1, 2].map(|i| x[i].columns(from, to));
            let tokens = Tokens::new(k.view(), v.view());
            store.append_with(layer, &[SEQ], &tokens, &Queries::new(q.view())).unwrap();
        }
    }

    /// A prompt of `prompt` tokens in one call, then one token after the other up to `tokens`.
    pub(crate) fn run(&self, store: &KvStore<Cpu>, prompt: usize, tokens: usize) {
        self.extend(store, 0, prompt).unwrap();
        (prompt..tokens).for_each(|t| drop(self.extend(store, t, t + 1).unwrap()));
        store.check().unwrap();
    }

    /// A prompt in pieces.
    pub(crate) fn prompt(&self, store: &KvStore<Cpu>, cuts: &[usize], prompt: usize) {
        store.begin_prompt(&[SEQ]).unwrap();
        let mut from = 0;
        for to in cuts.iter().copied().filter(|cut| *cut < prompt).chain([prompt]) {
            self.extend(store, from, to).unwrap();
            from = to;
        }
        store.end_prompt(&[SEQ]).unwrap();
        store.check().unwrap();
    }
}

/// A store with one sequence.
pub(crate) fn store(plan: &Plan, n: usize) -> KvStore<Cpu> {
    let store = KvStore::new(plan.clone(), threads(n), None).unwrap();
    assert_eq!(store.create(1).unwrap(), [SEQ]);
    store
}

/// Positions that each head of each layer keeps.
pub(crate) fn kept(store: &KvStore<Cpu>) -> Vec<Vec<Vec<usize>>> {
    let layers = store.plan().spec().shape.layers.iter().enumerate();
    let head = |layer, head| {
        let positions = store.kept_positions(SEQ, layer, head).unwrap();
        positions.into_iter().map(|p| usize::try_from(p).unwrap()).collect()
    };
    layers.map(|(l, shape)| (0..shape.kv_heads).map(|h| head(l, h)).collect()).collect()
}

/// One head by the definition.
struct Head {
    tokens: Vec<usize>,
    attention: Vec<f32>,
    history: Option<History>,
}

/// A layer of a plan by the definition: attention in f64 on the numbers as they came.
pub(crate) struct Reference<'a> {
    pub(crate) spec: &'a PlanSpec,
    pub(crate) input: &'a Input,
    pub(crate) layer: usize,
    pub(crate) group: usize,
}

impl Reference<'_> {
    fn policy(&self) -> &PolicySpec {
        self.spec.evict[self.layer].as_ref().unwrap()
    }

    /// Probabilities of query `at` over `tokens`, reduced over the query group.
    fn attention(&self, head: usize, tokens: &[usize], at: usize, reduce: Reduce) -> Vec<f64> {
        let [q, k, _] = &self.input.layers[self.layer];
        let group = q.shape()[1] / k.shape()[1];
        let scale = (k.shape()[3] as f64).sqrt().recip();
        let mut all = vec![0.0f64; tokens.len()];
        for query_head in head * group..(head + 1) * group {
            let query = q.row([0, query_head, at]);
            let score = |t: &usize| {
                let key = k.row([0, head, *t]);
                query.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale
            };
            let weights: Vec<f64> = tokens.iter().map(|t| score(t).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (all, weight) in all.iter_mut().zip(weights) {
                let share = weight / total;
                *all = if reduce == Reduce::Max { all.max(share) } else { *all + share };
            }
        }
        if reduce == Reduce::Mean {
            for x in &mut all {
                *x /= group as f64;
            }
        }
        all
    }

    /// Takes in query `at`, which sees `tokens` (the first of the head's).
    fn observe(&self, head: usize, state: &mut Head, at: usize) {
        let Some(asked) = self.policy().needs().attention else { return };
        let seen = state.tokens.partition_point(|t| *t <= at);
        let shares = self.attention(head, &state.tokens[..seen], at, asked.reduce);
        state.attention.resize(state.tokens.len(), 0.0);
        match asked.fold {
            Fold::Sum => state.attention.iter_mut().zip(&shares).for_each(|(a, s)| *a += *s as f32),
            Fold::Last => state.attention.iter_mut().zip(&shares).for_each(|(a, s)| *a = *s as f32),
            Fold::Above => {
                let Which::Last(n) = asked.queries else { unreachable!() };
                let history = state.history.get_or_insert_with(|| History::new(n));
                history.push(state.tokens.len() - history.len());
                let above: Vec<f32> =
                    shares.iter().map(|s| f32::from(u8::from(*s > 1.0 / seen as f64))).collect();
                history.add(1, &above);
                state.attention = history.totals();
            }
        }
    }

    fn scores(&self, head: usize, state: &Head, prefix: usize) -> Vec<f32> {
        let [_, k, v] = &self.input.layers[self.layer];
        let norm = |x: Vec<f32>| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
        let needs = self.policy().needs();
        let norms: Vec<f32> = if needs.key_norms {
            state.tokens.iter().map(|t| norm(k.row([0, head, *t]))).collect()
        } else {
            Vec::new()
        };
        let facts = Facts {
            layer: self.layer,
            head,
            tokens: &state.tokens,
            prefix,
            attention: &state.attention,
            key_norms: &norms,
            distances: &[],
        };
        let mut distances = Vec::new();
        if needs.distances.is_some() {
            let weights = self.policy().weights(&facts);
            let values: Vec<Vec<f32>> = state.tokens.iter().map(|t| v.row([0, head, *t])).collect();
            let centre: Vec<f64> = (0..v.shape()[3])
                .map(|c| weights.iter().zip(&values).map(|(w, v)| f64::from(*w) * f64::from(v[c])).sum())
                .collect();
            let distance = |v: &Vec<f32>| {
                centre.iter().zip(v).map(|(c, v)| (c - f64::from(*v)).powi(2)).sum::<f64>().sqrt() as f32
            };
            distances = values.iter().map(distance).collect();
        }
        self.policy().scores(&Facts { distances: &distances, ..facts })
    }

    /// What each head keeps after a prompt of `prompt` tokens and single ones up to `tokens`.
    pub(crate) fn kept(&self, prompt: usize, tokens: usize) -> Vec<Vec<usize>> {
        let budget = self.policy().budget().unwrap();
        let least = self.policy().least_budget(self.spec.sinks, self.spec.recent);
        let budget = budget.resolve("budget", prompt, least, |_| unreachable!()).unwrap();
        let recent = self.policy().recent(budget, self.spec.recent);
        let heads = self.input.layers[self.layer][1].shape()[1];
        let mut states: Vec<Head> = Vec::new();
        for head in 0..heads {
            let mut state =
                Head { tokens: (0..prompt).collect(), attention: vec![0.0; prompt], history: None };
            self.watch_prompt(head, &mut state, prompt);
            states.push(state);
        }
        let all = states[0].tokens.len() <= budget;
        self.end(&mut states, budget, recent, prompt);
        let mut origin = if all {
            self.spec.sinks
                + prompt.saturating_sub(self.spec.sinks + self.spec.recent) / self.group * self.group
        } else {
            prompt.saturating_sub(self.spec.recent)
        };
        for t in prompt..tokens {
            let acts = self.policy().when() != When::PromptEnd;
            for (head, state) in states.iter_mut().enumerate() {
                state.tokens.push(t);
                if acts {
                    self.observe(head, state, t);
                }
                if t + 1 == origin + self.spec.recent + self.group && acts {
                    self.group_left(head, state, budget, recent, t + 1);
                }
            }
            if t + 1 == origin + self.spec.recent + self.group {
                origin += self.group;
            }
        }
        states.into_iter().map(|state| state.tokens).collect()
    }

    fn watch_prompt(&self, head: usize, state: &mut Head, prompt: usize) {
        let first = match self.policy().needs().attention {
            None => return,
            Some(a) if a.fold == Fold::Above => 0,
            Some(a) => match a.queries {
                Which::All => 0,
                Which::Last(n) => prompt.saturating_sub(n),
            },
        };
        (first..prompt).for_each(|at| self.observe(head, state, at));
    }

    fn end(&self, states: &mut [Head], budget: usize, recent: usize, length: usize) {
        let ranges: Vec<_> =
            states.iter().map(|s| droppable(&s.tokens, length, self.spec.sinks, recent)).collect();
        let scores: Vec<Vec<f32>> = states
            .iter()
            .enumerate()
            .map(|(head, state)| self.scores(head, state, ranges[head].end))
            .collect();
        let picks = budget - self.spec.sinks - recent;
        let layers = self.spec.evict.len();
        let picks = self.policy().sharing().layers(picks, layers, ranges[0].len()).unwrap()[self.layer];
        let heads: Vec<_> = scores
            .iter()
            .zip(&ranges)
            .zip(states.iter())
            .map(|((scores, droppable), state)| kvrs::budget::Head {
                scores,
                attention: &state.attention,
                droppable,
            })
            .collect();
        let kept = self.policy().sharing().select(&heads, picks);
        states.iter_mut().zip(kept).for_each(|(state, kept)| state.keep(&kept));
    }

    fn group_left(&self, head: usize, state: &mut Head, budget: usize, recent: usize, length: usize) {
        let n = state.tokens.len();
        if n <= budget {
            return;
        }
        let range = droppable(&state.tokens, length, self.spec.sinks, recent);
        let left =
            if self.policy().when() == When::Batches { n - Scissorhands::batch(budget) } else { budget };
        let scores = self.scores(head, state, range.end);
        let outside = n - range.len();
        let kept = select(&scores, range, left.min(budget).saturating_sub(outside));
        state.keep(&kept);
    }
}

impl Head {
    fn keep(&mut self, kept: &[usize]) {
        let known = self.attention.len() == self.tokens.len();
        self.tokens = kept.iter().map(|i| self.tokens[*i]).collect();
        if known {
            self.attention = kept.iter().map(|i| self.attention[*i]).collect();
        }
        if let Some(history) = &mut self.history {
            history.keep(kept);
        }
    }
}
