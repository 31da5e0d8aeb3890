//! Bytes that really go.

use crate::common::{Input, Reference, SEQ, kept, policy, shape, spec, store};
use kvrs::{CodecSpec, Dtype, KvStore, LayerShape, ModelShape, Plan, PlanSpec};
use kvrs_testkit::Tensor;
use kvrs_testkit::attention::{Head, Scoring, relative_error};
use kvrs_testkit::pair::threads;
use serde_json::json;

const LAYERS: usize = 14;

/// Qwen2.5-Coder-1.5B's attention, in few layers.
fn qwen(layers: usize) -> ModelShape {
    let layer = LayerShape { query_heads: 12, key_dim: 128, value_dim: 128, ..shape(1).layers[0].clone() };
    ModelShape::uniform(layers, layer)
}

fn plan(codec: &CodecSpec, layers: usize) -> Plan {
    let policy = policy("snapkv", &json!({"budget": 1024}));
    let shape = qwen(layers);
    let evict = vec![Some(policy); layers];
    Plan::new(PlanSpec { evict, ..PlanSpec::uniform(shape, codec.clone(), codec.clone()) }).unwrap()
}

/// Bytes of the store over those of a 16-bit cache, straight after a prompt of 8192 tokens.
fn share(codec: &CodecSpec, open: bool) -> f64 {
    let plan = plan(codec, LAYERS);
    let input = Input::new(&qwen(1), 8192, 3);
    let store = store(&plan, 2);
    let x = &input.layers[0];
    let feed = |from: usize, to: usize| {
        let [q, k, v] = [0, 1, 2].map(|i| x[i].columns(from, to));
        for layer in 0..LAYERS {
            let tokens = kvrs::Tokens::new(k.view(), v.view());
            store.append_with(layer, &[SEQ], &tokens, &kvrs::Queries::new(q.view())).unwrap();
        }
    };
    if open {
        store.begin_prompt(&[SEQ]).unwrap();
        (0..8192).step_by(2048).for_each(|from| feed(from, from + 2048));
        store.end_prompt(&[SEQ]).unwrap();
    } else {
        feed(0, 8192);
    }
    store.check().unwrap();
    assert!(kept(&store).iter().flatten().all(|head| head.len() == 1024));
    let full = LAYERS * 2 * 8192 * 512;
    store.stats().unwrap().bytes_total as f64 / full as f64
}

#[test]
fn an_eighth_of_a_prompt_takes_an_eighth_of_the_bytes() {
    let raw = share(&CodecSpec::raw16(), false);
    assert!(raw <= 0.14, "raw16: {raw}");
    for open in [false, true] {
        let packed = share(&CodecSpec::turboquant(4.0), open);
        assert!(packed <= 0.055, "turboquant 4, open {open}: {packed}");
    }
}

#[test]
fn heads_with_their_own_budgets_have_their_own_pages() {
    let adakv =
        policy("adakv", &json!({"scores": {"name": "snapkv", "params": {"budget": 300, "window": 16}}}));
    let plan = Plan::new(spec(&CodecSpec::turboquant(4.0), &adakv, 4, 32)).unwrap();
    let mut input = Input::new(&plan.spec().shape, 1200, 3);
    // One head looks at a few tokens, the other everywhere.
    let q = &mut input.layers[0][0];
    for (head, token) in (0..2).flat_map(|h| (0..1200).map(move |t| (h, t))) {
        let row: Vec<f32> = q.row([0, head, token]).iter().map(|x| x * 4.0).collect();
        q.set_row([0, head, token], &row);
    }
    let store = store(&plan, 2);
    input.run(&store, 1200, 1200);
    let counts: Vec<usize> = kept(&store)[0].iter().map(Vec::len).collect();
    assert!(counts[0] != counts[1] && counts.iter().sum::<usize>() == 600, "{counts:?}");
    let stats = store.stats().unwrap();
    let all: Vec<usize> = kept(&store).iter().flatten().map(Vec::len).collect();
    // Sinks in one raw page, the window of 32 in two.
    let packed: usize = all.iter().map(|n| (n - 4 - 32).div_ceil(64)).sum();
    let used = usize::try_from(stats.pages_total - stats.pages_free).unwrap();
    assert_eq!(used, packed + 3 * all.len(), "{counts:?}");
    let report = store.selection_report(SEQ).unwrap();
    let reported: Vec<usize> = report.iter().map(|head| head.kept).collect();
    assert_eq!(reported, all);
    assert!(report.iter().all(|h| (h.policy, h.budget, h.logical) == (Some("adakv"), Some(300), 1200)));
}

#[test]
fn a_long_prompt_fits_where_its_own_keys_and_values_fit() {
    let (layers, tokens) = (4, 32_768);
    let codec = CodecSpec::turboquant(4.0);
    let policy = policy("snapkv", &json!({"budget": 1024}));
    let shape = shape(layers);
    let evict = vec![Some(policy); layers];
    let spec = PlanSpec { evict, ..PlanSpec::uniform(shape.clone(), codec.clone(), codec) };
    let own = (layers * 2 * tokens * 128) as u64;
    let input = Input::new(&ModelShape { layers: shape.layers[..1].to_vec() }, tokens, 1);
    let store = KvStore::new(Plan::new(spec).unwrap(), threads(2), Some(own)).unwrap();
    store.create(1).unwrap();
    let [q, k, v] = &input.layers[0];
    let mut peak = 0;
    for layer in 0..layers {
        let tokens = kvrs::Tokens::new(k.view(), v.view());
        store.append_with(layer, &[SEQ], &tokens, &kvrs::Queries::new(q.view())).unwrap();
        peak = peak.max(store.stats().unwrap().bytes_total);
    }
    assert!(peak <= own / 2, "raw pages go from layer to layer: {peak} of {own}");
    assert!(kept(&store).iter().flatten().all(|head| head.len() == 1024));
}

