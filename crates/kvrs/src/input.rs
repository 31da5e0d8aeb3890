//! What a call brings, and the checks that come before anything changes.

use kvrs_codec::{Dtype, Place, View, ViewMut};
use kvrs_core::{Error, LayerShape, Result};
use rayon::prelude::*;

/// New tokens: keys after RoPE and values, as models cache them.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Keys `[B, kv_heads, T, key_dim]`.
    pub k: View<'a>,
    /// Values `[B, kv_heads, T, value_dim]`.
    pub v: View<'a>,
    /// `[B * T]`, row-major; `false`: padding, not stored.
    pub mask: Option<&'a [bool]>,
    /// `[B * T]`, row-major: consecutive in each row from the sequence's start.
    pub positions: Option<&'a [i64]>,
}

impl<'a> Tokens<'a> {
    /// Tokens without padding at the next positions.
    #[must_use]
    pub fn new(k: View<'a>, v: View<'a>) -> Self {
        Self { k, v, mask: None, positions: None }
    }
}

/// Queries and how they are scored.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// Queries `[B, query_heads, Tq, key_dim]`.
    pub q: View<'a>,
    /// Whether query `i` sees only keys with index <= `i`.
    pub causal: bool,
    /// Factor on scores; `None`: `key_dim ** -0.5`.
    pub scale: Option<f32>,
    /// `softcap * tanh(score / softcap)` on scaled scores before masking.
    pub softcap: Option<f32>,
    /// `[query_heads]`: one more logit per head, without a value.
    pub sink_logits: Option<&'a [f32]>,
    /// `[B * Tq]`; `false` rows give zeros.
    pub mask: Option<&'a [bool]>,
}

impl<'a> Queries<'a> {
    /// Causal queries with the default scale.
    #[must_use]
    pub fn new(q: View<'a>) -> Self {
        Self { q, causal: true, scale: None, softcap: None, sink_logits: None, mask: None }
    }
}

/// Checks the shape of a tensor against `[rows, heads, any, dim]`.
pub(crate) fn check_shape(what: &str, got: [usize; 4], rows: usize, heads: usize, dim: usize) -> Result<()> {
    if got[0] != rows || got[1] != heads || got[3] != dim {
        let allowed = format!("[{rows} sequences, {heads} heads, tokens, {dim}]");
        return Err(Error::shape(what, format!("{got:?}"), allowed));
    }
    Ok(())
}

/// Checks that a tensor is in host memory, which is what the host fills.
pub(crate) fn check_host(what: &str, got: Place) -> Result<()> {
    if got == Place::Host { Ok(()) } else { Err(Error::device(what, got, Place::Host)) }
}

/// Checks that a tensor is where the store is.
pub(crate) fn check_place(what: &str, got: Place, store: Place) -> Result<()> {
    let allowed = || format!("{store}, where the store is");
    if got == store { Ok(()) } else { Err(Error::device(what, got, allowed())) }
}

/// Checks a mask's or the positions' length.
pub(crate) fn check_len(what: &str, len: usize, rows: usize, columns: usize) -> Result<()> {
    if len != rows * columns {
        return Err(Error::shape(what, format!("{len} elements"), format!("[{rows}, {columns}]")));
    }
    Ok(())
}

