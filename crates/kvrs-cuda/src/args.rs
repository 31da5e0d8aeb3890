//! Structures that kernels take, field for field those of `kernels_cu/`. Addresses are the device's.

use kvrs_codec::desc::RunDesc;

/// Plain data that kernels read as bytes.
///
/// # Safety
/// The type is `repr(C)` or primitive and has no padding.
pub(crate) unsafe trait Plain: Copy {}

/// The bytes of plain data.
pub(crate) fn bytes_of<T: Plain>(data: &[T]) -> &[u8] {
    // SAFETY: plain data has no padding, so all of its bytes are initialised; the slice covers exactly its own.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// A number: any bytes are a value of it.
pub(crate) trait Number: Plain {}

impl Number for u8 {}
impl Number for u32 {}
impl Number for u64 {}
impl Number for f32 {}

/// The bytes of numbers, to fill.
pub(crate) fn bytes_of_mut<T: Number>(data: &mut [T]) -> &mut [u8] {
    // SAFETY: as `bytes_of`, and any bytes are a value of the type.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

macro_rules! plain {
    ($($type:ty),* $(,)?) => {$(
        // SAFETY: primitive, or `repr(C)` without padding: every gap is a named field.
        unsafe impl Plain for $type {}
    )*};
}

/// A structure that a kernel takes: every field is a number.
macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "no padding");
        plain!($name);
    )*};
}

plain!(u8, i8, u32, u64, i64, f32, RunDesc);

/// An absent index.
pub(crate) const NONE: u32 = u32::MAX;
/// Query rows of a unit.
pub(crate) const ROWS: usize = 16;
/// Query rows of a unit that a decode kernel takes.
pub(crate) const DECODE_ROWS: usize = 8;
/// Rows of a unit times channels of a sum.
pub(crate) const ACC: usize = 4096;
/// Class of a call's own tokens.
pub(crate) const OWN: u32 = 0xFFFF;
/// Most stored channels that are encoded on the device.
pub(crate) const ENCODED: usize = 256;

args! {
    /// Two channels that turn together.
    Pair { turn: u64, a: u32, b: u32 }

    /// One side of the pages of a class.
    Side {
        run: u64, levels: u64, lut8: u64, analysis: u64, synthesis: u64, mean: u64, offset: u64, offset_pair: u64,
        rope_pair: u64,
        path: u32, parts: u32, d: u32, n: u32, vec_len: u32, inner: u32, block: u32, base_pairs: u32,
        sparse_per_tile: u32, tile_ops: u32, tile_bytes: u32, codes_at: u32, scales_at: u32, scales: u32,
        inner_at: u32, sparse_at: u32,
        runs: u32, slots: u32, rotation: u32, rope_pairs: u32,
        rotation_factor: f32, between_rounds: f32,
        is_key: u32, live: u32,
    }

    /// A strided tensor.
    View { start: u64, strides: [i64; 4], dtype: u32, pad: u32 }

    /// One page of a table, or 64 own tokens.
    Entry { page: u64, live: u64, first: u32, gathered: u32, column: u32, pad: u32 }

    /// Some query rows of one sequence against one key-value head.
    Unit {
        record: u64, sequence: u32, head: u32, first_row: u32, rows: u32, first_split: u32, splits: u32, tokens: u32,
        pad: u32,
    }

    /// Entries of one class for a unit.
    Split { unit: u32, first_entry: u32, entries: u32, group_class: u32 }

    /// One sequence of a call.
    Sequence { start: i64, first_index: u32, first_query: u32, prepared: u32, pad: u32 }

    /// `kvrs_attend`.
    Attend {
        splits: u64, units: u64, sequences: u64, entries: u64, indices: u64, columns: u64, sides: u64, queries: u64,
        own_k: View, own_v: View,
        max: u64, sum: u64, acc: u64, record: u64, value_tiles: u64, chosen: u64,
        classes: u32, heads_per_group: u32, group: u32, query_heads: u32, key_dim: u32, value_dim: u32,
        query_rows: u32, query_stride: u32, acc_stride: u32, causal: u32, sliding: u32, stage: u32, values: u32,
        count: u32,
        scale: f32, softcap: f32,
    }

    /// `kvrs_prepare`.
    Prepare {
        q: View, sequences: u64, columns: u64, sides: u64, queries: u64,
        classes: u32, heads_per_group: u32, group: u32, query_heads: u32, key_dim: u32, query_rows: u32,
        query_stride: u32, pad: u32,
    }

    /// `kvrs_clear`.
    Clear { padding: u64, lse: u64, out: View, query_heads: u32, width: u32, value_dim: u32, values: u32 }

    /// `kvrs_merge`.
    Merge {
        splits: u64, units: u64, sequences: u64, columns: u64, sides: u64, max: u64, sum: u64, acc: u64, sinks: u64,
        lse: u64, out: View,
        classes: u32, heads_per_group: u32, group: u32, value_dim: u32, acc_stride: u32, query_heads: u32, width: u32,
        values: u32,
    }

    /// `kvrs_top_k`.
    TopK { units: u64, record: u64, k: u32, pad: u32 }

    /// Some queries of one sequence against one key-value head.
    Receiver {
        record: u64, sums: u64, sequence: u32, head: u32, tokens: u32, first_query: u32, queries: u32, pad: u32,
    }

    /// `kvrs_received`.
    Received {
        receivers: u64, sequences: u64, columns: u64, record: u64, lse: u64, sums: u64,
        group: u32, query_heads: u32, width: u32, reduce: u32, fold: u32, pad: u32,
    }

    /// One token of one head group.
    RawRow { page: u64, sides: u64, slot: u32, batch: u32, head: u32, column: u32 }

    /// `kvrs_store_raw`.
    StoreRaw { rows: u64, k: View, v: View, refused: u64, limit: f32, pad: u32 }

    /// How a run's channels become codes.
    Book { thresholds: u64, levels: u32, pad: u32, inverse_step: f32, zero: f32, top: f32, step: f32 }

    /// What encodes one side.
    Encoder {
        books: u64, rule: u32, scaled: u32, unit_factor: f32, root: f32, inverse_root: f32, inverse_live: f32,
    }

    /// 16 tokens of one head group.
    TileJob { raw: u64, page: u64, positions: u64, from: u64, to: u64, encoders: u64, slot: u32, pad: u32 }

    /// `kvrs_encode`.
    Encode { jobs: u64 }

    /// One slot that moves.
    SlotCopy { from: u64, to: u64, from_slot: u32, to_slot: u32 }

    /// Copies into one page.
    PageCopies { first: u32, copies: u32, sides: u64 }

    /// `kvrs_copy_slots`.
    CopySlots { copies: u64, pages: u64 }
}
