//! Bad input: a typed error that names the argument, its value and what is allowed, before anything changed.
#![allow(clippy::unwrap_used, reason = "a test may")]

use kvrs::{
    CodecSpec, Cpu, Dtype, Error, Geometry, KvStore, LayerShape, ModelShape, Plan, PlanSpec, Queries, Result,
    Rope, SeqId, Tokens, View, ViewMut,
};
use kvrs_testkit::{Noise, Tensor};
use std::path::PathBuf;

const OLD: usize = 40;
const NEW: usize = 5;

/// Two layers, two key-value heads of 32 channels, small windows: 40 tokens are partly encoded.
fn spec() -> PlanSpec {
    let rope = Some(Rope::new(1e4));
    let layer = LayerShape { query_heads: 4, kv_heads: 2, key_dim: 32, value_dim: 32, rope, sliding: None };
    let codec = CodecSpec::turboquant(4.0);
    PlanSpec { sinks: 2, recent: 8, ..PlanSpec::uniform(ModelShape::uniform(2, layer), codec.clone(), codec) }
}

struct Fixture {
    store: KvStore,
    seqs: Vec<SeqId>,
}

impl Fixture {
    fn new() -> Self {
        let store = KvStore::new(Plan::new(spec()).unwrap(), Cpu::shared(), Some(4 << 20)).unwrap();
        let freed = store.create(1).unwrap()[0];
        let seqs = store.create(2).unwrap();
        store.free(freed).unwrap();
        let fixture = Self { store, seqs };
        (0..2).for_each(|layer| fixture.append(layer, OLD).unwrap());
        fixture
    }

    fn append(&self, layer: usize, tokens: usize) -> Result<()> {
        let k = tensor(2, tokens);
        self.store.append(layer, &self.seqs, &Tokens::new(k.view(), k.view()))
    }

    /// Everything that the store tells about itself.
    fn contents(&self) -> String {
        let mut all = vec![format!("{:?}", self.store.stats().unwrap())];
        for &seq in &self.seqs {
            for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let decoded = self.store.decode(layer, seq, head).unwrap();
                all.push(format!("{:?} {decoded:?}", self.store.length(seq, Some(layer))));
            }
        }
        all.concat()
    }

    /// The error of a call that must leave everything as it was.
    #[track_caller]
    fn refused(&self, call: impl FnOnce(&Self) -> Result<()>) -> Error {
        let before = self.contents();
        let error = call(self).expect_err("a refusal");
        assert_eq!(self.contents(), before, "changed by a call that failed with: {error}");
        self.store.check().unwrap();
        error
    }

    /// The store goes on as if nothing had happened.
    fn goes_on(&self) {
        let lengths = self.seqs.iter().map(|s| self.store.length(*s, None).unwrap()).collect::<Vec<_>>();
        (0..2).for_each(|layer| self.append(layer, NEW).unwrap());
        let after = self.seqs.iter().map(|s| self.store.length(*s, None).unwrap());
        assert_eq!(after.collect::<Vec<_>>(), lengths.iter().map(|n| n + NEW).collect::<Vec<_>>());
        let (q, mut out) = (query(2, 1), Tensor::zeros(Dtype::F32, [2, 4, 1, 32]));
        self.store.attend(0, &self.seqs, &Queries::new(q.view()), &mut out.view_mut(), None).unwrap();
        assert!(out.row([1, 3, 0]).iter().all(|x| x.is_finite()));
        self.store.check().unwrap();
    }
}

fn tensor(rows: usize, tokens: usize) -> Tensor {
    Tensor::normal(Dtype::F32, [rows, 2, tokens, 32], &mut Noise::new(7))
}

fn query(rows: usize, tokens: usize) -> Tensor {
    Tensor::normal(Dtype::F32, [rows, 4, tokens, 32], &mut Noise::new(8))
}

/// `append` of layer 0 with keys and values of given shapes.
fn append_shaped(f: &Fixture, k: [usize; 4], v: [usize; 4]) -> Result<()> {
    let (k, v) = (Tensor::zeros(Dtype::F32, k), Tensor::zeros(Dtype::F32, v));
    f.store.append(0, &f.seqs, &Tokens::new(k.view(), v.view()))
}

fn append_with(f: &Fixture, mask: Option<&[bool]>, positions: Option<&[i64]>) -> Result<()> {
    let k = tensor(2, NEW);
    f.store.append(0, &f.seqs, &Tokens { mask, positions, ..Tokens::new(k.view(), k.view()) })
}

