//! Any order of calls: what is answered is attention over what is kept, and what is kept was there before.

use crate::common::{Input, SEQ, policy, spec, store};
use crate::selection::policies;
use kvrs::{CodecSpec, Cpu, Dtype, KvStore, Plan, PolicySpec, Queries};
use kvrs_testkit::attention::{Head, Scoring, relative_error, tolerance};
use kvrs_testkit::{Noise, Tensor};
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;

#[derive(Debug, Clone)]
enum Op {
    Feed { tokens: usize, append: bool },
    Prompt,
    Truncate { back: usize },
    Empty,
    Keep { layer: usize, every: usize },
    Reserve { tokens: usize },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = prop_oneof![3 => 1usize..3, 3 => 3usize..40, 2 => 40usize..200];
    let op = prop_oneof![
        8 => (tokens, any::<bool>()).prop_map(|(tokens, append)| Op::Feed { tokens, append }),
        3 => Just(Op::Prompt),
        2 => (0usize..90).prop_map(|back| Op::Truncate { back }),
        1 => Just(Op::Empty),
        2 => (0usize..2, 1usize..5).prop_map(|(layer, every)| Op::Keep { layer, every }),
        1 => (0usize..60).prop_map(|tokens| Op::Reserve { tokens }),
    ];
    prop::collection::vec(op, 1..14)
}

fn any_policy() -> impl Strategy<Value = PolicySpec> {
    let all = policies(44).into_iter().chain([policy("streamingllm", &json!({"budget": 44}))]);
    prop::sample::select(all.collect::<Vec<_>>())
}

/// The store, what was fed, and what each token of each head was when it was first seen to be encoded.
struct World {
    store: KvStore<Cpu>,
    input: Input,
    length: usize,
    /// Length after the last truncation: tokens before it may have gone.
    since: usize,
    open: bool,
    kept: Vec<Vec<Vec<usize>>>,
    sealed: BTreeMap<(usize, usize, usize), Vec<u32>>,
}

impl World {
    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Feed { tokens, append } => {
                let to = (self.length + tokens).min(self.input.tokens);
                if append {
                    self.input.append(&self.store, self.length, to);
                } else {
                    self.input.extend(&self.store, self.length, to).unwrap();
                }
                self.length = to;
            }
            Op::Prompt if self.open => {
                self.store.end_prompt(&[SEQ]).unwrap();
                self.open = false;
            }
            Op::Prompt => {
                self.store.begin_prompt(&[SEQ]).unwrap();
                self.open = true;
            }
            Op::Truncate { back } => self.truncate(self.length.saturating_sub(back)),
            Op::Empty => self.truncate(0),
            Op::Keep { layer, every } => self.keep(layer, every),
            Op::Reserve { tokens } => self.store.reserve(&[SEQ], tokens).unwrap(),
        }
    }

    fn truncate(&mut self, n: usize) {
        if let Err(error) = self.store.truncate(SEQ, n) {
            assert!(error.to_string().contains("dropped tokens when there were"), "{error}");
            return;
        }
        (self.length, self.since) = (n, n);
        self.sealed.retain(|(_, _, token), _| *token < n);
    }

    fn keep(&mut self, layer: usize, every: usize) {
        let lists: Vec<Vec<i64>> = (0..2)
            .map(|head| {
                let kept = self.store.kept_positions(SEQ, layer, head).unwrap();
                kept.into_iter().filter(|p| (*p as usize).is_multiple_of(every)).collect()
            })
            .collect();
        let answer = self.store.keep(SEQ, layer, &lists);
        assert!(answer.is_ok() || self.open, "{answer:?}");
    }

    fn verify(&mut self) {
        self.store.check().unwrap();
        assert_eq!(self.store.length(SEQ, None).unwrap(), self.length);
        let kept = crate::common::kept(&self.store);
        for (layer, heads) in kept.iter().enumerate() {
            for (head, now) in heads.iter().enumerate() {
                let before = &self.kept[layer][head];
                assert!(now.iter().all(|t| *t < self.length));
                assert!(now.is_sorted_by(|a, b| a < b));
                let newest = self.length.saturating_sub(8).max(self.since)..self.length;
                assert!(now.ends_with(&newest.collect::<Vec<_>>()), "the newest eight stay");
                assert!(now.starts_with(&(0..self.length.min(3)).collect::<Vec<_>>()), "the sinks stay");
                let old = before.iter().max().map_or(0, |t| t + 1);
                assert!(now.iter().all(|t| *t >= old || before.contains(t)), "nothing comes back");
                self.verify_head(layer, head);
            }
        }
        self.kept = kept;
    }

    fn verify_head(&mut self, layer: usize, head: usize) {
        let got = self.store.decode(layer, SEQ, head).unwrap();
        let [_, k, v] = &self.input.layers[layer];
        let mut stored = Head::default();
        for (i, position) in got.positions.iter().enumerate() {
            let token = *position as usize;
            let (key, value) =
                (got.keys[i * 32..(i + 1) * 32].to_vec(), got.values[i * 32..(i + 1) * 32].to_vec());
            let (own_key, own_value) = (k.row([0, head, token]), v.row([0, head, token]));
            if key != own_key || value != own_value {
                let bits: Vec<u32> = key.iter().chain(&value).map(|x| x.to_bits()).collect();
                let then = self.sealed.entry((layer, head, token)).or_insert_with(|| bits.clone());
                assert_eq!(*then, bits, "token {token} was encoded again");
                let dot: f32 = key.iter().zip(&own_key).map(|(a, b)| a * b).sum();
                assert!(dot > 0.5 * own_key.iter().map(|x| x * x).sum::<f32>(), "token {token} is another");
            }
            stored.push(token, key, value);
        }
        self.verify_attention(layer, head, &stored);
    }

    fn verify_attention(&self, layer: usize, head: usize, stored: &Head) {
        if self.length == 0 {
            return;
        }
        let q = Tensor::normal(Dtype::F32, [1, 4, 1, 32], &mut Noise::new(self.length as u64));
        let mut out = Tensor::zeros(Dtype::F32, [1, 4, 1, 32]);
        self.store.attend(layer, &[SEQ], &Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
        for query_head in 2 * head..2 * head + 2 {
            let expected =
                stored.attend(&q.row([0, query_head, 0]), Some(self.length - 1), 32, Scoring::default());
            let error = relative_error(&out.row([0, query_head, 0]), &expected.out);
            // Digits of integer kernels.
            assert!(error <= tolerance(expected.largest) + 0.05 + 0.02 * expected.largest, "error {error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_history_leaves_a_sound_store(
        policy in any_policy(), bits in prop::sample::select(vec![0.0, 2.5, 4.0]), ops in ops(), seed in 0u64..8,
    ) {
        let codec = if bits == 0.0 { CodecSpec::raw16() } else { CodecSpec::turboquant(bits) };
        let plan = Plan::new(spec(&codec, &policy, 3, 8)).unwrap();
        let input = Input::new(&plan.spec().shape, 500, seed);
        let kept = vec![vec![Vec::new(); 2]; 2];
        let mut world = World { store: store(&plan, 1), input, length: 0, since: 0, open: false, kept, sealed: BTreeMap::new() };
        for op in &ops {
            world.apply(op);
            world.verify();
        }
        world.store.free(SEQ).unwrap();
        prop_assert_eq!(world.store.stats().unwrap().bytes_total, 0);
    }
}
