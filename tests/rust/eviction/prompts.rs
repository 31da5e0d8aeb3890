//! The frame of a prompt: pieces, threads, what waits, and outputs while nothing has gone.

use crate::common::{Input, SEQ, kept, policy, spec, store};
use crate::selection::policies;
use kvrs::{CodecSpec, Cpu, Dtype, KvStore, Plan, PlanSpec, PolicySpec, Queries, Tokens};
use kvrs_testkit::Tensor;
use kvrs_testkit::attention::{Head, Scoring, relative_error};
use proptest::prelude::*;
use serde_json::json;
use std::sync::Arc;

fn snap(budget: usize) -> PolicySpec {
    policy("snapkv", &json!({"budget": budget, "window": 16}))
}

/// Everything that sequence 0 decodes to, as bits.
pub(crate) fn bits(store: &KvStore<Cpu>) -> Vec<Vec<u32>> {
    let places = [(0, 0), (0, 1), (1, 0), (1, 1)];
    let decoded = places.map(|(layer, head)| store.decode(layer, SEQ, head).unwrap());
    decoded.iter().map(|d| d.keys.iter().chain(&d.values).map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn pieces_and_threads_change_nothing() {
    for policy in policies(40).into_iter().chain([policy("streamingllm", &json!({"budget": 40}))]) {
        for codec in [CodecSpec::raw16(), CodecSpec::turboquant(3.0)] {
            let spec = spec(&codec, &policy, 3, 8);
            let input = Input::new(&spec.shape, 150, 23);
            let plan = Plan::new(spec).unwrap();
            let whole = store(&plan, 1);
            input.run(&whole, 150, 150);
            for (n, cuts) in [(2, vec![]), (1, vec![1, 2, 90]), (2, vec![70, 71, 149])] {
                let parts = store(&plan, n);
                input.prompt(&parts, &cuts, 150);
                assert_eq!(kept(&parts), kept(&whole), "{} on {codec} in pieces {cuts:?}", policy.name());
                assert_eq!(bits(&parts), bits(&whole), "{} on {codec}", policy.name());
                let stats = [&parts, &whole].map(|s| s.stats().unwrap());
                assert_eq!(stats[0].bytes_total, stats[1].bytes_total, "{} on {codec}", policy.name());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_cuts_and_lengths_keep_the_same(
        which in 0usize..13, raw: bool, tokens in 1usize..260, budget in 30usize..90,
        cuts in prop::collection::btree_set(1usize..260, 0..6),
    ) {
        let codec = if raw { CodecSpec::raw16() } else { CodecSpec::turboquant(4.0) };
        let spec = spec(&codec, &policies(budget)[which], 3, 8);
        let input = Input::new(&spec.shape, tokens, 31);
        let plan = Plan::new(spec).unwrap();
        let (whole, parts) = (store(&plan, 1), store(&plan, 2));
        input.prompt(&whole, &[], tokens);
        input.prompt(&parts, &cuts.into_iter().collect::<Vec<_>>(), tokens);
        prop_assert_eq!(kept(&whole), kept(&parts));
        prop_assert_eq!(bits(&whole), bits(&parts));
    }
}

#[test]
fn queries_of_the_prompt_see_all_of_it_and_the_next_sees_what_is_kept() {
    let spec = spec(&CodecSpec::raw16(), &snap(64), 4, 16);
    let input = Input::new(&spec.shape, 301, 2);
    let store = store(&Plan::new(spec).unwrap(), 2);
    let outs = input.extend(&store, 0, 300).unwrap();
    let kept = kept(&store);
    let next = input.extend(&store, 300, 301).unwrap();
    for (layer, [q, k, v]) in input.layers.iter().enumerate() {
        for query_head in 0..4 {
            let head = query_head / 2;
            let tokens = |indices: &[usize]| {
                let mut out = Head::default();
                for &t in indices {
                    out.push(t, k.row([0, head, t]), v.row([0, head, t]));
                }
                out
            };
            let all = tokens(&(0..300).collect::<Vec<_>>());
            for t in (0..300).step_by(23) {
                let expected = all.attend(&q.row([0, query_head, t]), Some(t), 32, Scoring::default());
                assert!(
                    relative_error(&outs[layer].row([0, query_head, t]), &expected.out) < 1e-4,
                    "query {t}"
                );
            }
            let some = tokens(&[&kept[layer][head][..], &[300]].concat());
            let expected = some.attend(&q.row([0, query_head, 300]), Some(300), 32, Scoring::default());
            assert!(relative_error(&next[layer].row([0, query_head, 0]), &expected.out) < 1e-4);
        }
    }
}

#[test]
fn append_with_queries_keeps_what_extend_keeps() {
    for policy in policies(40) {
        let spec = spec(&CodecSpec::turboquant(4.0), &policy, 3, 8);
        let input = Input::new(&spec.shape, 120, 6);
        let stores = [0, 1].map(|_| store(&Plan::new(spec.clone()).unwrap(), 1));
        input.run(&stores[0], 100, 120);
        input.append(&stores[1], 0, 100);
        (100..120).for_each(|t| input.append(&stores[1], t, t + 1));
        assert_eq!(kept(&stores[0]), kept(&stores[1]), "{}", policy.name());
    }
}

#[test]
fn an_open_prompt_is_raw_waits_and_ends_packed() {
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &snap(64), 4, 16)).unwrap();
    let input = Input::new(&plan.spec().shape, 400, 9);
    let store = store(&plan, 1);
    store.begin_prompt(&[SEQ]).unwrap();
    input.extend(&store, 0, 250).unwrap();
    input.extend(&store, 250, 400).unwrap();
    let open = store.stats().unwrap();
    assert_eq!((open.bytes_codes, open.tokens_kept, open.tokens_encoded), (0, 4 * 400, 0));
    assert_eq!(open.waiting.len(), 1, "{:?}", open.waiting);
    assert!(open.waiting[0].starts_with("snapkv"));
    assert!(open.bytes_statistics >= 2 * 16 * 4 * 32 * 2, "two layers remember 16 queries of 4 heads");
    store.end_prompt(&[SEQ]).unwrap();
    let ended = store.stats().unwrap();
    assert_eq!((ended.tokens_kept, ended.tokens_logical, ended.bytes_statistics), (4 * 64, 400, 0));
    assert_eq!(ended.tokens_encoded, 4 * (64 - 4 - 16), "only what stays is encoded");
    let bytes = |s: &kvrs::Stats| s.bytes_window + s.bytes_codes + s.bytes_scales;
    assert!(bytes(&ended) < bytes(&open) / 10 && ended.waiting.is_empty());
    assert_eq!((ended.policies[0].evicted, ended.policies[0].tokens_evicted), (2, 4 * 336));
    assert_eq!(store.length(SEQ, None).unwrap(), 400);
}

#[test]
fn single_tokens_are_no_prompt_and_are_encoded_as_they_come() {
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &snap(64), 4, 16)).unwrap();
    let input = Input::new(&plan.spec().shape, 200, 9);
    let store = store(&plan, 1);
    (0..200).for_each(|t| drop(input.extend(&store, t, t + 1).unwrap()));
    let stats = store.stats().unwrap();
    assert_eq!(stats.tokens_kept, 4 * 200);
    assert!(stats.tokens_encoded > 0 && stats.waiting.len() == 1, "{:?}", stats.waiting);
}

#[test]
fn a_second_prompt_chooses_again_among_all_that_is_left() {
    for policy in policies(48) {
        for codec in [CodecSpec::raw16(), CodecSpec::turboquant(4.0)] {
            let spec = spec(&codec, &policy, 3, 8);
            let input = Input::new(&spec.shape, 300, 12);
            let store = store(&Plan::new(spec).unwrap(), 2);
            input.run(&store, 140, 150);
            let before = kept(&store);
            store.begin_prompt(&[SEQ]).unwrap();
            input.extend(&store, 150, 200).unwrap();
            input.extend(&store, 200, 280).unwrap();
            store.end_prompt(&[SEQ]).unwrap();
            store.check().unwrap();
            let after = kept(&store);
            assert_eq!(after.iter().flatten().map(Vec::len).sum::<usize>(), 4 * 48, "{}", policy.name());
            for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
                assert!(after.iter().all(|t| *t >= 150 || before.contains(t)), "what was gone stays gone");
                assert!(after.ends_with(&(272..280).collect::<Vec<_>>()));
            }
            (280..300).for_each(|t| drop(input.extend(&store, t, t + 1).unwrap()));
            store.check().unwrap();
        }
    }
}

