//! With policies and open prompts: a sequence that was forked holds what one with the same history by itself holds.

use crate::common::{codec, contents, feed, store};
use kvrs::{Cpu, Error, KvStore, LayerShape, ModelShape, Plan, PlanSpec, PolicySpec, Rope, SeqId};
use proptest::prelude::*;
use serde_json::json;

#[derive(Debug, Clone)]
enum Op {
    Feed { tokens: usize, seed: u64 },
    Prompt,
    Truncate { back: usize },
    Remove { from: usize, percent: usize },
    Keep { layer: usize, every: usize },
}

#[derive(Debug, Clone)]
enum Move {
    Do(usize, Op),
    Fork(usize),
    Reorder(Vec<usize>),
    Free(usize),
}

const MOST: usize = 5;

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let tokens = prop_oneof![3 => 1usize..3, 3 => 3usize..40, 2 => 40usize..150];
    let op = prop_oneof![
        8 => (tokens, any::<u64>()).prop_map(|(tokens, seed)| Op::Feed { tokens, seed }),
        3 => Just(Op::Prompt),
        2 => (0usize..60).prop_map(|back| Op::Truncate { back }),
        1 => (0usize..100, 0usize..101).prop_map(|(from, percent)| Op::Remove { from, percent }),
        1 => (0usize..2, 1usize..5).prop_map(|(layer, every)| Op::Keep { layer, every }),
    ];
    let one = prop_oneof![
        10 => (0usize..MOST, op).prop_map(|(row, op)| Move::Do(row, op)),
        4 => (0usize..MOST).prop_map(Move::Fork),
        1 => prop::collection::vec(0usize..MOST, MOST).prop_map(Move::Reorder),
        1 => (0usize..MOST).prop_map(Move::Free),
    ];
    prop::collection::vec(one, 1..24)
}

fn policy() -> impl Strategy<Value = Option<PolicySpec>> {
    let of = |name: &str, params: serde_json::Value| {
        serde_json::from_value::<PolicySpec>(json!({"name": name, "params": params})).unwrap()
    };
    let budget = json!({"budget": 44});
    let mut all: Vec<_> =
        ["streamingllm", "h2o", "tova", "knorm", "random"].map(|n| Some(of(n, budget.clone()))).into();
    all.push(Some(of("scissorhands", json!({"budget": 60, "history": 20}))));
    all.push(Some(of("snapkv", json!({"budget": 44, "window": 8, "kernel": 3}))));
    all.push(None);
    prop::sample::select(all)
}

fn plan(bits: f64, policy: Option<&PolicySpec>) -> Plan {
    let rope = Some(Rope::new(1e4));
    let layer = LayerShape { query_heads: 2, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    let spec = PlanSpec::uniform(ModelShape::uniform(2, layer), codec(bits), codec(bits));
    let evict = policy.map_or_else(Vec::new, |policy| vec![Some(policy.clone()); 2]);
    Plan::new(PlanSpec { sinks: 3, recent: 8, evict, ..spec }).unwrap()
}

/// A sequence: its id, what was done to it, and whether its prompt is open.
#[derive(Debug, Clone)]
struct One {
    id: SeqId,
    done: Vec<Op>,
    open: bool,
}

/// Does something to a sequence of a store; whether it was not refused.
fn act(store: &KvStore<Cpu>, id: SeqId, open: &mut bool, op: &Op) -> bool {
    let length = store.length(id, None).unwrap();
    let answer = match *op {
        Op::Feed { tokens, seed } => feed(store, id, tokens, seed),
        Op::Prompt => {
            *open = !*open;
            if *open { store.begin_prompt(&[id]) } else { store.end_prompt(&[id]) }
        }
        Op::Truncate { back } => store.drop_last(id, back.min(length)),
        Op::Remove { from, percent } => {
            let start = length * from / 100;
            store.remove(id, start, start + (length - start) * percent / 100)
        }
        Op::Keep { layer, every } => {
            let kept = |head| {
                let all = store.kept_positions(id, layer, head).unwrap().into_iter();
                all.filter(|p| (*p as usize).is_multiple_of(every)).collect()
            };
            store.keep(id, layer, &[0, 1].map(kept))
        }
    };
    assert!(matches!(answer, Ok(()) | Err(Error::Sequence { .. })), "{op:?}: {answer:?}");
    answer.is_ok()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_fork_goes_on_as_a_sequence_with_the_same_history_by_itself(
        policy in policy(), bits in prop::sample::select(vec![0.0, 2.5, 4.0]), moves in moves(),
    ) {
        let plan = plan(bits, policy.as_ref());
        let shared = store(&plan, None);
        let mut live: Vec<One> = Vec::new();
        for step in moves {
            if live.is_empty() {
                live.push(One { id: shared.create(1).unwrap()[0], done: Vec::new(), open: false });
            }
            let count = live.len();
            match step {
                Move::Do(row, op) => {
                    let one = &mut live[row % count];
                    if act(&shared, one.id, &mut one.open, &op) {
                        one.done.push(op);
                    }
                }
                Move::Fork(row) if count < MOST => {
                    let one = live[row % count].clone();
                    live.push(One { id: shared.fork(one.id).unwrap(), ..one });
                }
                Move::Fork(_) => {}
                Move::Reorder(index) => {
                    let index: Vec<usize> = index[..count].iter().map(|i| i % count).collect();
                    shared.reorder(&live.iter().map(|one| one.id).collect::<Vec<_>>(), &index).unwrap();
                    let moved = live.iter().zip(&index).map(|(one, i)| One { id: one.id, ..live[*i].clone() });
                    live = moved.collect();
                }
                Move::Free(row) => shared.free(live.swap_remove(row % count).id).unwrap(),
            }
            shared.check().unwrap();
        }
        for one in &live {
            let (alone, mut open) = (store(&plan, None), false);
            let id = alone.create(1).unwrap()[0];
            for op in &one.done {
                prop_assert!(act(&alone, id, &mut open, op));
            }
            prop_assert_eq!(contents(&alone, id), contents(&shared, one.id));
        }
        for one in &live {
            shared.free(one.id).unwrap();
        }
        prop_assert_eq!(shared.stats().unwrap().bytes_total, 0);
    }
}

#[test]
fn a_cut_below_the_last_eviction_of_a_policy_that_acts_as_tokens_come_is_refused() {
    let h2o = serde_json::from_value(json!({"name": "h2o", "params": {"budget": 44}})).unwrap();
    let store = store(&plan(4.0, Some(&h2o)), None);
    let id = store.create(1).unwrap()[0];
    feed(&store, id, 40, 1).unwrap();
    store.truncate(id, 30).unwrap();
    (0..60).for_each(|i| feed(&store, id, 1, i).unwrap());
    let length = store.length(id, None).unwrap();
    let before = contents(&store, id);
    let error = store.drop_last(id, 40).unwrap_err().to_string();
    assert!(error.contains("h2o in layer 0 dropped tokens"), "{error}");
    assert_eq!(contents(&store, id), before);
    let least: usize = error.split("0 or ").nth(1).unwrap().split("..").next().unwrap().parse().unwrap();
    assert!(store.truncate(id, least - 1).is_err() && least <= length);
    store.truncate(id, least).unwrap();
    store.truncate(id, 0).unwrap();
}
