//! Whatever a sequence has been through, its file holds all of it, and both go on in the same way.

use crate::common::{
    codec, contents, evicting, fed, feed, loaded, plan, policy, raw, saved, store, store_on,
};
use kvrs::{Compress, Cpu, KvStore, Plan, SeqId};
use proptest::prelude::*;
use serde_json::{Value, json};

#[derive(Debug, Clone)]
pub(crate) enum Op {
    Feed { tokens: usize, seed: u64 },
    Prompt { tokens: usize, seed: u64 },
    Truncate { back: usize },
    Remove { from: usize, percent: usize },
    Keep { layer: usize, every: usize },
    Fork,
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let tokens = prop_oneof![3 => 1usize..3, 3 => 3usize..40, 2 => 40usize..150];
    prop_oneof![
        8 => (tokens.clone(), any::<u64>()).prop_map(|(tokens, seed)| Op::Feed { tokens, seed }),
        3 => (tokens, any::<u64>()).prop_map(|(tokens, seed)| Op::Prompt { tokens, seed }),
        2 => (0usize..60).prop_map(|back| Op::Truncate { back }),
        1 => (0usize..100, 0usize..101).prop_map(|(from, percent)| Op::Remove { from, percent }),
        1 => (0usize..2, 1usize..5).prop_map(|(layer, every)| Op::Keep { layer, every }),
        1 => Just(Op::Fork),
    ]
}

fn plans() -> Vec<(String, Plan)> {
    let codecs: Vec<(&str, Value)> = vec![
        ("raw16", json!({})),
        ("turboquant", json!({"bits": 4})),
        ("turboquant", json!({"bits": 2.5})),
        ("kivi", json!({"bits": 2, "group": 32})),
        ("rabitq", json!({"bits": 3})),
        ("int8", json!({})),
        ("fp8", json!({})),
    ];
    let codecs: Vec<_> =
        codecs.iter().map(|(name, params)| (format!("{name} {params}"), codec(name, params))).collect();
    let mut all: Vec<_> = codecs.iter().map(|(name, codec)| (name.clone(), plan(codec))).collect();
    let budget = json!({"budget": 44});
    let mut policies: Vec<_> =
        ["streamingllm", "h2o", "tova", "knorm", "random"].map(|name| (name, budget.clone())).into();
    policies.push(("h2o", json!({"budget": 0.5})));
    policies.push(("scissorhands", json!({"budget": 60, "history": 20})));
    policies.push(("snapkv", json!({"budget": 44, "window": 8, "kernel": 3})));
    policies.push(("adakv", json!({"scores": {"name": "snapkv", "params": {"budget": 44, "window": 8}}})));
    for (name, params) in policies {
        for (codec_name, codec) in &codecs[..2] {
            all.push((format!("{name} {params} on {codec_name}"), evicting(codec, &policy(name, &params))));
        }
    }
    all
}

/// A plan that prints as its name.
#[derive(Clone)]
pub(crate) struct Named(String, pub(crate) Plan);

impl std::fmt::Debug for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

pub(crate) fn any_plan() -> impl Strategy<Value = Named> {
    prop::sample::select(plans().into_iter().map(|(name, plan)| Named(name, plan)).collect::<Vec<_>>())
}

