//! The store, as Python sees it.

use crate::any_store::AnyStore;
use crate::args;
use crate::array::{Buffer, Element};
use crate::call::{NewTokens, Outputs, Scoring};
use crate::device::{Choice, Site};
use crate::dlpack::Tensor;
use crate::enter::{enter, forks, warn};
use crate::errors::{exception, wrong_type};
use crate::file;
use crate::plan::{Plan, from_json};
use crate::score;
use crate::snapshot::Snapshot;
use crate::torch;
use kvrs::{Dtype, SeqId};
use kvrs_codec::Place;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::path::PathBuf;

const KV: &str = "[B, Hkv, T, D]";
const Q: &str = "[B, Hq, Tq, D]";

/// Packed keys and values of many sequences.
#[pyclass(frozen, module = "kvrs._kvrs")]
pub(crate) struct KVStore {
    store: Box<dyn AnyStore>,
    site: Site,
    plan: Py<PyAny>,
    process: u32,
    forks: u32,
}

impl KVStore {
    /// The store, in the process that made it: threads and locks do not survive a fork.
    fn live(&self, py: Python<'_>) -> PyResult<&dyn AnyStore> {
        score::check_outside(py)?;
        if self.forks == forks() {
            return Ok(&*self.store);
        }
        let text = format!(
            "this store was made in process {}, this is its fork {}; allowed: a store made here",
            self.process,
            std::process::id()
        );
        Err(exception(py, "KVError", &text))
    }

    fn layers(&self) -> &[kvrs::LayerShape] {
        &self.store.plan().spec().shape.layers
    }

    fn layer(&self, layer: &Bound<'_, PyAny>) -> PyResult<usize> {
        args::index("layer", layer, self.layers().len())
    }

