//! What is refused, and by which name.

use crate::common::{Input, SEQ, policy, shape, spec, store};
use kvrs::{CodecSpec, Plan, PlanSpec, PolicySpec, Tokens};
use serde_json::json;

fn snap() -> PolicySpec {
    policy("snapkv", &json!({"budget": 64, "window": 16}))
}

fn base() -> PlanSpec {
    spec(&CodecSpec::turboquant(4.0), &snap(), 4, 16)
}

fn refused(spec: PlanSpec, words: &[&str]) {
    let error = Plan::new(spec).unwrap_err().to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error} lacks one of {words:?}");
}

#[test]
fn policies_that_cannot_work_are_refused_by_field_when_the_plan_is_made() {
    let with = |name: &str, params| PlanSpec { evict: vec![None, Some(policy(name, &params))], ..base() };
    refused(with("snapkv", json!({"budget": 20, "window": 16})), &["evict[1].budget", "20", "21"]);
    refused(with("h2o", json!({"budget": 1.5})), &["evict[1].budget", "1.5", "(0, 1]"]);
    refused(
        with("snapkv", json!({"budget": 64, "window": 16, "kernel": 4})),
        &["evict[1].kernel", "4", "odd"],
    );
    refused(with("snapkv", json!({"budget": 64, "window": 5, "kernel": 7})), &["evict[1].kernel", "7", "5"]);
    refused(with("tova", json!({})), &["evict[1].budget", "missing"]);
    refused(with("knorm", json!({"budget": "1KiB"})), &["evict[1].budget", "1024 bytes", "at least"]);
    refused(PlanSpec { evict: vec![Some(snap())], ..base() }, &["evict is 1 policies", "2, one a layer"]);
    refused(PlanSpec { prompt_budget: Some(0), ..base() }, &["prompt_budget is 0", "at least 1"]);
    let mut sliding = shape(2);
    sliding.layers[1].sliding = Some(64);
    refused(
        PlanSpec { shape: sliding.clone(), ..base() },
        &["evict[1]", "snapkv", "sliding window of 64", "None"],
    );
    Plan::new(PlanSpec { shape: sliding, evict: vec![Some(snap()), None], ..base() }).unwrap();
    let json = serde_json::to_string(&base()).unwrap().replace("\"window\":16", "\"window\":16,\"windw\":3");
    assert!(serde_json::from_str::<PlanSpec>(&json).is_err_and(|e| e.to_string().contains("windw")));
}

#[test]
fn policies_are_part_of_the_hash_and_of_the_file() {
    let plan = Plan::new(base()).unwrap();
    let without = Plan::new(PlanSpec { evict: Vec::new(), ..base() }).unwrap();
    let none = Plan::new(PlanSpec { evict: vec![None, None], ..base() }).unwrap();
    let other =
        PlanSpec { evict: vec![Some(snap()), Some(policy("tova", &json!({"budget": 64})))], ..base() };
    assert_eq!(without.hash(), none.hash());
    assert!(plan.hash() != without.hash() && plan.hash() != Plan::new(other).unwrap().hash());
    let path = std::env::temp_dir().join(format!("kvrs-evict-{}.kvplan", std::process::id()));
    plan.save(&path).unwrap();
    let loaded = Plan::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!((loaded.hash(), &loaded.spec().evict), (plan.hash(), &plan.spec().evict));
}

#[test]
fn tokens_without_queries_are_refused_where_a_policy_learns_from_them() {
    for (policy, later) in [(snap(), false), (policy("h2o", &json!({"budget": 64})), true)] {
        let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &policy, 4, 16)).unwrap();
        let input = Input::new(&plan.spec().shape, 40, 1);
        let store = store(&plan, 1);
        let bare = |from: usize, to: usize| {
            let [k, v] = [1, 2].map(|i| input.layers[0][i].columns(from, to));
            store.append(0, &[SEQ], &Tokens::new(k.view(), v.view()))
        };
        let error = bare(0, 30).unwrap_err().to_string();
        assert!(error.starts_with("q is None") && error.contains(policy.name()), "{error}");
        assert_eq!(store.length(SEQ, Some(0)).unwrap(), 0);
        input.run(&store, 30, 30);
        assert_eq!(bare(30, 31).is_err(), later, "{}", policy.name());
    }
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &policy("knorm", &json!({"budget": 64})), 4, 16))
        .unwrap();
    let input = Input::new(&plan.spec().shape, 40, 1);
    let store = store(&plan, 1);
    let [k, v] = [1, 2].map(|i| input.layers[0][i].columns(0, 40));
    store.append(0, &[SEQ], &Tokens::new(k.view(), v.view())).unwrap();
}