#[test]
fn a_reset_store_keeps_and_encodes_the_same_again() {
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &snap(64), 4, 16)).unwrap();
    let inputs = [1, 2].map(|seed| Input::new(&plan.spec().shape, 330, seed));
    let (used, fresh) = (store(&plan, 1), store(&plan, 1));
    inputs[0].run(&used, 310, 330);
    used.truncate(SEQ, 0).unwrap();
    inputs[1].run(&used, 312, 330);
    inputs[1].run(&fresh, 312, 330);
    assert_eq!(kept(&used), kept(&fresh));
    assert_eq!(bits(&used), bits(&fresh));
    assert!(kept(&used).iter().flatten().all(|head| head.len() == 64 + 18));
}

#[test]
fn the_callers_own_scores_choose() {
    let custom = policy("custom", &json!({"budget": 40, "needs": {"attention": {"queries": {"last": 4}}}}));
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &custom, 2, 8)).unwrap();
    let input = Input::new(&plan.spec().shape, 120, 9);
    let mut store = store(&plan, 1);
    store.set_score(Arc::new(|facts| {
        assert!((facts.attention.iter().sum::<f32>() - 4.0).abs() < 1e-3, "four queries of one group mean");
        Ok(facts.tokens.iter().map(|t| f32::from(u8::from(t % 4 == facts.head))).collect())
    }));
    input.run(&store, 120, 120);
    // 27 multiples of four, and the first three of the others, which all score alike.
    let expected: Vec<usize> = (0..6).chain((2..28).map(|i| 4 * i)).collect();
    assert_eq!(kept(&store)[0][0][..32], expected);
    assert_eq!(kept(&store)[0][0].len(), 40);
}

