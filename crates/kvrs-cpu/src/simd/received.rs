//! Attention received by tokens: softmax weights of some queries, rescaled and folded into one number per token.

use super::Simd;

/// Weights of the rows of some queries over neighbouring chunks of tokens.
pub(crate) struct ReceivedArgs<'a> {
    /// `[query][head][row_chunks]`, of which the first chunks of each row are read: as many as `sums` has.
    pub(crate) weights: &'a [[f32; 16]],
    pub(crate) row_chunks: usize,
    /// What makes probabilities of a row's weights `[query][head]`.
    pub(crate) factors: &'a [f32],
    /// Query heads that become one number.
    pub(crate) heads: usize,
    /// Whether that is the largest of them; else it is their sum.
    pub(crate) largest: bool,
    /// Probabilities that count `[query]`, as 1 each if they are larger; empty: the probabilities are added.
    pub(crate) bounds: &'a [f32],
    /// Added to, `[chunk]`.
    pub(crate) sums: &'a mut [[f32; 16]],
}

/// Adds what the queries give, in their order.
#[inline(always)]
pub(crate) fn add<S: Simd>(s: S, args: &mut ReceivedArgs<'_>) {
    let (heads, queries) = (args.heads, args.factors.len() / args.heads);
    assert!(args.bounds.is_empty() || args.bounds.len() == queries);
    for chunk in 0..args.sums.len() {
        for half in 0..S::HALVES {
            let mut sum = s.load_f(&args.sums[chunk], half);
            for query in 0..queries {
                let mut x = s.splat_f(0.0);
                for row in heads * query..heads * (query + 1) {
                    let weights = s.load_f(&args.weights[row * args.row_chunks + chunk], half);
                    let factor = s.splat_f(args.factors[row]);
                    x = if args.largest {
                        s.max(x, s.mul(weights, factor))
                    } else {
                        s.mul_add(weights, factor, x)
                    };
                }
                if !args.bounds.is_empty() {
                    x = step(s, s.sub(x, s.splat_f(args.bounds[query])));
                }
                sum = s.add(sum, x);
            }
            s.store_f(sum, &mut args.sums[chunk], half);
        }
    }
}

/// 1 where x is positive, else 0: x times a huge number, clamped.
#[inline(always)]
fn step<S: Simd>(s: S, x: S::F) -> S::F {
    s.max(s.min(s.mul(x, s.splat_f(1e38)), s.splat_f(1.0)), s.splat_f(0.0))
}