/// `attend` of layer 0 with a query and an output of given shapes.
fn attend_shaped(
    f: &Fixture,
    q: [usize; 4],
    out: [usize; 4],
    change: impl Fn(Queries<'_>) -> Queries<'_>,
) -> Result<()> {
    let (q, mut out) = (Tensor::zeros(Dtype::F32, q), Tensor::zeros(Dtype::F32, out));
    f.store.attend(0, &f.seqs, &change(Queries::new(q.view())), &mut out.view_mut(), None)
}

fn attend_with(f: &Fixture, change: impl Fn(Queries<'_>) -> Queries<'_>) -> Result<()> {
    attend_shaped(f, [2, 4, 3, 32], [2, 4, 3, 32], change)
}

fn attend_seqs(f: &Fixture, seqs: &[SeqId]) -> Result<()> {
    let (q, mut out) = (query(seqs.len(), 1), Tensor::zeros(Dtype::F32, [seqs.len(), 4, 1, 32]));
    f.store.attend(0, seqs, &Queries::new(q.view()), &mut out.view_mut(), None)
}

fn append_seqs(f: &Fixture, seqs: &[SeqId]) -> Result<()> {
    let k = tensor(seqs.len(), NEW);
    f.store.append(0, seqs, &Tokens::new(k.view(), k.view()))
}

/// Checks the variant and what the message must contain, for one refused call after the other.
macro_rules! refuses {
    ($($variant:ident: $call:expr => [$($phrase:expr),+ $(,)?];)+) => {{
        let fixture = Fixture::new();
        $(
            let error = fixture.refused($call);
            assert!(matches!(error, Error::$variant { .. }), "{}: {error:?}", stringify!($call));
            $(assert!(error.to_string().contains($phrase), "{:?} is not in: {error}", $phrase);)+
        )+
        fixture.goes_on();
    }};
}

#[test]
fn wrong_extents_are_named() {
    let good = [2, 2, NEW, 32];
    refuses! {
        Shape: |f| append_shaped(f, [2, 3, NEW, 32], good) => ["k has shape [2, 3, 5, 32]", "2 heads"];
        Shape: |f| append_shaped(f, good, [2, 1, NEW, 32]) => ["v has shape [2, 1, 5, 32]", "2 heads"];
        Shape: |f| append_shaped(f, [2, 2, NEW, 64], good) => ["k has shape [2, 2, 5, 64]", "32"];
        Shape: |f| append_shaped(f, good, [2, 2, NEW, 16]) => ["v has shape [2, 2, 5, 16]", "32"];
        Shape: |f| append_shaped(f, [3, 2, NEW, 32], good) => ["k has shape [3, 2, 5, 32]", "2 sequences"];
        Shape: |f| append_shaped(f, good, [2, 2, 4, 32]) => ["v has shape [2, 2, 4, 32]", "as many tokens as k: 5"];
        Shape: |f| attend_shaped(f, [2, 3, 1, 32], [2, 4, 1, 32], |q| q) => ["q has shape [2, 3, 1, 32]", "4 heads"];
        Shape: |f| attend_shaped(f, [2, 4, 1, 16], [2, 4, 1, 32], |q| q) => ["q has shape [2, 4, 1, 16]", "32"];
        Shape: |f| attend_shaped(f, [1, 4, 1, 32], [1, 4, 1, 32], |q| q) => ["q has shape [1, 4, 1, 32]", "2 sequences"];
        Shape: |f| attend_shaped(f, [2, 4, 1, 32], [2, 4, 2, 32], |q| q) => ["out has shape [2, 4, 2, 32]", "[2, 4, 1, 32]"];
        Shape: |f| attend_shaped(f, [2, 4, 41, 32], [2, 4, 41, 32], |q| q) => ["q of row 0", "41 queries", "at most 40"];
    }
}

#[test]
fn a_view_outside_its_bytes_or_onto_itself_is_named() {
    let bytes = vec![0u8; 4 * 2 * 2 * NEW * 32 - 1];
    let error = View::new("k", &bytes, Geometry::contiguous(Dtype::F32, [2, 2, NEW, 32])).unwrap_err();
    assert!(
        matches!(error, Error::Shape { .. }) && error.to_string().contains("a tensor inside its 2559 bytes"),
        "{error}"
    );
    let mut bytes = vec![0u8; 4096];
    let overlapping = Geometry { strides: [0, 32, 32, 1], ..Geometry::contiguous(Dtype::F32, [2, 4, 1, 32]) };
    let error = ViewMut::new("out", &mut bytes, overlapping).unwrap_err();
    assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains("do not overlap"), "{error}");
}

#[test]
fn wrong_types_are_named() {
    let (f16, f32) = (Tensor::zeros(Dtype::F16, [2, 2, NEW, 32]), tensor(2, NEW));
    refuses! {
        DType: |f| f.store.append(0, &f.seqs, &Tokens::new(f16.view(), f16.view())) => ["k has dtype float16", "float32"];
        DType: |f| f.store.append(0, &f.seqs, &Tokens::new(f32.view(), f16.view())) => ["v has dtype float16", "k: float32"];
    }
    let plan = Plan::new(PlanSpec { window_dtype: Some("bfloat16".into()), ..spec() }).unwrap();
    let store = KvStore::new(plan, Cpu::shared(), None).unwrap();
    let seqs = store.create(2).unwrap();
    let error = store.append(0, &seqs, &Tokens::new(f16.view(), f16.view())).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("k has dtype float16; allowed: float32 or the plan's window_dtype bfloat16")
    );
}

