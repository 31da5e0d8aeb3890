//! Encoding of 16 tokens side by side: every lane does for its token what `kvrs_codec::encode::ScaledEncoder` does, in
//! the same order, so codes and scales are equal bit for bit. Nothing here may fuse a product with a sum.

use super::Simd;
use super::hadamard::hadamard_tokens;
use super::lines::Lines;
use super::pack::{Cells, pack_run};
use super::quantise::Job;
use super::search::Found;
use half::f16;
use kvrs_codec::Elem;
use kvrs_codec::desc::TILE;
use kvrs_codec::encode::EncodeContext;
use kvrs_codec::layout;
use kvrs_codec::scale::{Norm, ScaleRule};
use kvrs_codec::transform::Transform;

/// What encoding needs beyond the common operations.
pub(crate) trait SimdEncode: Simd {
    /// `2 * index + 1` in lanes where `u >= t`, `2 * index` elsewhere.
    fn refine(self, index: Self::I, u: Self::F, t: Self::F) -> Self::I;
    /// Lane-wise `table[index]`, index < 4.
    fn pick4(self, table: &[f32; 4], index: Self::I) -> Self::F;
    /// Lane-wise `table[index % 8]`.
    fn pick8(self, table: &[f32; 8], index: Self::I) -> Self::F;
    /// Lane-wise `table[index % 16]`.
    #[inline(always)]
    fn pick16(self, table: &[[f32; 8]; 2], index: Self::I) -> Self::F {
        self.choose::<3>(index, self.pick8(&table[1], index), self.pick8(&table[0], index))
    }
    /// `a` in lanes whose bit `BIT` of the index is set, `b` elsewhere.
    fn choose<const BIT: u32>(self, index: Self::I, a: Self::F, b: Self::F) -> Self::F;
    /// As [`Self::choose`].
    fn choose_i<const BIT: u32>(self, index: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// Byte-wise `table[index % 32]`, index < 64, in the low byte of each lane; the others become `table[0]`.
    #[inline(always)]
    fn lookup32(self, table: [&[u8; 16]; 2], index: Self::I) -> Self::I {
        let low = self.and(index, self.splat_bytes(15));
        let [a, b] = table;
        let (a, b) = (self.lookup16(self.table16(a), low), self.lookup16(self.table16(b), low));
        self.choose_i::<4>(index, b, a)
    }
    /// The bits of f32 lanes.
    fn bits(self, x: Self::F) -> Self::I;
    /// Half `half` of a chunk as f16, nearest even.
    fn store_f16(self, x: Self::F, out: &mut [u8; 32], half: usize);
    /// Writes lanes as [`Simd::load`] reads them.
    fn store(self, x: Self::I, unit: &mut [u8; 64], half: usize);
    /// Writes the low bytes of four vectors: byte `4 * lane + i` of `unit` is lane `lane` of `codes[i]`.
    fn store_across(self, codes: [Self::I; 4], unit: &mut [u8; 64], half: usize);
    /// Writes the low bytes of four vectors: byte `16 * quad + 4 * i + lane % 4` of `units[lane / 4]` is lane `lane`
    /// of `codes[i]`.
    fn store_along(self, codes: [Self::I; 4], units: &mut [[u8; 64]; 4], quad: usize, half: usize);
    /// Sixteen 16-bit floats (bfloat16 or f16) of 16 rows as f32, transposed.
    fn transpose(self, bf16: bool, rows: &[&[u8; 32]; 16], out: &mut [[f32; 16]; 16]);
}

/// One element of 16 tokens.
pub(crate) type Lanes = [f32; TILE];

/// Partial sums, channel c in c mod 16.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Partial([Lanes; 16]);

/// One tile of one side.
pub(crate) struct TileArgs<'a> {
    pub(crate) context: EncodeContext<'a>,
    pub(crate) rule: ScaleRule,
    /// The codebooks of the runs.
    pub(crate) books: &'a [Found],
    pub(crate) elem: Elem,
    /// Rows `[token][chunk]` of 16-bit channels.
    pub(crate) rows: &'a [[u8; 32]],
    /// Positions of the tokens.
    pub(crate) positions: &'a [i64; TILE],
    pub(crate) page: &'a mut [u8],
    /// Slot of the first token, a multiple of 16.
    pub(crate) slot: usize,
    pub(crate) scratch: &'a mut Scratch,
}

