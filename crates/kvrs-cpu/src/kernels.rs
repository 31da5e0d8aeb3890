//! The kernels of one instruction set, as one table of functions.

use crate::isa::Isa;
use crate::simd::encode::TileArgs;
use crate::simd::keys::{KeyArgs, NarrowDigits, WideDigits};
use crate::simd::lanes::LaneArgs;
use crate::simd::matrix::MatrixArgs;
use crate::simd::prepare::{Prepared, QueryArgs, WeightArgs};
use crate::simd::raw::{RawKeyArgs, RawValueArgs};
use crate::simd::received::ReceivedArgs;
use crate::simd::softmax::SoftmaxArgs;
use crate::simd::values::{NarrowWeights, ValueArgs, WideWeights};
use kvrs_codec::SideCodec;
use kvrs_codec::transform::Transform;

/// Most rows that a kernel takes at once.
pub(crate) const ROWS: usize = 4;

/// Blocks `(first row, rows)` of up to [`ROWS`] rows.
pub(crate) fn blocks(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows.div_ceil(ROWS)).map(move |block| (ROWS * block, ROWS.min(rows - ROWS * block)))
}

/// Functions by rows - 1.
type ByRows<F> = [F; ROWS];

#[allow(clippy::type_complexity, reason = "a table of functions lists their signatures")]
/// Every function may only be called on a CPU that has the table's instruction set.
pub(crate) struct Table {
    /// [`crate::simd::Simd::SPREAD`].
    pub(crate) spread: usize,
    /// By bits - 1.
    pub(crate) narrow_keys: [ByRows<unsafe fn(&mut KeyArgs<'_>, &NarrowDigits<'_>)>; 4],
    /// By bits - 5.
    pub(crate) wide_keys: [ByRows<unsafe fn(&mut KeyArgs<'_>, &WideDigits<'_>)>; 4],
    /// By bits - 1.
    pub(crate) narrow_values: [ByRows<unsafe fn(&mut ValueArgs<'_>, &NarrowWeights<'_>)>; 4],
    /// By bits - 5.
    pub(crate) wide_values: [ByRows<unsafe fn(&mut ValueArgs<'_>, &WideWeights<'_>)>; 4],
    pub(crate) raw_scores: ByRows<unsafe fn(&mut RawKeyArgs<'_>)>,
    pub(crate) raw_sums: ByRows<unsafe fn(&mut RawValueArgs<'_>)>,
    pub(crate) narrow_query: unsafe fn(QueryArgs<'_>) -> Prepared,
    pub(crate) wide_query: unsafe fn(QueryArgs<'_>) -> Prepared,
    pub(crate) narrow_weights: unsafe fn(&WeightArgs<'_>, usize, (&mut [i32], &mut [i32], &mut [Prepared])),
    pub(crate) wide_weights: unsafe fn(&WeightArgs<'_>, usize, (&mut [[[i32; 2]; 16]], &mut [Prepared])),
    pub(crate) softmax: unsafe fn(SoftmaxArgs<'_>),
    pub(crate) received: unsafe fn(&mut ReceivedArgs<'_>),
    pub(crate) lane_sums: unsafe fn(&mut LaneArgs<'_>),
    pub(crate) rows_dot: unsafe fn(&mut MatrixArgs<'_>),
    pub(crate) rows_sum: unsafe fn(&mut MatrixArgs<'_>),
    pub(crate) hadamard: unsafe fn(&[f32], &mut [[f32; 16]]),
    pub(crate) hadamard_transposed: unsafe fn(&[f32], &mut [[f32; 16]]),
    pub(crate) encode_tile: unsafe fn(&mut TileArgs<'_>),
}

/// A table that this CPU can run: having one is the proof.
#[derive(Clone, Copy)]
pub(crate) struct Kernels(&'static Table);

impl Kernels {
    /// The kernels of an instruction set; `None` for the scalar one, and for one that this CPU does not have.
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        if isa > Isa::detected() {
            return None;
        }
        match isa {
            Isa::Scalar => None,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(Self(&crate::x86::AVX2)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(Self(&crate::x86::AVX512)),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }
}

/// Declares the safe calls of [`Kernels`].
macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident $([$at:ident - $first:literal])* ($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        impl Kernels {
            $($(#[$doc])*
            #[inline]
            pub(crate) fn $name(self, $($at: usize,)* $($arg: $type),*) $(-> $out)? {
                // SAFETY: a value of `Kernels` exists only for an instruction set that this CPU has (`of`); the
                // function behind the pointer demands nothing else.
                unsafe { (self.0.$name $([$at - $first])*)($($arg),*) }
            })*
        }
    };
}

calls! {
    /// Adds the scores of `rows` rows on a run of 1 to 4 bits.
    narrow_keys[width - 1][rows - 1](args: &mut KeyArgs<'_>, query: &NarrowDigits<'_>);
    /// Adds the scores of `rows` rows on a run of 5 to 8 bits.
    wide_keys[width - 5][rows - 1](args: &mut KeyArgs<'_>, query: &WideDigits<'_>);
    /// Adds the weighted sums of `rows` rows on a run of 1 to 4 bits.
    narrow_values[width - 1][rows - 1](args: &mut ValueArgs<'_>, weights: &NarrowWeights<'_>);
    /// Adds the weighted sums of `rows` rows on a run of 5 to 8 bits.
    wide_values[width - 5][rows - 1](args: &mut ValueArgs<'_>, weights: &WideWeights<'_>);
    /// Adds the scores of `rows` rows on a page of 16-bit rows.
    raw_scores[rows - 1](args: &mut RawKeyArgs<'_>);
    /// Adds the weighted sums of `rows` rows on a page of 16-bit rows.
    raw_sums[rows - 1](args: &mut RawValueArgs<'_>);
    /// Quantises a query to bytes.
    narrow_query(args: QueryArgs<'_>) -> Prepared;
    /// Quantises a query to words.
    wide_query(args: QueryArgs<'_>) -> Prepared;
    /// Quantises the weights of up to [`ROWS`] rows to bytes.
    narrow_weights(args: &WeightArgs<'_>, rows: usize, out: (&mut [i32], &mut [i32], &mut [Prepared]));
    /// Quantises the weights of up to [`ROWS`] rows to words.
    wide_weights(args: &WeightArgs<'_>, rows: usize, out: (&mut [[[i32; 2]; 16]], &mut [Prepared]));
    /// Turns the scores of up to [`ROWS`] rows into weights.
    softmax(args: SoftmaxArgs<'_>);
    /// Adds the attention that tokens received.
    received(args: &mut ReceivedArgs<'_>);
    /// Adds weighted sums of f32 lanes.
    lane_sums(args: &mut LaneArgs<'_>);
    /// Three rounds of signs `[3][d]` and Walsh-Hadamard, up to [`Transform::orthonormal_factor`].
    hadamard(signs: &[f32], x: &mut [[f32; 16]]);
    /// The transpose of [`Self::hadamard`].
    hadamard_transposed(signs: &[f32], x: &mut [[f32; 16]]);
    /// Products of a matrix's rows with a vector.
    rows_dot(args: &mut MatrixArgs<'_>);
    /// Adds a weighted sum of a matrix's rows.
    rows_sum(args: &mut MatrixArgs<'_>);
    /// Encodes a tile of 16 tokens.
    encode_tile(args: &mut TileArgs<'_>);
}

impl Kernels {
    /// Copies of each narrow digit in memory.
    pub(crate) fn spread(self) -> usize {
        self.0.spread
    }

    /// [`SideCodec::prepare`]: `z = B^T q`, for `z` of whole chunks; `q` is of no use afterwards.
    pub(crate) fn prepare(self, codec: &SideCodec, q: &mut [f32], z: &mut [[f32; 16]]) {
        let flat = z.as_flattened_mut();
        if let Some(matrix) = synthesis(&codec.transform) {
            let by_channel = q.as_chunks_mut().0;
            return self.rows_dot(&mut MatrixArgs { matrix, by_row: flat, by_channel });
        }
        let Transform::Hadamard { signs, d } = &codec.transform else {
            return codec.prepare(q, flat);
        };
        flat.copy_from_slice(q);
        self.hadamard(signs, z);
        let factor = Transform::orthonormal_factor(*d);
        z.as_flattened_mut().iter_mut().for_each(|x| *x *= factor);
    }

    /// [`SideCodec::finish`]: `out += B acc + mean * mass`; what is left in `acc` is of no use.
    pub(crate) fn finish(self, codec: &SideCodec, acc: &mut [[f32; 16]], mass: f32, out: &mut [f32]) {
        if let Some(matrix) = synthesis(&codec.transform) {
            let (by_row, by_channel) = (acc.as_flattened_mut(), out.as_chunks_mut().0);
            self.rows_sum(&mut MatrixArgs { matrix, by_row, by_channel });
            return codec.add_mean(mass, out);
        }
        let Transform::Hadamard { signs, d } = &codec.transform else {
            return codec.finish(acc.as_flattened(), mass, out);
        };
        self.hadamard_transposed(signs, acc);
        let factor = Transform::orthonormal_factor(*d);
        out.iter_mut().zip(acc.as_flattened()).for_each(|(o, x)| *o += x * factor);
        codec.add_mean(mass, out);
    }
}

/// The transposed synthesis matrix `[n][d / 16]`, where there is one and its rows are whole chunks.
fn synthesis(transform: &Transform) -> Option<&[[f32; 16]]> {
    match transform {
        Transform::Dense { matrix, d, .. } | Transform::Pair { synthesis: matrix, d, .. }
            if d.is_multiple_of(16) =>
        {
            Some(matrix.as_chunks().0)
        }
        _ => None,
    }
}