    fn outputs<'py>(
        &self,
        layer: usize,
        q: (&Tensor, Dtype),
        out: (Option<&Bound<'py, PyAny>>, Python<'py>),
        return_lse: bool,
    ) -> PyResult<Outputs<'py>> {
        Outputs::new(self.site.place(), q, self.layers()[layer].value_dim, out, return_lse)
    }

    /// Decodes into tensors of a device, by way of the host.
    fn decode_across(
        &self,
        py: Python<'_>,
        (layer, seqs): (usize, &[SeqId]),
        [(k_name, k, k_out), (v_name, v, v_out)]: [(&str, &mut Tensor, &Bound<'_, PyAny>); 2],
    ) -> PyResult<Vec<usize>> {
        k.view_mut(py, k_name, &[(v_name, v)])?;
        v.view_mut(py, v_name, &[])?;
        let (k_type, v_type) = (k.float(py, k_name)?, v.float(py, v_name)?);
        let mut keys = Buffer::zeros(Element::Float(k_type), k.shape());
        let mut values = Buffer::zeros(Element::Float(v_type), v.shape());
        let mut views = (keys.view_mut(py, k_name, k_type)?, values.view_mut(py, v_name, v_type)?);
        let store = &self.store;
        let counts = self.site.enter(py, || store.decode_into(layer, seqs, &mut views.0, &mut views.1))?;
        torch::fill(k_out, &keys.into_array(py)?)?;
        torch::fill(v_out, &values.into_array(py)?)?;
        Ok(counts)
    }
}

/// Ids as Python gets them.
fn numbers(ids: Vec<SeqId>) -> Vec<u64> {
    ids.into_iter().map(|id| id.0).collect()
}

#[pymethods]
#[allow(clippy::too_many_arguments, reason = "the keyword arguments of the Python interface")]
impl KVStore {
    #[new]
    #[pyo3(signature = (plan, device=None, capacity=None), text_signature = "(plan, device='cpu', capacity=None)")]
    fn new(
        plan: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        capacity: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = plan.py();
        let choice = device.map_or(Ok(Choice::Cpu), Choice::parse)?;
        let (native, capacity) = (Plan::of(plan)?, args::capacity(capacity)?);
        let functions = score::of_plan(&native, plan)?;
        let (site, store) = enter(py, || Site::open(choice, native, capacity, functions))?;
        Ok(Self { store, site, plan: plan.clone().unbind(), process: std::process::id(), forks: forks() })
    }

    #[getter]
    fn plan(&self, py: Python<'_>) -> Py<PyAny> {
        self.plan.clone_ref(py)
    }

    #[getter]
    fn device(&self) -> String {
        self.site.name()
    }

    #[pyo3(name = "new", signature = (n=None, from_=None), text_signature = "($self, n=1, from_=None)")]
    fn create(
        &self,
        py: Python<'_>,
        n: Option<&Bound<'_, PyAny>>,
        from_: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<u64>> {
        let n = n.map_or(Ok(1), |n| args::count("n", n))?;
        let store = self.live(py)?;
        let Some(from) = from_ else { return self.site.enter(py, || store.create(n)).map(numbers) };
        let Ok(snapshot) = from.cast::<Snapshot>() else {
            return Err(wrong_type("from_", from, "None or a snapshot of this store"));
        };
        let snapshot = &snapshot.get().0;
        self.site.enter(py, || store.create_from(n, snapshot)).map(numbers)
    }

    #[pyo3(signature = (layer, k, v, seqs, mask=None, positions=None, q=None, scale=None, softcap=None, sink_logits=None))]
    fn append(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        seqs: &Bound<'_, PyAny>,
        mask: Option<&Bound<'_, PyAny>>,
        positions: Option<&Bound<'_, PyAny>>,
        q: Option<&Bound<'_, PyAny>>,
        scale: Option<&Bound<'_, PyAny>>,
        softcap: Option<&Bound<'_, PyAny>>,
        sink_logits: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (store, layer, seqs) = (self.live(py)?, self.layer(layer)?, args::sequences(seqs)?);
        let new = NewTokens::import(self.site.place(), k, v, mask, positions)?;
        let query = q.map(|q| Tensor::at(self.site.place(), "q", q, Q)).transpose()?;
        let scoring = Scoring::new(true, scale, softcap, sink_logits)?;
        let queries = query.as_ref().map(|query| scoring.queries(py, query, None)).transpose()?;
        let tokens = new.tokens(py)?;
        let append = || match &queries {
            Some(queries) => store.append_with(layer, &seqs, &tokens, queries),
            None => store.append(layer, &seqs, &tokens),
        };
        let warnings = self.site.enter(py, || append().map(|()| store.take_warnings()))?;
        warn(py, warnings)
    }

    #[pyo3(signature = (layer, q, seqs, causal=true, scale=None, softcap=None, sink_logits=None, mask=None, return_lse=false, out=None))]
    fn attend<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        q: &Bound<'py, PyAny>,
        seqs: &Bound<'py, PyAny>,
        causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        softcap: Option<&Bound<'py, PyAny>>,
        sink_logits: Option<&Bound<'py, PyAny>>,
        mask: Option<&Bound<'py, PyAny>>,
        return_lse: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (store, layer, seqs) = (self.live(py)?, self.layer(layer)?, args::sequences(seqs)?);
        let query = Tensor::at(self.site.place(), "q", q, Q)?;
        let mask = args::mask(mask, query.shape()[0], query.shape()[2])?;
        let scoring = Scoring::new(causal, scale, softcap, sink_logits)?;
        let dtype = query.float(py, "q")?;
        let mut outputs = self.outputs(layer, (&query, dtype), (out, py), return_lse)?;
        let queries = scoring.queries(py, &query, mask.as_deref())?;
        let (mut view, lse) = outputs.borrow(py, dtype, &[("q", &query)])?;
        self.site.enter(py, || store.attend(layer, &seqs, &queries, &mut view, lse))?;
        outputs.into_python(q, &query)
    }

    #[pyo3(signature = (layer, q, k, v, seqs, mask=None, positions=None, scale=None, softcap=None, sink_logits=None, return_lse=false, out=None))]
    fn extend<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        seqs: &Bound<'py, PyAny>,
        mask: Option<&Bound<'py, PyAny>>,
        positions: Option<&Bound<'py, PyAny>>,
        scale: Option<&Bound<'py, PyAny>>,
        softcap: Option<&Bound<'py, PyAny>>,
        sink_logits: Option<&Bound<'py, PyAny>>,
        return_lse: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (store, layer, seqs) = (self.live(py)?, self.layer(layer)?, args::sequences(seqs)?);
        let place = self.site.place();
        let (query, new) = (Tensor::at(place, "q", q, Q)?, NewTokens::import(place, k, v, mask, positions)?);
        let scoring = Scoring::new(true, scale, softcap, sink_logits)?;
        let dtype = query.float(py, "q")?;
        let mut outputs = self.outputs(layer, (&query, dtype), (out, py), return_lse)?;
        let (queries, tokens) = (scoring.queries(py, &query, None)?, new.tokens(py)?);
        let inputs = [("q", &query), ("k", &new.k), ("v", &new.v)];
        let (mut view, lse) = outputs.borrow(py, dtype, &inputs)?;
        let work =
            || store.extend(layer, &seqs, &queries, &tokens, &mut view, lse).map(|()| store.take_warnings());
        let warnings = self.site.enter(py, work)?;
        warn(py, warnings)?;
        outputs.into_python(q, &query)
    }

    fn begin_prompt(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs) = (self.live(py)?, args::sequences(seqs)?);
        enter(py, || store.begin_prompt(&seqs))
    }

    fn end_prompt(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs) = (self.live(py)?, args::sequences(seqs)?);
        let warnings = self.site.enter(py, || store.end_prompt(&seqs).map(|()| store.take_warnings()))?;
        warn(py, warnings)
    }

    fn reserve(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs, tokens) = (self.live(py)?, args::sequences(seqs)?, args::count("tokens", tokens)?);
        enter(py, || store.reserve(&seqs, tokens))
    }

    #[pyo3(signature = (seq, layer=None))]
    fn length(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        layer: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<usize> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        let layer = layer.map(|layer| self.layer(layer)).transpose()?;
        enter(py, || store.length(seq, layer))
    }

    fn kept_positions<'py>(
        &self,
        py: Python<'py>,
        seq: &Bound<'py, PyAny>,
        layer: &Bound<'py, PyAny>,
        head: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (store, seq, layer) = (self.live(py)?, args::sequence("seq", seq)?, self.layer(layer)?);
        let head = args::index("head", head, self.layers()[layer].kv_heads)?;
        Buffer::integers(&enter(py, || store.kept_positions(seq, layer, head))?).into_numpy(py)
    }

    fn selection_report<'py>(
        &self,
        py: Python<'py>,
        seq: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        let heads = enter(py, || store.selection_report(seq))?;
        heads.iter().map(|head| from_json(py, "HeadSelection", head)).collect()
    }

    fn decode<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        seq: &Bound<'py, PyAny>,
        head: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let (store, layer, seq) = (self.live(py)?, self.layer(layer)?, args::sequence("seq", seq)?);
        let head = args::index("head", head, self.layers()[layer].kv_heads)?;
        let decoded = self.site.enter(py, || store.decode(layer, seq, head))?;
        let n = decoded.positions.len();
        let parts = [
            Buffer::floats(&decoded.keys, &[n, decoded.key_dim]).into_numpy(py)?,
            Buffer::floats(&decoded.values, &[n, decoded.value_dim]).into_numpy(py)?,
            Buffer::integers(&decoded.positions).into_numpy(py)?,
        ];
        PyTuple::new(py, parts)
    }

    fn decode_into(
        &self,
        py: Python<'_>,
        layer: &Bound<'_, PyAny>,
        seqs: &Bound<'_, PyAny>,
        k_out: &Bound<'_, PyAny>,
        v_out: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<usize>> {
        let (store, layer, seqs) = (self.live(py)?, self.layer(layer)?, args::sequences(seqs)?);
        let place = self.site.place();
        let mut k = Tensor::writable(place, "k_out", k_out, KV)?;
        let mut v = Tensor::writable(place, "v_out", v_out, "[B, Hkv, T, Dv]")?;
        if place != Place::Host {
            return self.decode_across(
                py,
                (layer, &seqs),
                [("k_out", &mut k, k_out), ("v_out", &mut v, v_out)],
            );
        }
        let mut keys = k.view_mut(py, "k_out", &[("v_out", &v)])?;
        let mut values = v.view_mut(py, "v_out", &[])?;
        enter(py, || store.decode_into(layer, &seqs, &mut keys, &mut values))
    }

    fn keep(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        layer: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (store, seq, layer) = (self.live(py)?, args::sequence("seq", seq)?, self.layer(layer)?);
        let positions = args::positions_per_head(positions)?;
        self.site.enter(py, || store.keep(seq, layer, &positions))
    }

    fn truncate(&self, py: Python<'_>, seq: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seq, n) = (self.live(py)?, args::sequence("seq", seq)?, args::count("n", n)?);
        self.site.enter(py, || store.truncate(seq, n))
    }

    fn drop_last(&self, py: Python<'_>, seq: &Bound<'_, PyAny>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seq, n) = (self.live(py)?, args::sequence("seq", seq)?, args::count("n", n)?);
        self.site.enter(py, || store.drop_last(seq, n))
    }

    fn remove(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        start: &Bound<'_, PyAny>,
        stop: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        let (start, stop) = (args::count("start", start)?, args::count("stop", stop)?);
        self.site.enter(py, || store.remove(seq, start, stop))
    }

    fn fork(&self, py: Python<'_>, seq: &Bound<'_, PyAny>) -> PyResult<u64> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        self.site.enter(py, || store.fork(seq)).map(|id| id.0)
    }

    fn reorder(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>, index: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs, index) = (self.live(py)?, args::sequences(seqs)?, args::rows("index", index)?);
        self.site.enter(py, || store.reorder(&seqs, &index))
    }

    fn select_rows(
        &self,
        py: Python<'_>,
        seqs: &Bound<'_, PyAny>,
        index: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<u64>> {
        let (store, seqs, index) = (self.live(py)?, args::sequences(seqs)?, args::rows("index", index)?);
        self.site.enter(py, || store.select_rows(&seqs, &index)).map(numbers)
    }

    fn snapshot(&self, py: Python<'_>, seq: &Bound<'_, PyAny>) -> PyResult<Snapshot> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        self.site.enter(py, || store.snapshot(seq)).map(Snapshot)
    }

    fn publish(
        &self,
        py: Python<'_>,
        seq: &Bound<'_, PyAny>,
        token_ids: &Bound<'_, PyAny>,
    ) -> PyResult<usize> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        let token_ids = args::numbers("token_ids", token_ids)?;
        self.site.enter(py, || store.publish(seq, &token_ids))
    }

    #[pyo3(name = "match")]
    fn find_prefix(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
    ) -> PyResult<(Option<Snapshot>, usize)> {
        let (store, token_ids) = (self.live(py)?, args::numbers("token_ids", token_ids)?);
        let found = self.site.enter(py, || store.find_prefix(&token_ids))?;
        Ok(found.map_or((None, 0), |(snapshot, n)| (Some(Snapshot(snapshot)), n)))
    }

    fn to_host(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs) = (self.live(py)?, args::sequences(seqs)?);
        self.site.enter(py, || store.to_host(&seqs))
    }

    fn to_device(&self, py: Python<'_>, seqs: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seqs) = (self.live(py)?, args::sequences(seqs)?);
        self.site.enter(py, || store.to_device(&seqs))
    }

    #[pyo3(signature = (path, seq, compress=None))]
    #[allow(clippy::needless_pass_by_value, reason = "extracted from Python by value")]
    fn save(
        &self,
        py: Python<'_>,
        path: PathBuf,
        seq: &Bound<'_, PyAny>,
        compress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (store, seq) = (self.live(py)?, args::sequence("seq", seq)?);
        let compress = file::compression(compress)?;
        self.site.enter(py, || store.save(&path, seq, compress))
    }

    #[allow(clippy::needless_pass_by_value, reason = "extracted from Python by value")]
    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        let store = self.live(py)?;
        self.site.enter(py, || store.load(&path)).map(|id| id.0)
    }

    fn free(&self, py: Python<'_>, seq: &Bound<'_, PyAny>) -> PyResult<()> {
        let (store, seq): (_, SeqId) = (self.live(py)?, args::sequence("seq", seq)?);
        enter(py, || store.free(seq))
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.live(py)?;
        enter(py, || store.reset())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let store = self.live(py)?;
        let stats = enter(py, || store.stats())?;
        from_json(py, "Stats", &stats)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.live(py)?;
        self.site.enter(py, || store.check().and_then(|()| self.site.check_stored()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let store = self.live(py)?;
        let stats = enter(py, || store.stats())?;
        let mib = stats.bytes_total as f64 / (1024.0 * 1024.0);
        let (layers, sequences) = (self.layers().len(), stats.sequences);
        Ok(format!(
            "KVStore({layers} layers, {sequences} sequences, {mib:.1} MiB, device={})",
            self.site.name()
        ))
    }
}