impl Tokens<'_> {
    /// Shapes and lengths; values are looked at by [`Tokens::check_values`].
    pub(crate) fn check_shapes(&self, layer: &LayerShape, rows: usize, store: Place) -> Result<()> {
        check_place("k", self.k.place(), store)?;
        check_place("v", self.v.place(), store)?;
        check_shape("k", self.k.shape(), rows, layer.kv_heads, layer.key_dim)?;
        check_shape("v", self.v.shape(), rows, layer.kv_heads, layer.value_dim)?;
        let columns = self.k.shape()[2];
        if self.v.shape()[2] != columns {
            let allowed = format!("as many tokens as k: {columns}");
            return Err(Error::shape("v", format!("{:?}", self.v.shape()), allowed));
        }
        if self.k.dtype() != self.v.dtype() {
            return Err(Error::dtype(
                "v",
                self.v.dtype().name(),
                format!("that of k: {}", self.k.dtype().name()),
            ));
        }
        if let Some(mask) = self.mask {
            check_len("mask", mask.len(), rows, columns)?;
        }
        self.positions.map_or(Ok(()), |p| check_len("positions", p.len(), rows, columns))
    }

    /// Finite and representable elements, in unmasked tokens only; names the first bad one. A device looks itself.
    pub(crate) fn check_values(&self, columns: &[Vec<usize>], window: Dtype, parallel: bool) -> Result<()> {
        if self.k.place() != Place::Host {
            return Ok(());
        }
        let limit = window.largest_stored();
        let heads =
            (0..self.k.shape()[0]).flat_map(|row| (0..self.k.shape()[1]).map(move |head| (row, head)));
        let of = |(what, x)| heads.clone().map(move |(row, head)| (what, x, row, head));
        let mut parts = [("k", &self.k), ("v", &self.v)].into_iter().flat_map(of);
        let check = |(what, x, row, head)| check_finite(what, x, (row, head), &columns[row], limit);
        if !parallel {
            return parts.try_for_each(check);
        }
        let parts: Vec<_> = parts.collect();
        parts.into_par_iter().find_map_first(|part| check(part).err()).map_or(Ok(()), Err)
    }
}

/// Checks one head of one row of a call.
fn check_finite(
    what: &str,
    x: &View<'_>,
    (row, head): (usize, usize),
    columns: &[usize],
    limit: f32,
) -> Result<()> {
    let mut tokens = columns.iter();
    let Some(&token) = tokens.find(|&&token| !x.row_within([row, head, token], limit)) else { return Ok(()) };
    let mut values = vec![0.0; x.shape()[3]];
    x.read_row([row, head, token], &mut values);
    let bad = values.iter().find(|x| x.is_nan() || x.abs() > limit).expect("an element failed the check");
    let place = format!("{what} at row {row}, head {head}, token {token}");
    Err(Error::argument(place, bad, format!("finite numbers of magnitude up to {limit}")))
}

impl Queries<'_> {
    pub(crate) fn check(
        &self,
        layer: &LayerShape,
        rows: usize,
        out: &ViewMut<'_>,
        lse: Option<usize>,
        store: Place,
    ) -> Result<()> {
        self.check_alone(layer, rows, store)?;
        check_place("out", out.place(), store)?;
        let columns = self.q.shape()[2];
        let expected = [rows, layer.query_heads, columns, layer.value_dim];
        if out.shape() != expected {
            return Err(Error::shape("out", format!("{:?}", out.shape()), format!("{expected:?}")));
        }
        if let Some(len) = lse.filter(|len| *len != rows * layer.query_heads * columns) {
            return Err(Error::shape("lse", len, rows * layer.query_heads * columns));
        }
        Ok(())
    }

    /// The checks that need no output.
    pub(crate) fn check_alone(&self, layer: &LayerShape, rows: usize, store: Place) -> Result<()> {
        check_place("q", self.q.place(), store)?;
        check_shape("q", self.q.shape(), rows, layer.query_heads, layer.key_dim)?;
        if let Some(mask) = self.mask {
            check_len("mask", mask.len(), rows, self.q.shape()[2])?;
        }
        self.check_numbers(layer)
    }

    fn check_numbers(&self, layer: &LayerShape) -> Result<()> {
        if let Some(scale) = self.scale.filter(|s| !s.is_finite()) {
            return Err(Error::argument("scale", scale, "None or a finite number"));
        }
        if let Some(cap) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            return Err(Error::argument("softcap", cap, "None or a finite number above 0"));
        }
        let Some(sinks) = self.sink_logits else { return Ok(()) };
        if sinks.len() != layer.query_heads {
            return Err(Error::shape("sink_logits", sinks.len(), format!("[{}]", layer.query_heads)));
        }
        match sinks.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
            Some(bad) => Err(Error::argument("sink_logits", bad, "numbers below infinity")),
            None => Ok(()),
        }
    }

    pub(crate) fn scale(&self, layer: &LayerShape) -> f32 {
        self.scale.unwrap_or_else(|| (layer.key_dim as f32).sqrt().recip())
    }
}
