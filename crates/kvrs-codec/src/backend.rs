//! What a backend does: move bytes by layout. It knows no method's name.

use crate::codec::{HeadCodec, LayerCodec};
use crate::desc::Side;
use crate::tile::decode_live;
use crate::view::{Place, View, ViewMut};
use kvrs_core::page::{ChunkSource, Entry, Page, Table};
use kvrs_core::statistics::{Fold, Reduce};
use std::sync::atomic::{AtomicU64, Ordering};

/// One sequence of an attention call.
#[derive(Debug)]
pub struct AttendRow<'a, C> {
    /// Page tables of the layer, one per head group.
    pub tables: Vec<&'a Table<C>>,
    /// Position of index 0.
    pub start: i64,
    /// Tokens stored in this layer.
    pub length: usize,
    /// Columns of the call that hold queries, ascending; the others are padding.
    pub columns: Vec<usize>,
    /// Token index of the first query; the r-th query stands at `first_index + r`.
    pub first_index: usize,
}

/// Attention of some queries over stored pages and, in `extend`, over the call's own keys and values.
#[derive(Debug)]
pub struct AttendCall<'a, C> {
    /// The layer.
    pub layer: &'a LayerCodec,
    /// One per row of `q`.
    pub rows: Vec<AttendRow<'a, C>>,
    /// Queries `[rows, query_heads, columns, key_dim]`.
    pub q: View<'a>,
    /// The call's own keys `[rows, kv_heads, columns, key_dim]` and values `[.., value_dim]`: token r of a row
    /// is its r-th column and stands at the index of the r-th query; always causal among themselves.
    pub own: Option<(View<'a>, View<'a>)>,
    /// Whether query `i` sees only keys with index <= `i`.
    pub causal: bool,
    /// Factor on scores before `softcap`.
    pub scale: f32,
    /// `softcap * tanh(score / softcap)` on scaled scores, before masking.
    pub softcap: Option<f32>,
    /// One extra logit per query head, without a value.
    pub sink_logits: Option<&'a [f32]>,
    /// Scores that each query row keeps, of all tokens that it sees; `None`: all.
    pub top_k: Option<usize>,
}

/// Tiles of 16 stored values that top-k attention could have read and did read; counted while calls share it.
#[derive(Debug, Default)]
pub struct ValueTiles {
    seen: AtomicU64,
    read: AtomicU64,
}

impl ValueTiles {
    /// Counts tiles.
    pub fn count(&self, seen: u64, read: u64) {
        self.seen.fetch_add(seen, Ordering::Relaxed);
        self.read.fetch_add(read, Ordering::Relaxed);
    }

    /// Counts what another counted.
    pub fn add(&self, other: &Self) {
        let [seen, read] = other.get();
        self.count(seen, read);
    }

    /// Tiles with a visible token, and those of them that were read.
    #[must_use]
    pub fn get(&self) -> [u64; 2] {
        [self.seen.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed)]
    }
}

/// Attention that each token received from the queries of a call, for policies that evict.
#[derive(Debug)]
pub struct Received<'a> {
    /// How the query heads of a group become one number.
    pub reduce: Reduce,
    /// What of each query is added.
    pub fold: Fold,
    /// Added to, `[row * kv_heads + head]`: one number per live token of the head's table, ascending, then one per
    /// token that the call brings.
    pub sums: &'a mut [Vec<f32>],
}

/// Where the results of an attention call go.
#[derive(Debug)]
pub struct Results<'a, 'v> {
    /// Filled, `[rows, query_heads, columns, value_dim]`. Padding columns become zeros. `None`: values are not read.
    pub out: Option<&'a mut ViewMut<'v>>,
    /// Log-sum-exp `[rows, query_heads, columns]` (natural log; -inf where a query sees nothing, whose output is zero).
    pub lse: Option<&'a mut [f32]>,
    /// Attention received by each token.
    pub received: Option<Received<'a>>,
    /// Where the values that top-k attention reads are counted.
    pub value_tiles: Option<&'a ValueTiles>,
}

/// Tokens to write as 16-bit rows: token columns `tokens` of row `row`, heads `head..head + heads`, into
/// neighbouring slots from `slot` on.
#[derive(Debug, Clone, Copy)]
pub struct RawRows<'a> {
    /// Keys `[rows, kv_heads, columns, key_dim]`.
    pub k: View<'a>,
    /// Values `[rows, kv_heads, columns, value_dim]`.
    pub v: View<'a>,
    /// Row of the call.
    pub row: usize,
    /// First key-value head of the group.
    pub head: usize,
    /// Columns, one per slot.
    pub columns: &'a [usize],
}

/// [`Backend::fetch`] of tensors in host memory.
pub fn copy_tokens(view: &View<'_>, row: usize, columns: &[usize], out: &mut Vec<u8>) {
    let ([_, heads, _, channels], dtype) = (view.shape(), view.dtype());
    let size = channels * dtype.size();
    out.reserve_exact(columns.len() * heads * size);
    for &column in columns {
        for head in 0..heads {
            let at = out.len();
            out.resize(at + size, 0);
            view.copy_row([row, head, column], dtype, &mut out[at..]);
        }
    }
}

