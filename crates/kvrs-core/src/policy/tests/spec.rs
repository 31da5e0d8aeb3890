//! Specs as they are read and checked.

use super::*;
use crate::budget::{AdaKv, Entropy};

/// The message of a plan with 4 sinks and 16 recent tokens.
fn refusal(spec: &PolicySpec) -> String {
    spec.validate(4, 16).unwrap_err().to_string()
}

#[test]
fn every_policy_of_the_registry_is_read_by_its_name() {
    for entry in entries() {
        let has = |name| entry.parameters.iter().any(|p| p.name == name);
        let mut params = Vec::new();
        if has("budget") {
            params.push(budget(100));
        }
        if has("scores") {
            let inner = if has("budget") { vec![] } else { vec![budget(100)] };
            params.push(("scores", json("snapkv", inner)));
        }
        let spec = policy(entry.name, params);
        assert_eq!((spec.name(), spec.budget()), (entry.name, Some(Budget::Tokens(100))));
        spec.validate(4, 16).unwrap();
        let unknown = read(json(entry.name, vec![("depth", Int(1))])).unwrap_err().to_string();
        assert!(unknown.contains("unknown field `depth`"), "{unknown}");
        for parameter in entry.parameters {
            assert!(unknown.contains(&format!("`{}`", parameter.name)), "{unknown} lacks {}", parameter.name);
        }
    }
    let unknown = read(json("lru", vec![])).unwrap_err().to_string();
    for entry in entries() {
        assert!(unknown.contains(&format!("`{}`", entry.name)), "{unknown}");
    }
    let extra = Map(vec![("name", Text("h2o")), ("params", Map(vec![])), ("layer", Int(1))]);
    assert!(read(extra).is_err());
}

#[test]
fn settings_that_are_left_out_have_the_published_values() {
    let snapkv = SnapKv { budget: Some(Budget::Tokens(64)), window: 32, kernel: 7, ..SnapKv::default() };
    assert_eq!(policy("snapkv", vec![budget(64)]), PolicySpec::SnapKv(snapkv.clone()));
    assert_eq!((snapkv.pooling, snapkv.reduce), (Pooling::Max, Reduce::Mean));
    let PolicySpec::PyramidKv(pyramid) = policy("pyramidkv", vec![budget(64)]) else { panic!() };
    assert_eq!((pyramid.beta, pyramid.scores.name()), (20.0, "snapkv"));
    let PolicySpec::Scissorhands(s) = policy("scissorhands", vec![budget(64)]) else { panic!() };
    assert_eq!(s.history, 400);
    assert_eq!((AdaKv::default().floor, Entropy::default().floor, Caote::default().fast), (0.2, 0.2, false));
    let chosen =
        policy("snapkv", vec![("pooling", Text("avg")), ("reduce", Text("sum")), ("kernel", Int(5))]);
    let PolicySpec::SnapKv(chosen) = chosen else { panic!() };
    assert_eq!((chosen.pooling, chosen.reduce, chosen.kernel), (Pooling::Avg, Reduce::Sum, 5));
    assert!(
        read(json("snapkv", vec![("reduce", Text("median"))])).unwrap_err().to_string().contains("`sum`")
    );
}

#[test]
fn budgets_are_tokens_shares_or_bytes() {
    let of = |value| policy("h2o", vec![("budget", value)]).budget().unwrap();
    assert_eq!(of(Int(100)), Budget::Tokens(100));
    assert_eq!(of(Float(0.25)), Budget::Share(0.25));
    assert_eq!(of(Float(1.0)), Budget::Share(1.0));
    assert_eq!(of(Text("512MiB")), Budget::Bytes(512 << 20));
    assert_eq!(of(Map(vec![("bytes", Int(4096))])), Budget::Bytes(4096));
    let wrong = [Int(-1), Text("512"), Map(vec![]), Map(vec![("tokens", Int(3))])];
    let two = Map(vec![("bytes", Int(3)), ("tokens", Int(3))]);
    for value in wrong.into_iter().chain([two]) {
        let error = read(json("h2o", vec![("budget", value)])).unwrap_err().to_string();
        assert!(error.contains("a share of the prompt in (0, 1]"), "{error}");
    }
}