#[test]
fn prompts_begin_and_end_once() {
    let plan = Plan::new(PlanSpec { prompt_budget: Some(100), ..base() }).unwrap();
    let input = Input::new(&plan.spec().shape, 200, 1);
    let store = store(&plan, 1);
    let says = |result: kvrs::Result<()>, word: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(word), "{error} lacks {word}");
    };
    says(store.end_prompt(&[SEQ]), "not open");
    store.begin_prompt(&[SEQ]).unwrap();
    says(store.begin_prompt(&[SEQ]), "prompt is open");
    input.extend(&store, 0, 90).unwrap();
    says(input.extend(&store, 90, 101).map(drop), "prompt_budget = 100");
    assert_eq!(store.length(SEQ, None).unwrap(), 90);
    says(store.keep(SEQ, 0, &[vec![], vec![]]), "prompt is open");
    let [q, k, v] = [0, 1, 2].map(|i| input.layers[0][i].columns(90, 95));
    store.append_with(0, &[SEQ], &Tokens::new(k.view(), v.view()), &kvrs::Queries::new(q.view())).unwrap();
    says(store.end_prompt(&[SEQ]), "90 to 95 tokens");
    store.truncate(SEQ, 90).unwrap();
    store.end_prompt(&[SEQ]).unwrap();
    store.check().unwrap();
    says(store.end_prompt(&[SEQ]), "not open");
}

#[test]
fn layers_of_a_whole_prompt_get_all_of_it_before_anything_else() {
    let plan = Plan::new(base()).unwrap();
    let input = Input::new(&plan.spec().shape, 200, 1);
    let store = store(&plan, 1);
    let layer = |layer: usize, from: usize, to: usize| {
        let [q, k, v] = [0, 1, 2].map(|i| input.layers[layer][i].columns(from, to));
        let queries = kvrs::Queries::new(q.view());
        store.append_with(layer, &[SEQ], &Tokens::new(k.view(), v.view()), &queries)
    };
    layer(0, 0, 120).unwrap();
    let error = layer(0, 120, 121).unwrap_err().to_string();
    assert!(error.contains("prompt of 120 tokens"), "{error}");
    layer(1, 0, 50).unwrap();
    let error = store.truncate(SEQ, 40).unwrap_err().to_string();
    assert!(error.contains("prompt of 120 tokens"), "{error}");
    layer(1, 50, 120).unwrap();
    layer(0, 120, 121).unwrap();
    assert_eq!([0, 1].map(|l| store.kept_positions(SEQ, l, 0).unwrap().len()), [65, 64]);
    store.check().unwrap();
    store.truncate(SEQ, 0).unwrap();
    assert_eq!(store.stats().unwrap().bytes_total, 0);
}

#[test]
fn a_policy_without_its_scores_is_named() {
    let custom = policy("custom", &json!({"budget": 64}));
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &custom, 4, 16)).unwrap();
    let input = Input::new(&plan.spec().shape, 20, 1);
    let error = input.extend(&store(&plan, 1), 0, 20).unwrap_err().to_string();
    assert!(error.contains("evict[0]") && error.contains("set_score"), "{error}");
}

#[test]
fn prompts_of_one_and_two_tokens_and_windows_longer_than_the_prompt_keep_all() {
    for tokens in [1, 2, 10] {
        let plan = Plan::new(base()).unwrap();
        let input = Input::new(&plan.spec().shape, 60, 1);
        let store = store(&plan, 1);
        store.begin_prompt(&[SEQ]).unwrap();
        store.end_prompt(&[SEQ]).unwrap();
        input.prompt(&store, &[], tokens);
        assert_eq!(store.kept_positions(SEQ, 1, 1).unwrap(), (0..tokens as i64).collect::<Vec<_>>());
        (tokens..60).for_each(|t| drop(input.extend(&store, t, t + 1).unwrap()));
        assert_eq!(store.kept_positions(SEQ, 1, 1).unwrap().len(), 60);
    }
}
