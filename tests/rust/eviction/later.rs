//! What policies drop after the prompt: group by group, or in batches.

use crate::common::{Input, Reference, SEQ, kept, policy, spec, store};
use kvrs::{CodecSpec, Plan, PolicySpec};
use serde_json::json;

fn steady(budget: usize) -> Vec<PolicySpec> {
    let h2o = json!({"name": "h2o", "params": {"budget": budget}});
    vec![
        policy("streamingllm", &json!({"budget": budget})),
        policy("h2o", &json!({"budget": budget})),
        policy("tova", &json!({"budget": budget})),
        policy("knorm", &json!({"budget": budget})),
        policy("random", &json!({"budget": budget})),
        policy("scissorhands", &json!({"budget": budget, "history": 20})),
        policy("caote", &json!({"scores": h2o})),
    ]
}

#[test]
fn every_group_that_leaves_the_window_makes_room_as_the_pure_functions_say() {
    for policy in steady(48) {
        // Raw, so that attention in later steps is that of the numbers as they came.
        let spec = spec(&CodecSpec::raw16(), &policy, 3, 8);
        let input = Input::new(&spec.shape, 330, 5);
        for prompt in [2, 100] {
            let store = store(&Plan::new(spec.clone()).unwrap(), 1);
            input.run(&store, prompt, 330);
            for (layer, got) in kept(&store).into_iter().enumerate() {
                let reference = Reference { spec: &spec, input: &input, layer, group: 16 };
                // Streaming needs to know of no prompt.
                let prompt = if policy.name() == "streamingllm" { 1 } else { prompt };
                assert_eq!(got, reference.kept(prompt, 330), "{}, prompt of {prompt}", policy.name());
            }
        }
    }
}

#[test]
fn a_steady_policy_never_holds_more_than_its_budget_and_a_group() {
    for policy in steady(64) {
        for codec in [CodecSpec::raw16(), CodecSpec::turboquant(4.0)] {
            let plan = Plan::new(spec(&codec, &policy, 3, 8)).unwrap();
            let input = Input::new(&plan.spec().shape, 600, 7);
            let store = store(&plan, 1);
            input.extend(&store, 0, 200).unwrap();
            let mut most = 0;
            for t in 200..600 {
                input.extend(&store, t, t + 1).unwrap();
                let stats = store.stats().unwrap();
                let heads = kept(&store);
                assert!(heads.iter().flatten().all(|h| h.len() < 64 + 16), "{} at {t}", policy.name());
                assert!(heads.iter().flatten().all(|h| h.starts_with(&[0, 1, 2])));
                assert!(heads.iter().flatten().all(|h| h.ends_with(&(t - 7..=t).collect::<Vec<_>>())));
                most = most.max(stats.pages_total - stats.pages_free);
            }
            store.check().unwrap();
            // At most: three quarters full, sinks, window, and the one being filled.
            let slots = if codec.to_string().contains("raw") { 12 } else { 48 };
            assert!(most <= 4 * (80 / slots + 2 + 1 + 3), "{} on {codec}: {most} pages", policy.name());
            assert!(store.length(SEQ, None).unwrap() == 600);
        }
    }
}

#[test]
fn streaming_drops_inside_a_long_prompt_and_needs_no_more_than_its_budget() {
    let policy = policy("streamingllm", &json!({"budget": 128}));
    for codec in [CodecSpec::raw16(), CodecSpec::turboquant(4.0)] {
        let plan = Plan::new(spec(&codec, &policy, 4, 32)).unwrap();
        let input = Input::new(&plan.spec().shape, 3000, 7);
        // Four times what the budget takes, far less than the prompt.
        let store =
            kvrs::KvStore::new(plan.clone(), kvrs_testkit::pair::threads(2), Some(512 << 10)).unwrap();
        store.create(1).unwrap();
        input.run(&store, 2990, 3000);
        let expected: Vec<usize> = kept(&store)[0][0].clone();
        assert_eq!(expected[..4], [0, 1, 2, 3]);
        assert!(expected.len() >= 128 && expected.len() < 144);
        assert_eq!(expected[4..], (3000 - (expected.len() - 4)..3000).collect::<Vec<_>>());
        let parts = crate::common::store(&plan, 1);
        (0..3000).step_by(300).for_each(|t| drop(input.extend(&parts, t, t + 300).unwrap()));
        assert_eq!(kept(&store), kept(&parts));
    }
}

#[test]
fn a_truncation_to_before_the_last_eviction_is_refused_and_one_behind_it_keeps_positions_logical() {
    for policy in steady(48) {
        for codec in [CodecSpec::raw16(), CodecSpec::turboquant(4.0)] {
            let plan = Plan::new(spec(&codec, &policy, 3, 8)).unwrap();
            let input = Input::new(&plan.spec().shape, 400, 7);
            let store = store(&plan, 1);
            input.run(&store, 150, 260);
            let before = kept(&store);
            let error = store.truncate(SEQ, 120).unwrap_err().to_string();
            assert!(error.contains(&format!("{} in layer 0 dropped tokens", policy.name())), "{error}");
            assert_eq!(kept(&store), before);
            let least = error.split("0 or ").nth(1).and_then(|rest| rest.split("..").next()).unwrap();
            let least: usize = least.parse().unwrap();
            assert!((220..260).contains(&least) && store.truncate(SEQ, least - 1).is_err(), "{least}");
            store.truncate(SEQ, least).unwrap();
            store.check().unwrap();
            assert_eq!(store.length(SEQ, None).unwrap(), least);
            for (before, after) in before.iter().flatten().zip(kept(&store).iter().flatten()) {
                let expected: Vec<usize> = before.iter().copied().filter(|t| *t < least).collect();
                assert_eq!(*after, expected, "{}", policy.name());
            }
            (least..least + 100).for_each(|t| drop(input.extend(&store, t, t + 1).unwrap()));
            store.check().unwrap();
            let newest = least + 99;
            assert!(kept(&store).iter().flatten().all(|h| h.len() < 48 + 16 && h.contains(&newest)));
        }
    }
}