#[test]
fn layers_heads_and_ids_are_named() {
    let dead = SeqId(0);
    refuses! {
        Argument: |f| f.append(2, NEW) => ["layer is 2", "0..2"];
        Argument: |f| f.store.length(f.seqs[0], Some(9)).map(drop) => ["layer is 9", "0..2"];
        Argument: |f| f.store.decode(0, f.seqs[0], 2).map(drop) => ["head is 2", "0..2"];
        Argument: |f| f.store.kept_positions(f.seqs[0], 0, 7).map(drop) => ["head is 7", "0..2"];
        Sequence: |f| append_seqs(f, &[f.seqs[0], SeqId(99)]) => ["99", "2 sequences live"];
        Sequence: |f| append_seqs(f, &[dead, f.seqs[1]]) => ["seq is 0", "not freed"];
        Sequence: |f| append_seqs(f, &[f.seqs[1], f.seqs[1]]) => ["seqs is 2 twice", "each id once"];
        Sequence: |f| attend_seqs(f, &[f.seqs[1], f.seqs[1]]) => ["seqs is 2 twice", "each id once"];
        Sequence: |f| attend_seqs(f, &[dead]) => ["seq is 0"];
        Sequence: |f| f.store.reserve(&[f.seqs[0], f.seqs[0]], 3) => ["seqs is 1 twice"];
        Sequence: |f| f.store.free(dead) => ["seq is 0"];
        Sequence: |f| f.store.length(dead, None).map(drop) => ["seq is 0"];
        Sequence: |f| f.store.truncate(dead, 0) => ["seq is 0"];
        Sequence: |f| f.store.truncate(f.seqs[0], 41) => ["n is 41", "0..=40"];
        Sequence: |f| f.store.reserve(&f.seqs, usize::MAX) => ["tokens is 40 + 18446744073709551615", "at most"];
        Argument: |f| f.store.create(1 << 30).map(drop) => ["n is 1073741824", "0..="];
    }
}

#[test]
fn numbers_that_cannot_be_stored_are_named_by_row_head_and_token() {
    for (value, text) in
        [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf"), (65505.0, "65505")]
    {
        let good = tensor(2, NEW);
        let mut bad = good.clone();
        let mut row = vec![0.0; 32];
        row[31] = value;
        bad.set_row([1, 0, 3], &row);
        let (q, out) = (query(2, NEW), Tensor::zeros(Dtype::F32, [2, 4, NEW, 32]));
        let extend = |f: &Fixture, tokens: &Tokens<'_>| {
            f.store.extend(0, &f.seqs, &Queries::new(q.view()), tokens, &mut out.clone().view_mut(), None)
        };
        let (in_k, in_v) = (Tokens::new(bad.view(), good.view()), Tokens::new(good.view(), bad.view()));
        refuses! {
            Argument: |f| f.store.append(0, &f.seqs, &in_k) => ["k at row 1, head 0, token 3", text, "65504"];
            Argument: |f| f.store.append(1, &f.seqs, &in_v) => ["v at row 1, head 0, token 3", text, "65504"];
            Argument: |f| extend(f, &in_k) => ["k at row 1, head 0, token 3", text, "65504"];
        }
        let fixture = Fixture::new();
        let mask: Vec<bool> = (0..2 * NEW).map(|i| i != NEW + 3).collect();
        fixture.store.append(0, &fixture.seqs, &Tokens { mask: Some(&mask), ..in_k }).unwrap();
        assert_eq!(fixture.store.length(fixture.seqs[1], Some(0)).unwrap(), OLD + NEW - 1);
    }
}