/// [`Backend::decode_live`] of an entry whose page has these bytes.
pub fn decode_entry<C>(
    codec: &HeadCodec,
    bytes: &[u8],
    entry: &Entry<C>,
    start: i64,
    (side, head): (Side, usize),
    out: &mut Vec<f32>,
) {
    out.clear();
    let position = |slot: usize| start + entry.index(slot) as i64;
    decode_live((codec, side, head), bytes, entry.live(), position, out);
}

/// Moves packed bytes.
///
/// Exclusive access to a page is proven by `&mut Page`: the pool never makes two overlapping pages.
pub trait Backend: ChunkSource + Send + Sync + 'static {
    /// Whether it can work at all: what was wrong with its settings is said when a store is made.
    ///
    /// # Errors
    /// What the settings' own errors are.
    fn check(&self) -> kvrs_core::Result<()> {
        Ok(())
    }

    /// Brings what the codecs of a layer need to where the pages are, before anything is written with them.
    ///
    /// # Errors
    /// What a device says: nothing has changed.
    fn admit(&self, _: &LayerCodec) -> kvrs_core::Result<()> {
        Ok(())
    }

    /// Where the tensors of its calls must be.
    fn place(&self) -> Place {
        Place::Host
    }

    /// Starts whatever the calls so far have left waiting; the tensors of a call may change only afterwards, in the
    /// device's order.
    ///
    /// # Errors
    /// A device that failed to write what any call gave it or to read what it was to decode, early or late: from then on
    /// it tells every call, for nobody knows what its pages hold.
    fn flush(&self) -> kvrs_core::Result<()> {
        Ok(())
    }

    /// Appends all heads of some tokens of a row to `out`, `[columns][heads][channels]` in the view's own type.
    /// `columns` ascend.
    ///
    /// # Errors
    /// What a device says.
    fn fetch(
        &self,
        view: &View<'_>,
        row: usize,
        columns: &[usize],
        out: &mut Vec<u8>,
    ) -> kvrs_core::Result<()> {
        copy_tokens(view, row, columns, out);
        Ok(())
    }

    /// Writes `rows.columns.len()` tokens into a raw page from `slot` on.
    fn store_raw(&self, codec: &HeadCodec, page: &mut Page<Self::Chunk>, slot: usize, rows: RawRows<'_>);

    /// Encodes the full raw pages `raw` (16 tokens each, one position per token) into `page` from `slot` on; `codecs`
    /// are those of the raw and of the target page.
    fn seal(
        &self,
        codecs: (&HeadCodec, &HeadCodec),
        raw: &[&Page<Self::Chunk>],
        positions: &[i64],
        page: &mut Page<Self::Chunk>,
        slot: usize,
    );

    /// Attends, in memory that grows with what is kept, never with its square, after everything that was called before;
    /// nothing of it waits.
    ///
    /// # Errors
    /// What a device says, to this call and to no other: the results are not to be used then.
    fn attend(&self, call: &AttendCall<'_, Self::Chunk>, results: Results<'_, '_>) -> kvrs_core::Result<()>;

    /// Copies slot `from.1` of one page to slot `to.1` of another of the same codec, as codes.
    fn copy_slot(
        &self,
        codec: &HeadCodec,
        from: (&Page<Self::Chunk>, usize),
        to: (&mut Page<Self::Chunk>, usize),
    );

    /// Copies all bytes of a page to another of the same size.
    fn copy_page(&self, from: &Page<Self::Chunk>, to: &mut Page<Self::Chunk>);

    /// Copies all bytes of a page to host memory of that size, after everything that was called before.
    ///
    /// # Errors
    /// What a device says, to the call that needs the bytes and to no other: `out` is not the page's then.
    fn read_page(&self, page: &Page<Self::Chunk>, out: &mut [u8]) -> kvrs_core::Result<()>;

    /// Fills a page with as many bytes of host memory, after everything that was called before; nothing of it waits.
    ///
    /// # Errors
    /// What a device says, to the call that gives the bytes and to no other: the page does not hold them then.
    fn write_page(&self, page: &mut Page<Self::Chunk>, bytes: &[u8]) -> kvrs_core::Result<()>;

    /// Decodes one side of an entry's live slots for a head of its group, ascending: `[live slots][dim]` instead of what
    /// `out` held. What goes wrong on a device [`Backend::flush`] says.
    fn decode_live(
        &self,
        codec: &HeadCodec,
        entry: &Entry<Self::Chunk>,
        start: i64,
        side: (Side, usize),
        out: &mut Vec<f32>,
    );

    /// Runs `work` where parallel iterators use this backend's threads.
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    /// Whether chunks lie on huge pages.
    fn huge_pages(&self) -> bool;
}
