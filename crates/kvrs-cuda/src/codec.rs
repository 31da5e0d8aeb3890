//! What the device keeps of a codec: its descriptor and constants, as kernels read them.

use crate::args::{Book, ENCODED, Encoder, NONE, Pair, Side as SideArgs};
use crate::launcher::Launcher;
use crate::memory::{Allocation, Parcel, Part};
use kvrs_codec::codec::CodecId;
use kvrs_codec::desc::{Elem, Side};
use kvrs_codec::encode::ScaledEncoder;
use kvrs_codec::phasor;
use kvrs_codec::tile::{Levels, scales_apart};
use kvrs_codec::transform::Transform;
use kvrs_codec::{HeadCodec, SideCodec, SideDesc};
use kvrs_core::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Largest head dimension of the kernels.
const MAX_DIM: u32 = 256;

/// One codec in device memory.
#[derive(Debug)]
pub(crate) struct DeviceCodec<L: Launcher> {
    _memory: Allocation<L>,
    /// `[2]` addresses of sides: keys, values.
    pub(crate) sides: u64,
    /// Addresses of the sides.
    pub(crate) side: [u64; 2],
    /// `[2]` encoders; `None` where the device cannot encode.
    pub(crate) encoders: Option<u64>,
    /// Stored channels of the decode kernel that takes it: 64, 128 or 256.
    pub(crate) decode: Option<usize>,
}

/// All codecs that a backend has met.
#[derive(Debug)]
pub(crate) struct Codecs<L: Launcher>(Mutex<HashMap<CodecId, Arc<DeviceCodec<L>>>>);

impl<L: Launcher> Default for Codecs<L> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<L: Launcher> Codecs<L> {
    /// The codec in device memory; brought there when it is first asked for.
    pub(crate) fn get(&self, launcher: &Arc<L>, codec: &HeadCodec) -> Result<Arc<DeviceCodec<L>>> {
        let mut all =
            self.0.lock().map_err(|_| Error::Internal("a thread panicked among device codecs".into()))?;
        if let Some(found) = all.get(&codec.id) {
            return Ok(Arc::clone(found));
        }
        let new = Arc::new(DeviceCodec::new(launcher, codec)?);
        all.insert(codec.id, Arc::clone(&new));
        Ok(new)
    }
}

impl<L: Launcher> DeviceCodec<L> {
    fn new(launcher: &Arc<L>, codec: &HeadCodec) -> Result<Self> {
        check(codec)?;
        // Once to learn how long it is, once with the addresses.
        let (length, _) = lay_out(codec, 0);
        let memory = Allocation::new(launcher, length.bytes().len())?;
        let (parcel, places) = lay_out(codec, memory.address);
        memory.fill(parcel.bytes())?;
        let decode = decodable(codec);
        let encoders = encodable(codec).then(|| places.encoders.at(memory.address));
        let side = places.side.map(|part| part.at(memory.address));
        let sides = places.sides.at(memory.address);
        Ok(Self { _memory: memory, sides, side, encoders, decode })
    }
}

/// Where the parts of a codec that others point to stand.
struct Places {
    side: [Part; 2],
    sides: Part,
    encoders: Part,
}

/// Refuses what kernels have no room for.
fn check(codec: &HeadCodec) -> Result<()> {
    for side in [&codec.desc.key, &codec.desc.value] {
        if side.d > MAX_DIM {
            return Err(Error::plan(
                "head dimension",
                side.d,
                format!("up to {MAX_DIM} channels on a CUDA device"),
            ));
        }
    }
    Ok(())
}

fn lay_out(codec: &HeadCodec, base: u64) -> (Parcel, Places) {
    let mut parcel = Parcel::default();
    let mut encoders = Vec::new();
    let side = [Side::Key, Side::Value].map(|side| {
        let args = side_args(&mut parcel, codec, side, base);
        encoders.push(encoder_args(&mut parcel, codec, side, base));
        parcel.add(&[args])
    });
    let sides = parcel.add(&side.map(|part| part.at(base)));
    let encoders = parcel.add(&encoders);
    (parcel, Places { side, sides, encoders })
}

