//! Runs of codes that an integer kernel can take: what it needs to know of each.

use crate::simd::codes::RunAt;
use kvrs_codec::desc::{NONE, RunDesc};
use kvrs_codec::layout::tile_bytes;
use kvrs_codec::tile::scales_apart;
use kvrs_codec::{Arith, Elem, SideCodec, SideDesc};
use kvrs_core::page::PACKED_SLOTS;

/// Largest level of a narrow run: 63 * 520 stays below 2^15.
const NARROW_LEVEL: i32 = 63;

/// Levels of a run as its kernel looks them up.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Levels {
    /// Unsigned bytes by nibble for each row quad: levels with 64 added.
    Narrow([[u8; 16]; 4]),
    /// Signed bytes by code up to 6 bits; unused beyond, where codes are integers.
    Wide([u8; 64]),
}

/// A run of codes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedRun {
    pub(crate) width: usize,
    pub(crate) levels: Levels,
    pub(crate) at: RunAt,
    /// Channels / 4.
    pub(crate) quads: usize,
    /// First chunk of 16 in the prepared vector.
    pub(crate) chunk: usize,
    /// A code's value is `(level + zero) * step`.
    pub(crate) step: f32,
    pub(crate) zero: f32,
    /// Digits per query row that the runs before this one take.
    pub(crate) digits_at: usize,
    /// Spans of the runs before this one.
    pub(crate) spans_at: usize,
}

impl PackedRun {
    pub(crate) fn chunks(&self) -> usize {
        self.quads / 4
    }

    /// Digits per query row.
    pub(crate) fn digits(&self) -> usize {
        if matches!(self.levels, Levels::Narrow(_)) { self.quads } else { 2 * self.quads }
    }

    pub(crate) fn spans(&self) -> usize {
        self.quads.div_ceil(crate::simd::keys::SPAN)
    }
}

/// Appends the runs of a side of pages of 64 slots to `runs` and says whether integer kernels can take all of them.
pub(crate) fn runs_of(desc: &SideDesc, codec: &SideCodec, runs: &mut Vec<PackedRun>) -> bool {
    runs.clear();
    if !scales_apart(desc) || !desc.vec_len.is_multiple_of(16) {
        return false;
    }
    let (mut digits_at, mut spans_at) = (0, 0);
    for run in &desc.runs {
        let Some(packed) = packed(desc, run, codec, (digits_at, spans_at)) else { return false };
        digits_at += packed.digits();
        spans_at += packed.spans();
        runs.push(packed);
    }
    true
}

fn packed(
    desc: &SideDesc,
    run: &RunDesc,
    codec: &SideCodec,
    (digits_at, spans_at): (usize, usize),
) -> Option<PackedRun> {
    let (center, levels) = levels(run, codec)?;
    let at = RunAt {
        codes: (desc.codes_at + run.at) as usize,
        stride: desc.tile_bytes as usize,
        len: tile_bytes(run.width, run.channels as usize),
        scales: (run.scale != NONE).then(|| desc.scales_at as usize + 2 * PACKED_SLOTS * run.scale as usize),
    };
    run.vec_at.is_multiple_of(16).then_some(PackedRun {
        width: run.width as usize,
        levels,
        at,
        quads: run.channels as usize / 4,
        chunk: run.vec_at as usize / 16,
        step: run.step,
        zero: run.zero + center,
        digits_at,
        spans_at,
    })
}

/// The levels of a run, and what was taken off its integers to centre them; `None` where the descriptor demands f32, or
/// more digits than the kernel of its width takes.
fn levels(run: &RunDesc, codec: &SideCodec) -> Option<(f32, Levels)> {
    if run.arith == Arith::F32 || (run.arith == Arith::I8x2 && run.width <= 4) {
        return None;
    }
    let count = 1usize.checked_shl(run.width).filter(|count| *count <= 256)?;
    let center = match run.elem {
        Elem::Int => count as i32 / 2,
        Elem::Lut8 if run.width <= 6 => 0,
        _ => return None,
    };
    let level = |code: usize| match run.elem {
        Elem::Int => code as i32 - center,
        _ => i32::from(codec.lut8[run.lut_at as usize + code]),
    };
    if run.width <= 4 {
        let fits = (0..count).all(|code| level(code).abs() <= NARROW_LEVEL);
        return fits.then(|| {
            (center as f32, Levels::Narrow(narrow_tables(run.width, |code| (level(code) + 64) as u8)))
        });
    }
    let table = std::array::from_fn(|code| if code < count { level(code) as u8 } else { 0 });
    Some((center as f32, Levels::Wide(table)))
}

/// Levels by nibble for the four row quads: which bits of the nibble are theirs says `docs/layouts.md`.
fn narrow_tables(width: u32, level: impl Fn(usize) -> u8) -> [[u8; 16]; 4] {
    let code = |z: usize, nibble: usize| match width {
        4 => nibble,
        2 => nibble >> (2 * (z % 2)) & 3,
        1 => nibble >> z & 1,
        _ => {
            let (two, one) = [(0, 2), (2, 0), (0, 3), (2, 1)][z];
            nibble >> two & 3 | (nibble >> one & 1) << 2
        }
    };
    std::array::from_fn(|z| std::array::from_fn(|nibble| level(code(z, nibble))))
}
