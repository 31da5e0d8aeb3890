//! What is kept after a prompt, against attention by the definition.

use crate::common::{Input, Reference, kept, policy, shape, spec, store};
use kvrs::{CodecSpec, Plan, PlanSpec, PolicySpec};
use serde_json::json;

/// Every policy that needs nothing from a caller, small enough for 200 tokens.
pub(crate) fn policies(budget: usize) -> Vec<PolicySpec> {
    let snap = json!({"name": "snapkv", "params": {"budget": budget, "window": 12, "kernel": 5}});
    let h2o = json!({"name": "h2o", "params": {"budget": budget}});
    let caote = json!({"name": "caote", "params": {"scores": snap}});
    vec![
        policy("snapkv", &json!({"budget": budget, "window": 12, "kernel": 5})),
        policy(
            "snapkv",
            &json!({"budget": budget, "window": 12, "kernel": 7, "pooling": "avg", "reduce": "max"}),
        ),
        policy("h2o", &json!({"budget": budget})),
        policy("tova", &json!({"budget": budget})),
        policy("knorm", &json!({"budget": budget})),
        policy("random", &json!({"budget": budget, "seed": 3})),
        policy("scissorhands", &json!({"budget": budget, "history": 40})),
        policy("caote", &json!({"scores": snap})),
        policy("caote", &json!({"scores": h2o, "fast": true})),
        policy(
            "pyramidkv",
            &json!({"budget": budget, "scores": {"name": "snapkv", "params": {"window": 12}}}),
        ),
        policy("adakv", &json!({"scores": snap})),
        policy("adakv", &json!({"scores": caote})),
        policy("entropy", &json!({"scores": snap})),
    ]
}

fn codecs() -> [CodecSpec; 2] {
    [CodecSpec::raw16(), CodecSpec::turboquant(4.0)]
}

#[test]
fn what_a_prompt_leaves_is_what_the_pure_functions_choose() {
    for policy in policies(48) {
        for codec in codecs() {
            let spec = spec(&codec, &policy, 3, 8);
            let input = Input::new(&spec.shape, 200, 17);
            let store = store(&Plan::new(spec.clone()).unwrap(), 2);
            input.run(&store, 200, 200);
            for (layer, got) in kept(&store).into_iter().enumerate() {
                let reference = Reference { spec: &spec, input: &input, layer, group: 16 };
                assert_eq!(got, reference.kept(200, 200), "{} on {codec}, layer {layer}", policy.name());
            }
            let total: usize = kept(&store).iter().flatten().map(Vec::len).sum();
            assert_eq!(total, 4 * 48, "{}: the budget is used up", policy.name());
        }
    }
}

#[test]
fn a_share_of_the_prompt_is_rounded_and_streaming_waits_for_it() {
    for name in ["streamingllm", "random", "h2o"] {
        let policy = policy(name, &json!({"budget": 0.25}));
        let spec = spec(&CodecSpec::turboquant(3.0), &policy, 2, 8);
        let input = Input::new(&spec.shape, 202, 3);
        let store = store(&Plan::new(spec.clone()).unwrap(), 1);
        input.run(&store, 202, 202);
        assert!(kept(&store).iter().flatten().all(|head| head.len() == 51), "{name}: 50.5 tokens, rounded");
        let reference = Reference { spec: &spec, input: &input, layer: 1, group: 16 };
        assert_eq!(kept(&store)[1], reference.kept(202, 202));
    }
}

#[test]
fn a_budget_in_bytes_keeps_more_tokens_with_a_codec() {
    let policy = policy("knorm", &json!({"budget": "192KiB"}));
    let counts: Vec<usize> = [CodecSpec::raw16(), CodecSpec::turboquant(4.0), CodecSpec::turboquant(2.0)]
        .iter()
        .map(|codec| {
            let spec = spec(codec, &policy, 4, 16);
            let input = Input::new(&spec.shape, 3000, 5);
            let plan = Plan::new(spec).unwrap();
            let store = store(&plan, 2);
            input.run(&store, 3000, 3000);
            let stats = store.stats().unwrap();
            let used = stats.bytes_codes + stats.bytes_scales + stats.bytes_window + stats.bytes_tables;
            assert!(used <= 192 << 10 && used > 160 << 10, "{codec}: {stats:?}");
            let memory = plan.memory(3000, 1).unwrap();
            assert_eq!([memory.bytes_codes, memory.bytes_window], [stats.bytes_codes, stats.bytes_window]);
            kept(&store)[0][0].len()
        })
        .collect();
    assert!(counts[0] > 100 && counts[1] > 2 * counts[0] && counts[2] > counts[1], "{counts:?}");
}

#[test]
fn a_budget_above_the_prompt_keeps_everything_and_says_so() {
    for policy in policies(512) {
        for codec in codecs() {
            let with = spec(&codec, &policy, 3, 8);
            let input = Input::new(&with.shape, 190, 8);
            let without = PlanSpec { evict: Vec::new(), ..with.clone() };
            let stores = [with, without].map(|spec| store(&Plan::new(spec).unwrap(), 1));
            for store in &stores {
                input.run(store, 150, 190);
            }
            let [a, b] = [0, 1].map(|i| stores[i].decode(1, crate::common::SEQ, 1).unwrap());
            assert_eq!(a, b, "{} on {codec}", policy.name());
            let stats = stores[0].stats().unwrap();
            assert_eq!(stats.policies[0].kept_all, 2, "{:?}", stats.policies);
            assert_eq!((stats.policies[0].tokens_evicted, stats.waiting.len()), (0, 0));
        }
    }
}

#[test]
fn codes_of_what_is_kept_are_those_of_a_full_store() {
    let policy = policy("snapkv", &json!({"budget": 60, "window": 12, "kernel": 5}));
    for bits in [2.5, 3.0, 4.0] {
        let mut with = spec(&CodecSpec::turboquant(bits), &policy, 3, 8);
        let constant: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        with.key_offset = Some(vec![Some(constant.clone()), Some(constant)]);
        let input = Input::new(&shape(2), 400, 4);
        let without = PlanSpec { evict: Vec::new(), recent: 0, ..with.clone() };
        let stores = [with, without].map(|spec| store(&Plan::new(spec).unwrap(), 2));
        for store in &stores {
            input.run(store, 400, 400);
        }
        for head in 0..2 {
            let [some, all] = [0, 1].map(|i| stores[i].decode(0, crate::common::SEQ, head).unwrap());
            // The last eight are still raw, and so is what a group of the full store lacks.
            for (i, position) in some.positions.iter().enumerate().take(52) {
                let at = usize::try_from(*position).unwrap();
                let row = |x: &[f32], i: usize| {
                    x[i * 32..(i + 1) * 32].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                };
                if at < 387 {
                    assert_eq!(row(&some.keys, i), row(&all.keys, at), "key {at} at {bits} bits");
                    assert_eq!(row(&some.values, i), row(&all.values, at), "value {at} at {bits} bits");
                }
            }
        }
    }
}