fn side_args(parcel: &mut Parcel, codec: &HeadCodec, which: Side, base: u64) -> SideArgs {
    let (desc, constants) = codec.side(which);
    let mut add = |values: &[f32]| if values.is_empty() { 0 } else { parcel.add(values).at(base) };
    let (rotation, analysis, synthesis) = match &constants.transform {
        Transform::Identity { .. } => (0, 0, 0),
        Transform::Hadamard { signs, .. } => (1, add(signs), 0),
        Transform::Dense { matrix, .. } => {
            let matrix = add(matrix);
            (2, matrix, matrix)
        }
        Transform::Pair { analysis, synthesis, .. } => (2, add(analysis), add(synthesis)),
    };
    let levels = add(Levels::new(desc, constants).of_runs().as_flattened());
    let mean = constants.mean.as_ref().map_or(0, |mean| add(mean));
    let offset = constants.offset.as_ref().map_or(0, |offset| add(offset.constant()));
    let offset_pairs = constants.offset.as_ref().map_or(&[][..], |offset| offset.pairs());
    let rope_pairs = constants.rope.as_ref().map_or(&[][..], |rope| rope.pairs());
    let hadamard = matches!(constants.transform, Transform::Hadamard { .. });
    let d = constants.transform.d();
    SideArgs {
        run: parcel.add(&desc.runs).at(base),
        levels,
        lut8: parcel.add(&constants.lut8).at(base),
        analysis,
        synthesis,
        mean,
        offset,
        offset_pair: parcel.add(&pairs(offset_pairs)).at(base),
        rope_pair: parcel.add(&pairs(rope_pairs)).at(base),
        base_pairs: offset_pairs.len() as u32,
        rotation,
        rope_pairs: rope_pairs.len() as u32,
        rotation_factor: if hadamard { Transform::orthonormal_factor(d) } else { 1.0 },
        between_rounds: if hadamard { Transform::between_rounds(d) } else { 1.0 },
        live: constants.transform.live() as u32,
        ..described(desc, which, codec.desc.slots)
    }
}

/// The numbers of a descriptor.
fn described(desc: &SideDesc, which: Side, slots: u32) -> SideArgs {
    SideArgs {
        path: desc.path as u32,
        parts: desc.parts,
        d: desc.d,
        n: desc.n,
        vec_len: desc.vec_len,
        inner: desc.inner as u32,
        block: desc.block,
        sparse_per_tile: desc.sparse_per_tile,
        tile_ops: desc.tile_ops,
        tile_bytes: desc.tile_bytes,
        codes_at: desc.codes_at,
        scales_at: desc.scales_at,
        scales: desc.scales,
        inner_at: desc.inner_at,
        sparse_at: desc.sparse_at,
        runs: desc.runs.len() as u32,
        slots,
        is_key: u32::from(which == Side::Key),
        ..SideArgs::default()
    }
}

fn pairs(pairs: &[phasor::Pair]) -> Vec<Pair> {
    let pair = |p: &phasor::Pair| Pair { turn: p.turn, a: p.a as u32, b: p.b.map_or(NONE, |b| b as u32) };
    pairs.iter().map(pair).collect()
}

/// Which decode kernel takes both sides: pages of 64 slots, up to 4 bits from tables of 8-bit levels, whole pairs of
/// blocks, scales per token, no key offset.
fn decodable(codec: &HeadCodec) -> Option<usize> {
    let fits = |which: Side| {
        let (desc, constants) = codec.side(which);
        let runs = desc.runs.iter().all(|run| {
            run.elem == Elem::Lut8 && run.width <= 4 && run.channels.is_multiple_of(32) && run.zero == 0.0
        });
        runs && scales_apart(desc) && constants.offset.is_none()
    };
    let most = codec.desc.key.n.max(codec.desc.value.n) as usize;
    let kernel = [64, 128, 256].into_iter().find(|channels| most <= *channels);
    kernel.filter(|_| codec.desc.slots == 64 && fits(Side::Key) && fits(Side::Value))
}

/// Whether the encoding kernel takes both sides.
fn encodable(codec: &HeadCodec) -> bool {
    [Side::Key, Side::Value].iter().all(|&side| {
        let (desc, constants) = codec.side(side);
        match &constants.encoder {
            None => desc.runs.len() == 1 && desc.runs[0].width == 16,
            Some(encoder) => encoder.as_scaled().is_some_and(|encoder| scaled(desc, constants, encoder)),
        }
    })
}

fn scaled(desc: &SideDesc, constants: &SideCodec, encoder: &ScaledEncoder) -> bool {
    desc.n as usize <= ENCODED
        && desc.parts == 1
        && constants.transform.d() == desc.d as usize
        && encoder.books.len() == desc.runs.len()
}

fn encoder_args(parcel: &mut Parcel, codec: &HeadCodec, side: Side, base: u64) -> Encoder {
    let (_, constants) = codec.side(side);
    let Some(encoder) = constants.encoder.as_ref().and_then(|encoder| encoder.as_scaled()) else {
        return Encoder::default();
    };
    let books: Vec<Book> = encoder
        .books
        .iter()
        .map(|book| Book {
            thresholds: parcel.add(book.thresholds).at(base),
            levels: book.levels.len() as u32,
            pad: 0,
            inverse_step: 1.0 / book.step,
            zero: book.zero(),
            top: ((1u32 << book.width) - 1) as f32,
            step: book.step,
        })
        .collect();
    let root = (constants.transform.d() as f64).sqrt();
    Encoder {
        books: parcel.add(&books).at(base),
        rule: encoder.rule as u32,
        scaled: 1,
        unit_factor: constants.transform.unit_factor(),
        root: root as f32,
        inverse_root: (1.0 / root) as f32,
        inverse_live: 1.0 / constants.transform.live() as f32,
    }
}