#[test]
fn masks_and_positions_that_do_not_fit_are_named() {
    let next: Vec<i64> = [40, 41, 42, 43, 44].repeat(2);
    let changed = |at: usize, value: i64| {
        let mut positions = next.clone();
        positions[at] = value;
        positions
    };
    let (hole, back, late) = (changed(7, 43), changed(1, 40), [41i64, 42, 43, 44, 45].repeat(2));
    refuses! {
        Shape: |f| append_with(f, Some(&[true; 9]), None) => ["mask has shape 9 elements", "[2, 5]"];
        Shape: |f| append_with(f, None, Some(&next[..5])) => ["positions has shape 5 elements", "[2, 5]"];
        Shape: |f| attend_with(f, |q| Queries { mask: Some(&[true; 5]), ..q }) => ["mask has shape 5 elements", "[2, 3]"];
        Sequence: |f| append_with(f, None, Some(&hole)) => ["positions at row 1, token 2", "43", "42"];
        Sequence: |f| append_with(f, None, Some(&back)) => ["positions at row 0, token 1", "40", "41"];
        Sequence: |f| append_with(f, None, Some(&late)) => ["positions of row 0", "41", "40"];
        Sequence: |f| f.store.keep(f.seqs[0], 0, &[vec![3, 50], vec![]]) => ["positions of head 0", "50", "kept_positions"];
        Sequence: |f| f.store.keep(f.seqs[0], 0, &[vec![], vec![9, 9]]) => ["positions of head 1", "9 then 9", "ascending"];
        Sequence: |f| f.store.keep(f.seqs[0], 0, &[vec![-1], vec![]]) => ["positions of head 0", "-1"];
        Shape: |f| f.store.keep(f.seqs[0], 0, &[vec![3]]) => ["positions has shape 1 lists", "2, one per head"];
    }
    let store = KvStore::new(Plan::new(spec()).unwrap(), Cpu::shared(), None).unwrap();
    let (seqs, k) = (store.create(1).unwrap(), tensor(1, 1));
    for start in [-1, 1 << 40] {
        let tokens = Tokens { positions: Some(&[start]), ..Tokens::new(k.view(), k.view()) };
        let error = store.append(0, &seqs, &tokens).unwrap_err();
        assert!(
            matches!(error, Error::Sequence { .. }) && error.to_string().contains(&start.to_string()),
            "{error}"
        );
    }
}

#[test]
fn numbers_of_a_score_are_named() {
    refuses! {
        Argument: |f| attend_with(f, |q| Queries { scale: Some(f32::NAN), ..q }) => ["scale is NaN", "finite"];
        Argument: |f| attend_with(f, |q| Queries { softcap: Some(0.0), ..q }) => ["softcap is 0", "above 0"];
        Argument: |f| attend_with(f, |q| Queries { softcap: Some(-3.0), ..q }) => ["softcap is -3", "above 0"];
        Shape: |f| attend_with(f, |q| Queries { sink_logits: Some(&[0.0; 3]), ..q }) => ["sink_logits has shape 3", "[4]"];
        Argument: |f| attend_with(f, |q| Queries { sink_logits: Some(&[f32::NAN; 4]), ..q }) => ["sink_logits is NaN"];
    }
}

