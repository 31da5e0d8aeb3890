//! The kernels for each instruction set: functions that own its features and inline the kernels.

use super::avx2::Avx2;
use super::avx512::Avx512;
use crate::kernels::Table;

/// A module with a function per kernel, and the table of them.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident, $module:ident, $token:ty, $features:literal) => {
        $(#[$doc])*
        pub(crate) static $name: Table = $module::TABLE;

        mod $module {
            use super::*;
            use crate::simd::{encode, hadamard as walsh, keys, lanes, matrix, prepare, raw, received as attention, softmax, values};

            /// The proof that functions with the features hold.
            #[target_feature(enable = $features)]
            #[inline]
            fn token() -> $token {
                // SAFETY: this function may only run where its features are.
                unsafe { <$token>::assume() }
            }

            #[target_feature(enable = $features)]
            fn narrow_keys<const W: usize, const R: usize>(args: &mut keys::KeyArgs<'_>, query: &keys::NarrowDigits<'_>) {
                keys::narrow::<_, W, R>(token(), args, query);
            }

            #[target_feature(enable = $features)]
            fn wide_keys<const W: usize, const R: usize>(args: &mut keys::KeyArgs<'_>, query: &keys::WideDigits<'_>) {
                keys::wide::<_, W, R>(token(), args, query);
            }

            #[target_feature(enable = $features)]
            fn narrow_values<const W: usize, const R: usize>(
                args: &mut values::ValueArgs<'_>,
                weights: &values::NarrowWeights<'_>,
            ) {
                values::narrow::<_, W, R>(token(), args, weights);
            }

            #[target_feature(enable = $features)]
            fn wide_values<const W: usize, const R: usize>(
                args: &mut values::ValueArgs<'_>,
                weights: &values::WideWeights<'_>,
            ) {
                values::wide::<_, W, R>(token(), args, weights);
            }

            #[target_feature(enable = $features)]
            fn raw_scores<const R: usize>(args: &mut raw::RawKeyArgs<'_>) {
                raw::scores::<_, R>(token(), args);
            }

            #[target_feature(enable = $features)]
            fn raw_sums<const R: usize>(args: &mut raw::RawValueArgs<'_>) {
                raw::sums::<_, R>(token(), args);
            }

            #[target_feature(enable = $features)]
            fn narrow_query(args: prepare::QueryArgs<'_>) -> prepare::Prepared {
                prepare::narrow_query(token(), args)
            }

            #[target_feature(enable = $features)]
            fn wide_query(args: prepare::QueryArgs<'_>) -> prepare::Prepared {
                prepare::wide_query(token(), args)
            }

            #[target_feature(enable = $features)]
            fn narrow_weights(
                args: &prepare::WeightArgs<'_>,
                rows: usize,
                out: (&mut [i32], &mut [i32], &mut [prepare::Prepared]),
            ) {
                prepare::narrow_weights(token(), args, rows, out);
            }

            #[target_feature(enable = $features)]
            fn wide_weights(
                args: &prepare::WeightArgs<'_>,
                rows: usize,
                out: (&mut [[[i32; 2]; 16]], &mut [prepare::Prepared]),
            ) {
                prepare::wide_weights(token(), args, rows, out);
            }

            #[target_feature(enable = $features)]
            fn softmax(args: softmax::SoftmaxArgs<'_>) {
                softmax::step(token(), args);
            }

            #[target_feature(enable = $features)]
            fn received(args: &mut attention::ReceivedArgs<'_>) {
                attention::add(token(), args);
            }

            #[target_feature(enable = $features)]
            fn lane_sums(args: &mut lanes::LaneArgs<'_>) {
                lanes::add_sums(token(), args);
            }

            #[target_feature(enable = $features)]
            fn hadamard(signs: &[f32], x: &mut [[f32; 16]]) {
                walsh::hadamard(token(), signs, 16 * x.len(), x);
            }

            #[target_feature(enable = $features)]
            fn hadamard_transposed(signs: &[f32], x: &mut [[f32; 16]]) {
                walsh::hadamard_transposed(token(), signs, 16 * x.len(), x);
            }

            #[target_feature(enable = $features)]
            fn rows_dot(args: &mut matrix::MatrixArgs<'_>) {
                matrix::rows_dot(token(), args);
            }

            #[target_feature(enable = $features)]
            fn rows_sum(args: &mut matrix::MatrixArgs<'_>) {
                matrix::rows_sum(token(), args);
            }

            #[target_feature(enable = $features)]
            fn encode_tile(args: &mut encode::TileArgs<'_>) {
                encode::encode_tile(token(), args);
            }

            pub(super) const TABLE: Table = Table {
                spread: <$token as crate::simd::Simd>::SPREAD,
                narrow_keys: by_width!(narrow_keys, 1, 2, 3, 4),
                wide_keys: by_width!(wide_keys, 5, 6, 7, 8),
                narrow_values: by_width!(narrow_values, 1, 2, 3, 4),
                wide_values: by_width!(wide_values, 5, 6, 7, 8),
                raw_scores: [raw_scores::<1>, raw_scores::<2>, raw_scores::<3>, raw_scores::<4>],
                raw_sums: [raw_sums::<1>, raw_sums::<2>, raw_sums::<3>, raw_sums::<4>],
                narrow_query,
                wide_query,
                narrow_weights,
                wide_weights,
                softmax,
                received,
                lane_sums,
                rows_dot,
                rows_sum,
                hadamard,
                hadamard_transposed,
                encode_tile,
            };
        }
    };
}

/// `[width][rows]` of a kernel.
macro_rules! by_width {
    ($kernel:ident, $($width:literal),+) => {
        [$([$kernel::<$width, 1>, $kernel::<$width, 2>, $kernel::<$width, 3>, $kernel::<$width, 4>]),+]
    };
}

table! {
    /// AVX2, FMA and F16C.
    AVX2, avx2_kernels, Avx2, "avx2,fma,f16c"
}

table! {
    /// AVX-512 with VBMI and VNNI.
    AVX512, avx512_kernels, Avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx2,fma,f16c"
}
