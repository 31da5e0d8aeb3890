//! Scores and weighted sums on 16-bit rows, token by token.

use super::Simd;
use kvrs_codec::Elem;

/// Bytes of 16 channels.
const CHUNK: usize = 32;

/// Some query rows against one page of 16 rows.
pub(crate) struct RawKeyArgs<'a> {
    pub(crate) elem: Elem,
    /// Rows `[token][chunk]`.
    pub(crate) page: &'a [[u8; CHUNK]],
    /// Queries `[row][chunk]`.
    pub(crate) query: &'a [[f32; 16]],
    /// Whether the scores hold nothing yet.
    pub(crate) fresh: bool,
    /// Scores `[row][chunk]`, the page's chunk first.
    pub(crate) scores: &'a mut [[f32; 16]],
    /// Chunks from row to row.
    pub(crate) row_chunks: usize,
    pub(crate) next: *const u8,
}

/// Some rows of weights against one page of 16 rows.
pub(crate) struct RawValueArgs<'a> {
    pub(crate) elem: Elem,
    /// Rows `[token][chunk]`.
    pub(crate) page: &'a [[u8; CHUNK]],
    /// Tokens that take part: whatever the others hold enters no sum.
    pub(crate) live: u16,
    /// Weights `[row][chunk]`, the page's chunk first.
    pub(crate) weights: &'a [[f32; 16]],
    /// Chunks of weights from row to row.
    pub(crate) row_chunks: usize,
    /// Sums `[row][chunk]`.
    pub(crate) sums: &'a mut [[f32; 16]],
    pub(crate) next: *const u8,
}

#[inline(always)]
fn load<S: Simd, const BF16: bool>(s: S, chunk: &[u8; CHUNK], half: usize) -> S::F {
    if BF16 { s.load_bf16(chunk, half) } else { s.load_f16(chunk, half) }
}

/// Adds the scores of `R` <= 4 rows; the elements are the page's.
#[inline(always)]
pub(crate) fn scores<S: Simd, const R: usize>(s: S, args: &mut RawKeyArgs<'_>) {
    if args.elem == Elem::Bf16 { scores_of::<S, R, true>(s, args) } else { scores_of::<S, R, false>(s, args) }
}

#[inline(always)]
fn scores_of<S: Simd, const R: usize, const BF16: bool>(s: S, args: &mut RawKeyArgs<'_>) {
    let chunks = args.page.len() / 16;
    assert!(args.page.len() == 16 * chunks && args.query.len() == R * chunks && chunks > 0);
    let mut queries = args.query.chunks_exact(chunks);
    let query: [&[[f32; 16]]; R] = std::array::from_fn(|_| queries.next().expect("a query per row"));
    let mut totals = [[[0.0; 4]; 2]; 8];
    for (pair, (rows, totals)) in args.page.chunks_exact(2 * chunks).zip(&mut totals).enumerate() {
        let (first, second) = rows.split_at(chunks);
        let mut sums = [[s.splat_f(0.0); 4]; 2];
        for c in 0..chunks {
            s.prefetch(args.next.wrapping_add(2 * (pair * chunks + c) * CHUNK));
            for half in 0..S::HALVES {
                let (a, b) = (load::<S, BF16>(s, &first[c], half), load::<S, BF16>(s, &second[c], half));
                for r in 0..R {
                    let q = s.load_f(&query[r][c], half);
                    sums[0][r] = s.mul_add(a, q, sums[0][r]);
                    sums[1][r] = s.mul_add(b, q, sums[1][r]);
                }
            }
        }
        *totals = [s.reduce_add4(sums[0]), s.reduce_add4(sums[1])];
    }
    for r in 0..R {
        let scores = &mut args.scores[r * args.row_chunks];
        for (x, totals) in scores.iter_mut().zip(totals.as_flattened()) {
            *x = if args.fresh { totals[r] } else { *x + totals[r] };
        }
    }
}

/// Adds the weighted sums of `R` <= 4 rows; the elements are the page's.
#[inline(always)]
pub(crate) fn sums<S: Simd, const R: usize>(s: S, args: &mut RawValueArgs<'_>) {
    match (args.elem == Elem::Bf16, args.live == u16::MAX) {
        (true, true) => sums_of::<S, R, true, true>(s, args),
        (true, false) => sums_of::<S, R, true, false>(s, args),
        (false, true) => sums_of::<S, R, false, true>(s, args),
        (false, false) => sums_of::<S, R, false, false>(s, args),
    }
}

/// `WHOLE`: every token takes part.
#[inline(always)]
fn sums_of<S: Simd, const R: usize, const BF16: bool, const WHOLE: bool>(s: S, args: &mut RawValueArgs<'_>) {
    let chunks = args.page.len() / 16;
    assert!(args.page.len() == 16 * chunks && args.sums.len() == R * chunks && chunks > 0);
    let mut weights = [[0.0; R]; 16];
    for r in 0..R {
        let row = &args.weights[r * args.row_chunks];
        for t in 0..16 {
            weights[t][r] = row[t];
        }
    }
    // Two vectors of channels at a time: the sums of one alone would wait for each other.
    let vectors = chunks * S::HALVES;
    for first in (0..vectors).step_by(2) {
        if first + 1 < vectors {
            add_vectors::<S, R, BF16, WHOLE, 2>(s, args, &weights, first);
        } else {
            add_vectors::<S, R, BF16, WHOLE, 1>(s, args, &weights, first);
        }
    }
}

/// Adds the weighted sums of `N` vectors of channels from vector `first` on.
#[inline(always)]
fn add_vectors<S: Simd, const R: usize, const BF16: bool, const WHOLE: bool, const N: usize>(
    s: S,
    args: &mut RawValueArgs<'_>,
    weights: &[[f32; R]; 16],
    first: usize,
) {
    let chunks = args.page.len() / 16;
    let mut sums = [[s.splat_f(0.0); R]; N];
    for (t, (row, weights)) in args.page.chunks_exact(chunks).zip(weights).enumerate() {
        if !WHOLE && args.live >> t & 1 == 0 {
            continue;
        }
        for n in 0..N {
            let at = first + n;
            let x = load::<S, BF16>(s, &row[at / S::HALVES], at % S::HALVES);
            for r in 0..R {
                sums[n][r] = s.mul_add(x, s.splat_f(weights[r]), sums[n][r]);
            }
        }
    }
    for n in 0..N {
        let at = first + n;
        for line in 0..8 / S::HALVES {
            s.prefetch(args.next.wrapping_add((8 / S::HALVES * at + line) * 64));
        }
        for r in 0..R {
            let to = &mut args.sums[r * chunks + at / S::HALVES];
            s.store_f(s.add(s.load_f(to, at % S::HALVES), sums[n][r]), to, at % S::HALVES);
        }
    }
}