#[test]
fn a_budget_holds_what_is_protected_and_one_token_more() {
    let least = |name| policy(name, vec![budget(1)]).least_budget(4, 16);
    assert_eq!((least("tova"), least("streamingllm"), least("scissorhands")), (21, 21, 21));
    assert_eq!(least("snapkv"), 4 + 32 + 1, "its own window is longer than the plan's");
    assert_eq!(policy("scissorhands", vec![budget(1)]).least_budget(0, 0), 11);
    assert_eq!(policy("h2o", vec![budget(1)]).least_budget(4, 0), 9, "4 sinks, 4 newest (half of 9) and one");
    assert_eq!(
        refusal(&policy("snapkv", vec![budget(36)])),
        "plan: evict.budget is 36 tokens; allowed: at least 37 tokens (sinks, newest tokens and one more)"
    );
    policy("snapkv", vec![budget(37)]).validate(4, 16).unwrap();
    for n in 0..200 {
        let h2o = policy("h2o", vec![budget(n)]);
        let least = h2o.least_budget(4, 16);
        assert_eq!(h2o.validate(4, 16).is_ok(), n as usize >= least, "{n} with a least of {least}");
        assert!((n as usize) < least || h2o.protected(n as usize, 4, 16) < n as usize);
    }
}

#[test]
fn settings_out_of_range_are_named_with_what_is_allowed() {
    let snapkv =
        |params: Vec<(&'static str, Json)>| refusal(&policy("snapkv", [vec![budget(99)], params].concat()));
    assert_eq!(
        snapkv(vec![("kernel", Int(6))]),
        "plan: evict.kernel is 6; allowed: an odd number up to the window of 32"
    );
    assert!(snapkv(vec![("kernel", Int(9)), ("window", Int(8))]).contains("up to the window of 8"));
    assert!(snapkv(vec![("window", Int(0))]).starts_with("plan: evict.window is 0; allowed: 1..="));
    let h2o = |value| refusal(&policy("h2o", vec![("budget", value)]));
    for share in [0.0, 1.5, -0.5, f64::NAN] {
        assert!(h2o(Float(share)).ends_with("allowed: a share in (0, 1]"));
    }
    assert!(h2o(Map(vec![("bytes", Int(0))])).contains("0 bytes"));
    assert_eq!(refusal(&policy("h2o", vec![])).split(';').next(), Some("plan: evict.budget is missing"));
    for history in [0, 1, 401, 4098] {
        let spec = policy("scissorhands", vec![budget(99), ("history", Int(history))]);
        assert!(refusal(&spec).starts_with(&format!("plan: evict.history is {history}")));
    }
    for beta in [0.5, f64::NAN, 1e7] {
        assert!(
            refusal(&policy("pyramidkv", vec![budget(99), ("beta", Float(beta))])).contains("evict.beta")
        );
    }
    for floor in [-0.1, 1.1, f64::NAN] {
        let params = vec![("scores", json("tova", vec![budget(99)])), ("floor", Float(floor))];
        assert!(refusal(&policy("adakv", params)).contains("evict.floor"));
    }
    let custom = |needs| refusal(&policy("custom", vec![budget(99), ("needs", Map(needs))]));
    let none = Map(vec![("queries", Map(vec![("last", Int(0))]))]);
    assert!(custom(vec![("attention", none)]).contains("evict.needs.attention.queries.last is 0"));
    assert!(custom(vec![("distances", Text("output"))]).contains("evict.needs.distances is output"));
    let nested = policy("adakv", vec![("scores", json("snapkv", vec![budget(99), ("kernel", Int(4))]))]);
    assert!(refusal(&nested).contains("evict.scores.kernel is 4"));
    assert!(
        nested.validate_as("evict[3]", 4, 16).unwrap_err().to_string().contains("evict[3].scores.kernel")
    );
}

#[test]
fn policies_that_contradict_each_other_are_refused() {
    let scores = |name, params| ("scores", json(name, params));
    let snapkv = || scores("snapkv", vec![budget(99)]);
    let caote = || scores("caote", vec![snapkv()]);
    policy("adakv", vec![caote()]).validate(4, 16).unwrap();
    policy("pyramidkv", vec![budget(99), scores("caote", vec![scores("h2o", vec![])])])
        .validate(4, 16)
        .unwrap();
    let refused = [
        ("caote", scores("knorm", vec![budget(99)])),
        ("caote", scores("random", vec![budget(99)])),
        ("caote", scores("scissorhands", vec![budget(99)])),
        ("caote", caote()),
        ("adakv", scores("adakv", vec![snapkv()])),
        ("adakv", scores("streamingllm", vec![budget(99)])),
        ("adakv", scores("knorm", vec![budget(99)])),
        ("adakv", scores("custom", vec![budget(99)])),
        ("entropy", scores("random", vec![budget(99)])),
        ("pyramidkv", scores("adakv", vec![snapkv()])),
        ("pyramidkv", scores("streamingllm", vec![budget(99)])),
        ("pyramidkv", scores("scissorhands", vec![budget(99)])),
    ];
    for (name, scores) in refused {
        let message = refusal(&policy(name, vec![scores.clone()]));
        assert!(message.starts_with("plan: evict.scores is ") && message.contains("snapkv"), "{message}");
    }
    let two = policy("pyramidkv", vec![budget(99), scores("snapkv", vec![budget(98)])]);
    assert_eq!(refusal(&two), "plan: evict.scores.budget is 98; allowed: none, or 99 as in evict.budget");
    policy("pyramidkv", vec![snapkv()]).validate(4, 16).unwrap();
    assert!(
        refusal(&policy("adakv", vec![scores("tova", vec![])])).contains("evict.scores.budget is missing")
    );
    assert!(
        refusal(&policy("adakv", vec![scores("tova", vec![budget(9)])])).contains("evict.scores.budget is 9")
    );
}

#[test]
fn each_policy_asks_only_for_what_it_reads() {
    let attention = |fold, reduce, queries| Needs {
        attention: Some(Attention { fold, reduce, queries }),
        ..Needs::default()
    };
    let needs = |name| policy(name, vec![budget(99)]).needs();
    assert_eq!(needs("streamingllm"), Needs::default());
    assert_eq!(needs("random"), Needs::default());
    assert_eq!(needs("knorm"), Needs { key_norms: true, ..Needs::default() });
    assert_eq!(needs("h2o"), attention(Fold::Sum, Reduce::Mean, Queries::All));
    assert_eq!(needs("tova"), attention(Fold::Last, Reduce::Mean, Queries::Last(1)));
    assert_eq!(needs("scissorhands"), attention(Fold::Above, Reduce::Mean, Queries::Last(400)));
    assert_eq!(needs("pyramidkv"), attention(Fold::Sum, Reduce::Mean, Queries::Last(32)));
    let caote = PolicySpec::Caote(Caote { scores: Box::new(PolicySpec::Tova(Tova::default())), fast: true });
    assert_eq!(caote.needs(), Needs { distances: Some(Centre::Mean), ..needs("tova") });
    assert!(caote.needs().queries() && !needs("knorm").queries());
}

#[test]
fn policies_act_when_their_scores_are_known() {
    let when = |name| policy(name, vec![budget(99)]).when();
    for name in ["streamingllm", "h2o", "tova", "knorm", "random"] {
        assert_eq!(when(name), When::EveryGroup, "{name}");
    }
    for name in ["snapkv", "custom", "pyramidkv"] {
        assert_eq!(when(name), When::PromptEnd, "{name}");
    }
    assert_eq!(when("scissorhands"), When::Batches);
    let left = |name| policy(name, vec![budget(99)]).left(99, 110);
    assert_eq!((left("scissorhands"), left("h2o"), left("snapkv")), (61, 99, 99));
    let over = |name, inner| policy(name, vec![("scores", json(inner, vec![budget(99)]))]).when();
    assert_eq!((over("caote", "h2o"), over("caote", "snapkv")), (When::EveryGroup, When::PromptEnd));
    assert_eq!((over("adakv", "h2o"), over("entropy", "tova")), (When::PromptEnd, When::PromptEnd));
}

#[test]
fn specs_print_their_name_and_budget() {
    let ada = policy("adakv", vec![("scores", json("snapkv", vec![("budget", Float(0.25))]))]);
    assert_eq!(ada.to_string(), "adakv(snapkv(0.25))");
    assert_eq!(policy("pyramidkv", vec![budget(64)]).to_string(), "pyramidkv(64, snapkv)");
    assert_eq!(policy("h2o", vec![("budget", Text("4KiB"))]).to_string(), "h2o(4096B)");
}