#[test]
fn scores_that_fail_leave_the_prompt_as_it_was() {
    let custom = policy("custom", &json!({"budget": 40}));
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &custom, 2, 8)).unwrap();
    let input = Input::new(&plan.spec().shape, 120, 9);
    let mut store = store(&plan, 1);
    store.set_score(Arc::new(|_| Ok(vec![1.0; 3])));
    store.begin_prompt(&[SEQ]).unwrap();
    input.extend(&store, 0, 120).unwrap();
    let before = bits(&store);
    let error = store.end_prompt(&[SEQ]).unwrap_err().to_string();
    assert!(error.contains("score is 3 numbers") && error.contains("120, one per token"), "{error}");
    assert_eq!(bits(&store), before);
    store.set_score(Arc::new(|facts| Ok(vec![0.0; facts.tokens.len()])));
    store.end_prompt(&[SEQ]).unwrap();
    assert_eq!(kept(&store)[1][1].len(), 40);
    let unused = PlanSpec { evict: Vec::new(), ..plan.spec().clone() };
    assert_ne!(Plan::new(unused).unwrap().hash(), plan.hash());
}

/// The rows of a batch, left-padded to one length with rubbish.
fn padded(inputs: &[Input], tokens: usize, layer: usize) -> ([Tensor; 3], Vec<bool>) {
    let tensors = [0, 1, 2].map(|i| {
        let [_, heads, _, dim] = inputs[0].layers[layer][i].shape();
        let mut all = Tensor::zeros(Dtype::F16, [inputs.len(), heads, tokens, dim]);
        for (row, head, t) in
            (0..inputs.len() * heads * tokens).map(|n| (n / (heads * tokens), n / tokens % heads, n % tokens))
        {
            let skipped = tokens - inputs[row].tokens;
            let x = if t < skipped {
                vec![if t % 2 == 0 { 1000.0 } else { f32::NAN }; dim]
            } else {
                inputs[row].layers[layer][i].row([0, head, t - skipped])
            };
            all.set_row([row, head, t], &x);
        }
        all
    });
    let mask = inputs.iter().flat_map(|input| (0..tokens).map(move |t| t >= tokens - input.tokens)).collect();
    (tensors, mask)
}

#[test]
fn rows_of_a_padded_batch_keep_what_they_keep_alone() {
    for policy in policies(40) {
        let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &policy, 3, 8)).unwrap();
        let inputs = [37, 128, 91].map(|tokens| Input::new(&plan.spec().shape, tokens, tokens as u64));
        let together = KvStore::new(plan.clone(), kvrs_testkit::pair::threads(2), None).unwrap();
        let rows = together.create(3).unwrap();
        for layer in 0..2 {
            let ([q, k, v], mask) = padded(&inputs, 128, layer);
            let tokens = Tokens { mask: Some(&mask), ..Tokens::new(k.view(), v.view()) };
            let mut out = Tensor::zeros(Dtype::F32, [3, 4, 128, 32]);
            together
                .extend(layer, &rows, &Queries::new(q.view()), &tokens, &mut out.view_mut(), None)
                .unwrap();
        }
        together.check().unwrap();
        for (row, input) in rows.iter().zip(&inputs) {
            let alone = store(&plan, 1);
            input.run(&alone, input.tokens, input.tokens);
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let [a, b] =
                    [together.decode(layer, *row, head).unwrap(), alone.decode(layer, SEQ, head).unwrap()];
                assert_eq!(a, b, "{}, a row of {}", policy.name(), input.tokens);
            }
        }
    }
}