#[test]
fn a_step_that_does_not_fit_is_refused_in_the_first_layer_and_changes_nothing() {
    let policy = policy("snapkv", &json!({"budget": 64, "window": 16}));
    for codec in [CodecSpec::raw16(), CodecSpec::turboquant(4.0)] {
        let plan = Plan::new(spec(&codec, &policy, 4, 16)).unwrap();
        let input = Input::new(&plan.spec().shape, 6000, 1);
        let store = KvStore::new(plan, threads(1), Some(1 << 20)).unwrap();
        store.create(1).unwrap();
        for open in [false, true] {
            if open {
                store.begin_prompt(&[SEQ]).unwrap();
            }
            let before = store.stats().unwrap();
            let error = input.extend(&store, 0, 6000).unwrap_err();
            assert!(matches!(error, kvrs::Error::Capacity { .. }), "{error}");
            assert_eq!(store.stats().unwrap(), before);
            assert_eq!([0, 1].map(|l| store.length(SEQ, Some(l)).unwrap()), [0, 0]);
        }
        input.extend(&store, 0, 1000).unwrap();
        store.end_prompt(&[SEQ]).unwrap();
        assert_eq!(kept(&store)[1][1].len(), 64);
        store.free(SEQ).unwrap();
        assert_eq!(store.stats().unwrap().bytes_total, 0);
    }
}

#[test]
fn heads_that_keep_different_tokens_attend_to_their_own_and_stored_keys_stay() {
    let layer = LayerShape { query_heads: 8, kv_heads: 4, ..shape(1).layers[0].clone() };
    let shape = ModelShape::uniform(1, layer);
    let plan = PlanSpec {
        sinks: 0,
        recent: 16,
        ..PlanSpec::uniform(shape.clone(), CodecSpec::raw16(), CodecSpec::raw16())
    };
    let store = store(&Plan::new(plan).unwrap(), 2);
    let input = Input::new(&shape, 512, 5);
    input.extend(&store, 0, 512).unwrap();
    let before = store.stats().unwrap();
    let lists: Vec<Vec<i64>> =
        (0..4).map(|head| (0..512).filter(|t| t * 7 % 512 < 64 + 16 * head || *t >= 496).collect()).collect();
    store.keep(SEQ, 0, &lists).unwrap();
    store.check().unwrap();
    let [q, k, v] = &input.layers[0];
    let mut pages = 0;
    for (head, list) in lists.iter().enumerate() {
        assert_eq!(store.kept_positions(SEQ, 0, head).unwrap(), *list);
        let stored = store.decode(0, SEQ, head).unwrap();
        let mut some = Head::default();
        for (i, t) in list.iter().map(|t| usize::try_from(*t).unwrap()).enumerate() {
            assert_eq!(stored.keys[i * 32..(i + 1) * 32], k.row([0, head, t]));
            some.push(t, k.row([0, head, t]), v.row([0, head, t]));
        }
        pages += (list.len() - 16).div_ceil(16) + 1;
        // Pairs of opposite queries, whose mean is zero.
        let row = q.row([0, 2 * head, 511]);
        let pair = [row.clone(), row.iter().map(|x| -x).collect()].concat();
        let values: Vec<f32> = (0..4).flat_map(|_| pair.clone()).collect();
        let q = Tensor::new(Dtype::F16, [1, 8, 1, 32], &values);
        let mut out = Tensor::zeros(Dtype::F32, [1, 8, 1, 32]);
        store.attend(0, &[SEQ], &kvrs::Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
        for query_head in [2 * head, 2 * head + 1] {
            let expected = some.attend(&q.row([0, query_head, 0]), Some(511), 32, Scoring::default());
            let got = out.row([0, query_head, 0]);
            assert!(got.iter().all(|x| x.is_finite()) && relative_error(&got, &expected.out) < 2e-3);
        }
    }
    let after = store.stats().unwrap();
    assert_eq!(after.pages_total - after.pages_free, pages as u64);
    assert!(after.bytes_window < before.bytes_window / 3);
}

#[test]
fn bytes_grow_with_the_key_value_heads_only() {
    let used = |query_heads: usize, kv_heads: usize| {
        let layer = LayerShape { query_heads, kv_heads, ..shape(1).layers[0].clone() };
        let shape = ModelShape::uniform(1, layer);
        let codec = CodecSpec::turboquant(4.0);
        let evict = vec![Some(policy("snapkv", &json!({"budget": 100, "window": 16})))];
        let spec = PlanSpec {
            sinks: 4,
            recent: 16,
            evict,
            ..PlanSpec::uniform(shape.clone(), codec.clone(), codec)
        };
        let input = Input::new(&shape, 300, 5);
        let store = store(&Plan::new(spec.clone()).unwrap(), 1);
        input.run(&store, 300, 300);
        let reference = Reference { spec: &spec, input: &input, layer: 0, group: 16 };
        assert_eq!(kept(&store)[0], reference.kept(300, 300), "{query_heads} on {kv_heads} heads");
        let stats = store.stats().unwrap();
        stats.bytes_codes + stats.bytes_scales + stats.bytes_window
    };
    assert_eq!(used(32, 8), used(8, 8));
    for (query_heads, kv_heads) in [(24, 4), (21, 3), (14, 2), (8, 1), (7, 1)] {
        assert_eq!(8 * used(query_heads, kv_heads), kv_heads as u64 * used(8, 8));
    }
}