/// Working memory that calls reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Vectors `[channel]`.
    x: Lines,
    /// Stored channels of dense transforms `[channel]`.
    y: Lines,
    /// Codes `[block]`.
    cells: Vec<Cells>,
    /// Signs of the rotation times the factors between rounds.
    signs: Vec<f32>,
    partial: Partial,
}

/// Encodes a tile.
#[inline(always)]
pub(crate) fn encode_tile<S: SimdEncode>(s: S, args: &mut TileArgs<'_>) {
    let (context, transform) = (args.context, &args.context.codec.transform);
    let (d, n, live) = (transform.d(), context.desc().n as usize, transform.live());
    let Scratch { x, y, cells, signs, partial } = &mut *args.scratch;
    let (x, partial) = (x.chunks(d.next_multiple_of(16)), &mut partial.0);
    cells.resize(n / 16, Cells::ZERO);
    if live < n {
        cells.fill(Cells::ZERO);
    }
    read(s, args.elem == Elem::Bf16, args.rows, x);
    let x = &mut x[..d];
    centre(s, &context, args.positions, x);
    squares(s, x, partial);
    let mut norms = Norms::new(&partial[0], 1.0, transform.unit_factor());
    let y = match transform {
        Transform::Identity { .. } => x,
        Transform::Hadamard { signs: constants, .. } => {
            hadamard_tokens(s, constants, x, signs);
            x
        }
        Transform::Dense { matrix, .. } | Transform::Pair { analysis: matrix, .. } => {
            let y = y.chunks(live);
            dense(s, matrix, x, y);
            y
        }
    };
    if args.rule == ScaleRule::Rms {
        squares(s, y, partial);
        norms = Norms::new(&partial[0], 1.0 / live as f32, 1.0);
    }
    let mut job = Job { context: &context, books: args.books, y, factors: &norms.factors, cells, partial };
    let scales = job.scales(s, args.rule, d, &norms.lengths);
    write_scales(s, &context, args.page, args.slot, &scales);
    let mut first = 0;
    for run in &context.desc().runs {
        let tile = &mut args.page[layout::run_range(context.page, context.side, run, args.slot / TILE)];
        let blocks = run.channels as usize / 16;
        pack_run(s, run.width, &cells[first..first + blocks], tile);
        first += blocks;
    }
}

/// The rows as f32, transposed, in whole chunks of channels.
#[inline(always)]
fn read<S: SimdEncode>(s: S, bf16: bool, rows: &[[u8; 32]], x: &mut [Lanes]) {
    let chunks = rows.len() / TILE;
    for (b, out) in x.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let mut block = [&rows[b]; TILE];
        for t in 1..TILE {
            block[t] = &rows[t * chunks + b];
        }
        s.transpose(bf16, &block, out);
    }
}

/// Takes key offset and mean out.
#[inline(always)]
fn centre<S: Simd>(s: S, context: &EncodeContext<'_>, positions: &[i64; TILE], x: &mut [Lanes]) {
    if let Some(offset) = &context.codec.offset {
        offset.subtract_16(positions, x);
    }
    if let Some(mean) = &context.codec.mean {
        for (x, &m) in x.iter_mut().zip(&**mean) {
            for half in 0..S::HALVES {
                s.store_f(s.sub(s.load_f(x, half), s.splat_f(m)), x, half);
            }
        }
    }
}

/// Lengths of 16 tokens, and what brings their channels to unit variance.
struct Norms {
    lengths: Lanes,
    factors: Lanes,
}

