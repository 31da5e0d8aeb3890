//! Attention by its definition in f64, over decoded slots.

use kvrs_codec::Side;
use kvrs_codec::backend::{AttendCall, Backend};

/// Outputs `[rows][query heads][columns][value_dim]`, log-sum-exps, and the largest |logit|; NaN where rounding decides
/// which tokens top-k attention keeps.
pub(crate) struct Exact {
    pub(crate) out: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    pub(crate) max_logit: f64,
    /// Attention received, reduced by the mean and summed over queries: `[row][kv head][token]`.
    pub(crate) received: Vec<Vec<f64>>,
}

/// A visible token: index, key, value.
type Token = (usize, Vec<f32>, Vec<f32>);

/// The stored tokens of a row and head.
fn decoded<B: Backend>(backend: &B, call: &AttendCall<'_, B::Chunk>, row: usize, head: usize) -> Vec<Token> {
    let (layer, row) = (call.layer, &call.rows[row]);
    let (group, part) = (head / layer.heads_per_group, head % layer.heads_per_group);
    let mut tokens = Vec::new();
    for entry in row.tables[group].entries() {
        let codec = &layer.classes[group][entry.class()];
        let [mut k, mut v] = [Vec::new(), Vec::new()];
        backend.decode_live(codec, entry, row.start, (Side::Key, part), &mut k);
        backend.decode_live(codec, entry, row.start, (Side::Value, part), &mut v);
        let rows = k.chunks_exact(layer.shape.key_dim).zip(v.chunks_exact(layer.shape.value_dim));
        tokens
            .extend(entry.live_slots().zip(rows).map(|((_, index), (k, v))| (index, k.to_vec(), v.to_vec())));
    }
    tokens
}

fn own<C>(call: &AttendCall<'_, C>, row: usize, head: usize) -> Vec<Token> {
    let Some((k, v)) = call.own else { return Vec::new() };
    let first = call.rows[row].first_index;
    let read = |view: kvrs_codec::View<'_>, column| {
        let mut x = vec![0.0; view.shape()[3]];
        view.read_row([row, head, column], &mut x);
        x
    };
    let columns = call.rows[row].columns.iter().enumerate();
    columns.map(|(r, &column)| (first + r, read(k, column), read(v, column))).collect()
}

pub(crate) fn attend<B: Backend>(backend: &B, call: &AttendCall<'_, B::Chunk>) -> Exact {
    let [rows, heads, columns, key_dim] = call.q.shape();
    let (shape, dim) = (&call.layer.shape, call.layer.shape.value_dim);
    let mut exact = Exact {
        out: vec![0.0; rows * heads * columns * dim],
        lse: vec![f64::NEG_INFINITY; rows * heads * columns],
        max_logit: 0.0,
        received: Vec::new(),
    };
    for (row, kv_head) in (0..rows).flat_map(|r| (0..shape.kv_heads).map(move |h| (r, h))) {
        let (stored, own) = (decoded(backend, call, row, kv_head), own(call, row, kv_head));
        let indices: Vec<usize> = stored.iter().chain(&own).map(|token| token.0).collect();
        let mut received = vec![0.0; indices.len()];
        for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            for (r, &column) in call.rows[row].columns.iter().enumerate() {
                let (mut q, index) = (vec![0.0; key_dim], call.rows[row].first_index + r);
                call.q.read_row([row, head, column], &mut q);
                let near = |t: &&Token| shape.sliding.is_none_or(|w| index < t.0 + w);
                let past = stored.iter().filter(|t| !call.causal || t.0 <= index);
                let seen: Vec<_> = past.chain(own.iter().filter(|t| t.0 <= index)).filter(near).collect();
                let at = (row * heads + head) * columns + column;
                let sink = call.sink_logits.map(|s| f64::from(s[head]));
                let out = &mut exact.out[at * dim..][..dim];
                let (lse, shares) = one(call, &q, &seen, sink, out, &mut exact.max_logit);
                exact.lse[at] = lse;
                for (token, share) in seen.iter().zip(shares) {
                    let place = indices.iter().position(|i| *i == token.0).unwrap();
                    received[place] += share / shape.group() as f64;
                }
            }
        }
        exact.received.push(received);
    }
    exact
}

fn one<C>(
    call: &AttendCall<'_, C>,
    q: &[f32],
    seen: &[&Token],
    sink: Option<f64>,
    out: &mut [f64],
    max_logit: &mut f64,
) -> (f64, Vec<f64>) {
    let logit = |k: &[f32]| {
        let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let s = dot * f64::from(call.scale);
        call.softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
    };
    let logits: Vec<f64> = seen.iter().map(|t| logit(&t.1)).collect();
    *max_logit = logits.iter().fold(*max_logit, |m, l| m.max(l.abs()));
    if logits.is_empty() {
        return (f64::NEG_INFINITY, Vec::new());
    }
    let Some(logits) = largest(logits, call.top_k) else {
        out.fill(f64::NAN);
        return (f64::NAN, vec![f64::NAN; seen.len()]);
    };
    let max = logits.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().copied().chain(sink).map(|l| (l - max).exp()).sum();
    let shares: Vec<f64> = logits.iter().map(|l| (l - max).exp() / total).collect();
    for (w, token) in shares.iter().zip(seen) {
        out.iter_mut().zip(&token.2).for_each(|(o, v)| *o += w * f64::from(*v));
    }
    (max + total.ln(), shares)
}

/// The `k` largest logits, -inf in the place of the others; `None` if rounding may decide which they are.
fn largest(mut logits: Vec<f64>, k: Option<usize>) -> Option<Vec<f64>> {
    let Some(k) = k.filter(|k| *k < logits.len()) else { return Some(logits) };
    let mut sorted = logits.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    logits.iter_mut().filter(|l| **l < sorted[k - 1]).for_each(|l| *l = f64::NEG_INFINITY);
    (sorted[k - 1] - sorted[k] > 1e-3).then_some(logits)
}
