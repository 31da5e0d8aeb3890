//! The last queries of an open prompt, which vote at its end.

use crate::input::Queries;
use kvrs_codec::view::Geometry;
use kvrs_codec::{Dtype, View};

/// The last queries of one row, in their own type, and how they are scored.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail {
    /// `[tokens][query_heads][key_dim]`.
    bytes: Vec<u8>,
    tokens: usize,
    shape: Option<Shape>,
}

#[derive(Debug, Clone, PartialEq)]
struct Shape {
    dtype: Dtype,
    heads: usize,
    dim: usize,
    scale: f32,
    softcap: Option<f32>,
    sink_logits: Option<Vec<f32>>,
}

impl Tail {
    /// Bytes that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// Queries that it has.
    pub(crate) fn len(&self) -> usize {
        self.tokens
    }

    /// Forgets all queries and gives their memory back.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Forgets the newest `n` queries.
    pub(crate) fn drop_last(&mut self, n: usize) {
        let Some(row) = self.shape.as_ref().map(Shape::row) else { return };
        self.tokens = self.tokens.saturating_sub(n);
        self.bytes.truncate(self.tokens * row);
    }

    /// Adds a row's newest queries, `added` of `[tokens][query_heads][key_dim]`, and keeps the newest `room` of all.
    pub(crate) fn push(&mut self, room: usize, queries: &Queries<'_>, scale: f32, added: &[u8]) {
        let [_, heads, _, dim] = queries.q.shape();
        let (softcap, sink_logits) = (queries.softcap, queries.sink_logits.map(<[f32]>::to_vec));
        let shape = Shape { dtype: queries.q.dtype(), heads, dim, scale, softcap, sink_logits };
        let bytes = shape.row();
        let tokens = added.len() / bytes;
        if self.shape.as_ref().is_some_and(|old| (old.dtype, old.row()) != (shape.dtype, bytes)) {
            self.clear();
        }
        let gone = (self.tokens + tokens).saturating_sub(room);
        self.bytes.drain(..gone * bytes);
        self.bytes.reserve_exact(added.len());
        self.bytes.extend_from_slice(added);
        self.tokens = self.tokens + tokens - gone;
        self.shape = Some(shape);
    }

    /// The queries `[1, query_heads, tokens, key_dim]`, and scale, softcap and sink logits; `None` if there are none.
    #[expect(clippy::type_complexity, reason = "what an attention call takes")]
    pub(crate) fn view(&self) -> Option<(View<'_>, f32, Option<f32>, Option<&[f32]>)> {
        let shape = self.shape.as_ref().filter(|_| self.tokens > 0)?;
        let (heads, dim) = (shape.heads, shape.dim);
        let strides = [self.tokens * heads * dim, dim, heads * dim, 1].map(|s| s as isize);
        let geometry =
            Geometry { dtype: shape.dtype, shape: [1, heads, self.tokens, dim], strides, start: 0 };
        let view = View::new("q", &self.bytes, geometry).expect("the queries lie in their bytes");
        Some((view, shape.scale, shape.softcap, shape.sink_logits.as_deref()))
    }
}

impl Shape {
    /// Bytes of a token's queries.
    fn row(&self) -> usize {
        self.heads * self.dim * self.dtype.size()
    }
}