impl Norms {
    /// From squared lengths; the squares of the lengths proper are `share` of them.
    #[inline(always)]
    fn new(squares: &Lanes, share: f32, unit_factor: f32) -> Self {
        let mut norms = Self { lengths: [0.0; TILE], factors: [0.0; TILE] };
        for (t, &square) in squares.iter().enumerate() {
            let Norm { length, inverse } = Norm::of_square(square, square * share);
            (norms.lengths[t], norms.factors[t]) = (length, inverse * unit_factor);
        }
        norms
    }
}

/// `red16` of the squares of each token, in `partial[0]`.
#[inline(always)]
fn squares<S: Simd>(s: S, x: &[Lanes], partial: &mut [Lanes; 16]) {
    for half in 0..S::HALVES {
        for (q, partial) in partial.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut sums = [s.splat_f(0.0); 8];
            for x in x.chunks(16) {
                let x = x.get(8 * q..).unwrap_or_default();
                for i in 0..8 {
                    if i < x.len() {
                        let v = s.load_f(&x[i], half);
                        sums[i] = s.add(sums[i], s.mul(v, v));
                    }
                }
            }
            for i in 0..8 {
                s.store_f(sums[i], &mut partial[i], half);
            }
        }
    }
    halve(s, partial);
}

/// The sum of 16 partial sums, halved by 8, 4, 2, 1, into the first.
#[inline(always)]
pub(crate) fn halve<S: Simd>(s: S, partial: &mut [Lanes; 16]) {
    for half in 0..S::HALVES {
        let mut p = [s.splat_f(0.0); 16];
        for i in 0..16 {
            p[i] = s.load_f(&partial[i], half);
        }
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                p[i] = s.add(p[i], p[i + width]);
            }
        }
        s.store_f(p[0], &mut partial[0], half);
    }
}

/// `y = matrix x`; each sum starts at +0 and takes channels ascending. Four rows go side by side.
#[inline(always)]
fn dense<S: Simd>(s: S, matrix: &[f32], x: &[Lanes], y: &mut [Lanes]) {
    let mut rows = matrix.chunks_exact(4 * x.len());
    for (y, rows) in y.as_chunks_mut::<4>().0.iter_mut().zip(&mut rows) {
        let mut four = [rows; 4];
        for (i, row) in rows.chunks_exact(x.len()).enumerate() {
            four[i] = row;
        }
        dense_4(s, four, x, y);
    }
}

#[inline(always)]
fn dense_4<S: Simd>(s: S, rows: [&[f32]; 4], x: &[Lanes], y: &mut [Lanes; 4]) {
    let rows = [&rows[0][..x.len()], &rows[1][..x.len()], &rows[2][..x.len()], &rows[3][..x.len()]];
    let mut sums = [[s.splat_f(0.0); 2]; 4];
    for (c, x) in x.as_chunks::<4>().0.iter().enumerate() {
        for k in 0..4 {
            let mut v = [s.splat_f(0.0); 2];
            for half in 0..S::HALVES {
                v[half] = s.load_f(&x[k], half);
            }
            for i in 0..4 {
                let a = s.splat_f(rows[i][4 * c + k]);
                for half in 0..S::HALVES {
                    sums[i][half] = s.add(sums[i][half], s.mul(a, v[half]));
                }
            }
        }
    }
    for i in 0..4 {
        for half in 0..S::HALVES {
            s.store_f(sums[i][half], &mut y[i], half);
        }
    }
}

/// Writes the scales of 16 slots as f16, saturated at 65504.
#[inline(always)]
fn write_scales<S: SimdEncode>(
    s: S,
    context: &EncodeContext<'_>,
    page: &mut [u8],
    slot: usize,
    scales: &Lanes,
) {
    let at = context.desc().scales_at as usize + 2 * slot;
    let out = page[at..].first_chunk_mut().expect("pages hold the scales of their slots");
    for half in 0..S::HALVES {
        s.store_f16(s.min(s.load_f(scales, half), s.splat_f(f16::MAX.to_f32_const())), out, half);
    }
}

#[cfg(test)]
pub(crate) mod tests;