#[test]
fn queries_of_extend_that_do_not_fit_its_tokens_are_named() {
    let (k, short, whole) = (tensor(2, NEW), query(2, 4), query(2, NEW));
    let extend = |f: &Fixture, q: &Tensor, change: fn(Queries<'static>) -> Queries<'static>| {
        let blank = View::new("q", &[], Geometry::contiguous(Dtype::F32, [0; 4])).expect("an empty view");
        let Queries { causal, mask, .. } = change(Queries::new(blank));
        let mut out = Tensor::zeros(Dtype::F32, q.shape());
        let queries = Queries { causal, mask, ..Queries::new(q.view()) };
        f.store.extend(0, &f.seqs, &queries, &Tokens::new(k.view(), k.view()), &mut out.view_mut(), None)
    };
    refuses! {
        Shape: |f| extend(f, &short, |q| q) => ["q has shape [2, 4, 4, 32]", "as many queries as k has tokens: 5"];
        Argument: |f| extend(f, &whole, |q| Queries { causal: false, ..q }) => ["queries", "causal"];
        Argument: |f| extend(f, &whole, |q| Queries { mask: Some(&[true; 10]), ..q }) => ["queries", "the mask is the tokens'"];
    }
}

#[test]
fn a_capacity_that_runs_out_is_named_in_the_first_layer_and_in_the_middle_of_a_step() {
    let fixture = Fixture::new();
    let full = |f: &Fixture, layer| f.append(layer, 30_000);
    for layer in [0, 1] {
        let error = fixture.refused(|f| full(f, layer));
        assert!(matches!(error, Error::Capacity { capacity: 4_194_304, .. }), "{error:?}");
        assert!(error.to_string().contains("of the capacity of 4194304 bytes are free"), "{error}");
    }
    fixture.append(0, NEW).unwrap();
    let error = fixture.refused(|f| full(f, 1));
    assert!(matches!(error, Error::Capacity { .. }), "{error:?}");
    for seq in &fixture.seqs {
        fixture.store.truncate(*seq, OLD).unwrap();
    }
    assert_eq!(fixture.store.length(fixture.seqs[0], Some(0)).unwrap(), OLD);
    fixture.goes_on();
    let error = KvStore::new(Plan::new(spec()).unwrap(), Cpu::shared(), Some(100)).unwrap_err();
    assert!(
        matches!(error, Error::Argument { .. }) && error.to_string().contains("capacity is 100 bytes"),
        "{error}"
    );
}

#[test]
fn settings_of_a_plan_are_named() {
    let refused = |spec: PlanSpec, phrases: &[&str]| {
        let error = Plan::new(spec).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error:?}");
        for phrase in phrases {
            assert!(error.to_string().contains(phrase), "{phrase:?} is not in: {error}");
        }
    };
    let codec = |bits: f64| vec![CodecSpec::turboquant(bits); 2];
    let unknown = CodecSpec { name: "turbo".into(), ..CodecSpec::raw16() };
    refused(PlanSpec { keys: codec(0.0), ..spec() }, &["keys[0].bits is 0", "1..=8"]);
    refused(PlanSpec { values: codec(9.0), ..spec() }, &["values[0].bits is 9", "1..=8"]);
    refused(PlanSpec { keys: vec![CodecSpec::raw16()], ..spec() }, &["keys is 1 codecs", "2, one a layer"]);
    refused(
        PlanSpec { keys: vec![CodecSpec::raw16(), unknown], ..spec() },
        &["keys[1].name is turbo", "raw16, turboquant"],
    );
    refused(PlanSpec { recent: usize::MAX, ..spec() }, &["recent is 18446744073709551615", "0..="]);
    refused(
        PlanSpec { window_dtype: Some("float32".into()), ..spec() },
        &["window_dtype is float32", "bfloat16"],
    );
    refused(PlanSpec { key_offset: Some(vec![None]), ..spec() }, &["key_offset is 1 layers", "2"]);
    refused(
        PlanSpec { value_offset: Some(vec![None, Some(vec![0.0; 32])]), ..spec() },
        &["value_offset[1] is 32 numbers", "64"],
    );
    refused(
        PlanSpec { key_offset: Some(vec![Some(vec![f32::NAN; 64]), None]), ..spec() },
        &["key_offset[0] is NaN", "finite"],
    );
}

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvrs-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_plan_file_that_is_cut_changed_or_no_plan_is_refused_by_its_path() {
    let folder = Folder::new("plans");
    let (good, bad) = (folder.0.join("good.kvplan"), folder.0.join("bad.kvplan"));
    let offsets = Some(vec![Some((0..64).map(|i| i as f32).collect()), None]);
    let plan = Plan::new(PlanSpec { key_offset: offsets, ..spec() }).unwrap();
    plan.save(&good).unwrap();
    assert_eq!(Plan::load(&good).unwrap().hash(), plan.hash());
    let bytes = std::fs::read(&good).unwrap();
    let text = |from: &str, to: &str| {
        let at =
            bytes.windows(from.len()).position(|w| w == from.as_bytes()).expect("the text is in the header");
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to.as_bytes());
        changed
    };
    let n = bytes.len();
    let cuts = [0, 1, 7, 8, 64, n / 2, n - 8, n - 1].map(|n| bytes[..n].to_vec());
    let flipped = [&bytes[..n - 1], &[bytes[n - 1] ^ 1]].concat();
    let others = [
        (text("kvrs-plan", "kvrs-plam"), "format kvrs-plam"),
        (text("\"version\":\"1\"", "\"version\":\"9\""), "version 9; expected version 1"),
        (flipped, "that of its content"),
        (vec![7; 500], "a whole safetensors file"),
    ];
    for (content, phrase) in cuts.into_iter().map(|cut| (cut, "expected")).chain(others) {
        std::fs::write(&bad, content).unwrap();
        let error = Plan::load(&bad).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
        assert!(error.to_string().contains("bad.kvplan") && error.to_string().contains(phrase), "{error}");
    }
    let error = Plan::load(&folder.0.join("missing.kvplan")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("missing.kvplan"), "{error:?}");
    let error = plan.save(&folder.0.join("nowhere/plan.kvplan")).unwrap_err();
    assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("nowhere"), "{error:?}");
}