/// Does something to a sequence; what came out, and whether it was refused.
pub(crate) fn act(store: &KvStore<Cpu>, id: SeqId, op: &Op) -> kvrs::Result<Vec<u32>> {
    let length = store.length(id, None)?;
    match *op {
        Op::Feed { tokens, seed } => feed(store, id, tokens, seed),
        Op::Prompt { tokens, seed } => {
            store.begin_prompt(&[id])?;
            let first = feed(store, id, tokens, seed);
            let second = feed(store, id, 5, seed + 1);
            store.end_prompt(&[id])?;
            Ok([first?, second?].concat())
        }
        Op::Truncate { back } => store.truncate(id, length.saturating_sub(back)).map(|()| Vec::new()),
        Op::Remove { from, percent } => {
            // Removing what a prompt's end moves is not this test's business.
            if !store.plan().spec().evict.is_empty() {
                return Ok(Vec::new());
            }
            let start = length * from / 100;
            store.remove(id, start, start + (length - start) * percent / 100).map(|()| Vec::new())
        }
        Op::Keep { layer, every } => {
            let heads = store.plan().spec().shape.layers[layer].kv_heads;
            let kept = |head| -> kvrs::Result<Vec<i64>> {
                let all = store.kept_positions(id, layer, head)?;
                Ok(all.into_iter().filter(|p| (*p as usize + head).is_multiple_of(every)).collect())
            };
            let lists = (0..heads).map(kept).collect::<kvrs::Result<Vec<_>>>()?;
            store.keep(id, layer, &lists).map(|()| Vec::new())
        }
        Op::Fork => {
            let fork = store.fork(id)?;
            feed(store, fork, 20, 9)?;
            store.free(fork).map(|()| Vec::new())
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_loaded_sequence_goes_on_as_the_saved_one(
        plan in any_plan(), before in prop::collection::vec(op(), 0..8), after in prop::collection::vec(op(), 1..6),
        start in any::<u64>(), deflate: bool,
    ) {
        let (one, other) = (store_on(&plan.1, 1), store_on(&plan.1, 3));
        let _content = fed(&other, 70, start);
        let id = fed(&one, (start % 90) as usize, start);
        for op in &before {
            let _ = act(&one, id, op);
        }
        let compress = if deflate { Compress::Deflate } else { Compress::None };
        let file = saved(&one, id, compress);
        let copy = loaded(&other, &file).unwrap();
        other.check().unwrap();
        prop_assert_eq!(contents(&one, id), contents(&other, copy));
        prop_assert_eq!(one.selection_report(id).unwrap(), other.selection_report(copy).unwrap());
        prop_assert!(saved(&other, copy, compress) == file, "a loaded sequence gives the same file");
        for op in &after {
            let (expected, got) = (act(&one, id, op), act(&other, copy, op));
            prop_assert_eq!(expected.is_ok(), got.is_ok(), "{:?}: {:?} {:?}", op, expected.err(), got.err());
            prop_assert_eq!(expected.ok(), got.ok(), "{:?}", op);
        }
        prop_assert_eq!(contents(&one, id), contents(&other, copy));
        prop_assert!(saved(&one, id, compress) == saved(&other, copy, compress), "files after the same steps");
        other.reset().unwrap();
        other.check().unwrap();
        prop_assert_eq!(other.stats().unwrap().bytes_total, 0);
    }
}

#[test]
fn empty_and_one_token_sequences_come_back() {
    for tokens in [0, 1] {
        let (one, other) = (store(&plan(&raw())), store(&plan(&raw())));
        let id = fed(&one, tokens, 1);
        let copy = loaded(&other, &saved(&one, id, Compress::None)).unwrap();
        assert_eq!(other.length(copy, None).unwrap(), tokens);
        assert_eq!(feed(&one, id, 30, 2).unwrap(), feed(&other, copy, 30, 2).unwrap());
    }
}

#[test]
fn one_file_can_be_loaded_many_times_and_into_its_own_store() {
    let store = store(&plan(&raw()));
    let id = fed(&store, 200, 3);
    let file = saved(&store, id, Compress::None);
    let copies: Vec<SeqId> = (0..5).map(|_| loaded(&store, &file).unwrap()).collect();
    for copy in &copies {
        assert_eq!(contents(&store, id), contents(&store, *copy));
    }
    store.free(id).unwrap();
    assert!(feed(&store, copies[0], 50, 4).is_ok());
    assert_ne!(contents(&store, copies[0]), contents(&store, copies[1]));
}

#[test]
fn what_a_page_held_before_is_not_saved() {
    let plan = plan(&codec("turboquant", &json!({"bits": 4})));
    let (used, fresh) = (store(&plan), store(&plan));
    let _holds_the_chunk = [fed(&used, 40, 1), fed(&fresh, 40, 1)];
    let secret = fed(&used, 300, 5);
    used.free(secret).unwrap();
    let ids = [&used, &fresh].map(|store| (store, fed(store, 45, 6)));
    let [one, other] = ids.map(|(store, id)| saved(store, id, Compress::None));
    assert!(one == other, "slots that were never filled are zeros");
}
