//! Random layers: descriptors with every feature that kernels must know.

use super::Rng;
use kvrs_codec::codec::{CodecId, LayerCodec};
use kvrs_codec::desc::{NONE, tile_ops};
use kvrs_codec::offset::KeyOffset;
use kvrs_codec::phasor::Phasors;
use kvrs_codec::transform::Transform;
use kvrs_codec::{Arith, Elem, HeadCodec, Inner, PageDesc, Path, RunDesc, Side, SideCodec, SideDesc};
use kvrs_core::{LayerShape, Rope};
use std::sync::Arc;

const LUT: usize = 256;

/// A random layer of two classes, raw and packed.
pub(crate) fn layer(rng: &mut Rng) -> LayerCodec {
    let dims = [64, 80, 100, 128, 256];
    let heads_per_group = rng.pick(&[1, 1, 1, 2]);
    let kv_heads = heads_per_group * (1 + rng.below(2));
    let shape = LayerShape {
        query_heads: kv_heads * rng.pick(&[1, 2, 3, 4, 5, 8, 16]),
        kv_heads,
        key_dim: rng.pick(&dims),
        value_dim: rng.pick(&dims),
        rope: Some(Rope::new(1e4)),
        sliding: rng.pick(&[None, None, Some(40), Some(130)]),
    };
    let classes = (0..kv_heads / heads_per_group).map(|_| {
        let raw = raw(rng, &shape, heads_per_group as u32);
        vec![raw, packed(rng, &shape, heads_per_group as u32)]
    });
    LayerCodec { classes: classes.collect(), heads_per_group, shape }
}

fn raw(rng: &mut Rng, shape: &LayerShape, heads: u32) -> HeadCodec {
    let elem = rng.pick(&[Elem::F16, Elem::Bf16]);
    let side = |d: usize| {
        let width = d * heads as usize;
        let run =
            RunDesc { width: 16, elem, channels: width.next_multiple_of(16) as u32, scale: NONE, ..run(0) };
        (blank(d, heads, vec![run]), constants(Transform::Identity { d }))
    };
    assemble(16, 16, heads, side(shape.key_dim), side(shape.value_dim))
}

fn packed(rng: &mut Rng, shape: &LayerShape, heads: u32) -> HeadCodec {
    let group = rng.pick(&[16, 32, 64]);
    let key = side(rng, Side::Key, shape.key_dim, heads, group);
    let value = side(rng, Side::Value, shape.value_dim, heads, group);
    assemble(64, group, heads, key, value)
}

fn run(vec_at: u32) -> RunDesc {
    RunDesc {
        width: 4,
        elem: Elem::Lut8,
        arith: Arith::F32,
        scale: NONE,
        channels: 16,
        vec_at,
        at: 0,
        lut_at: 0,
        step: 1.0,
        zero: 0.0,
    }
}

fn blank(d: usize, parts: u32, runs: Vec<RunDesc>) -> SideDesc {
    let n = runs.iter().map(|r| r.channels).sum();
    let dot = parts == 1;
    SideDesc {
        path: if dot { Path::Dot } else { Path::Tile },
        parts,
        d: d as u32,
        n,
        vec_len: if dot { n } else { d as u32 },
        inner: Inner::None,
        block: 0,
        base_pairs: 0,
        sparse_per_tile: 0,
        tile_ops: 0,
        tile_bytes: runs.iter().map(|r| 2 * r.channels * r.width).sum(),
        codes_at: 0,
        scales_at: 0,
        scales: 0,
        inner_at: 0,
        sparse_at: 0,
        runs,
    }
}

fn constants(transform: Transform) -> SideCodec {
    SideCodec {
        transform,
        lut8: Arc::new([]),
        lut32: Arc::new([]),
        offset: None,
        mean: None,
        rope: None,
        encoder: None,
    }
}

fn side(rng: &mut Rng, side: Side, d: usize, parts: u32, group: u32) -> (SideDesc, SideCodec) {
    let mut desc = blank(d, parts, random_runs(rng));
    let width = d * parts as usize;
    if parts > 1 || rng.below(3) == 0 {
        (desc.path, desc.vec_len, desc.tile_ops) = (Path::Tile, d as u32, tile_ops::MATRIX);
    }
    scales(rng, side, group, &mut desc);
    let n = desc.n as usize;
    let matrix = rng.vector(n * width, 1.5 / (n as f32).sqrt()).into();
    let mut codec = constants(Transform::Dense { matrix, d: width, n });
    codec.lut8 = (0..LUT).map(|_| (rng.bits() as i8).clamp(-100, 100)).collect();
    codec.lut32 = rng.vector(LUT, 1.0).into();
    if desc.path == Path::Tile || side == Side::Value {
        codec.mean = rng.coin().then(|| rng.vector(width, 1.0).into());
    }
    if side == Side::Key {
        positional(rng, d, &mut desc, &mut codec);
    }
    (desc, codec)
}

fn positional(rng: &mut Rng, d: usize, desc: &mut SideDesc, codec: &mut SideCodec) {
    let phasors = Phasors::new(&Rope::new(1e4), d).unwrap();
    if desc.path == Path::Tile {
        if rng.coin() {
            desc.tile_ops |= tile_ops::ROPE;
            codec.rope = Some(Arc::new(phasors));
        }
    } else if rng.coin() {
        let offset = KeyOffset::new(&rng.vector(d, 4.0), &phasors);
        desc.base_pairs = offset.base_pairs() as u32;
        codec.offset = Some(offset);
    }
}

/// Runs of falling width whose slices of the prepared vector stand in reverse order.
fn random_runs(rng: &mut Rng) -> Vec<RunDesc> {
    let mut widths: Vec<u32> = (0..=rng.below(4)).map(|_| rng.pick(&[1, 2, 3, 4, 5, 6, 7, 8, 16])).collect();
    widths.sort_unstable_by(|a, b| b.cmp(a));
    let mut runs: Vec<RunDesc> = widths.iter().map(|&width| random_run(rng, width)).collect();
    let (mut at, mut vec_at) = (0, runs.iter().map(|r| r.channels).sum::<u32>());
    for run in &mut runs {
        vec_at -= run.channels;
        (run.at, run.vec_at) = (at, vec_at);
        at += 2 * run.channels * run.width;
    }
    runs
}

fn random_run(rng: &mut Rng, width: u32) -> RunDesc {
    let half = (1u32 << (width - 1)) as f32;
    let elem = match width {
        16 => rng.pick(&[Elem::F16, Elem::Bf16]),
        8 => rng.pick(&[Elem::Lut8, Elem::Int, Elem::E4m3, Elem::E5m2]),
        _ => rng.pick(&[Elem::Lut8, Elem::Int, Elem::Lut32]),
    };
    let (step, zero) = match elem {
        Elem::Lut8 => (0.01, 0.0),
        Elem::Int => (1.0 / half, 0.5 - half),
        Elem::F16 | Elem::Bf16 => (1.0, 0.0),
        _ => (0.7, 0.0),
    };
    RunDesc { width, elem, step, zero, channels: 16 * (1 + rng.below(5)) as u32, ..run(0) }
}

fn scales(rng: &mut Rng, side: Side, group: u32, desc: &mut SideDesc) {
    desc.scales = rng.below(3) as u32;
    for run in &mut desc.runs {
        run.scale =
            if desc.scales > 0 && rng.below(4) > 0 { rng.below(desc.scales as usize) as u32 } else { NONE };
    }
    if rng.below(3) == 0 {
        let sizes = [16, 32, 64];
        (desc.inner, desc.block) = match side {
            Side::Key => (Inner::GroupChannel, rng.pick(&sizes).min(group)),
            Side::Value => (Inner::TokenBlock, rng.pick(&sizes)),
        };
    }
    if rng.below(3) == 0 {
        desc.sparse_per_tile = 1 + rng.below(9) as u32;
        if desc.path == Path::Tile {
            desc.tile_ops |= tile_ops::SPARSE;
        }
    }
}

/// Lays the sides out in a page and validates it.
fn assemble(
    slots: u32,
    group: u32,
    heads: u32,
    key: (SideDesc, SideCodec),
    value: (SideDesc, SideCodec),
) -> HeadCodec {
    let mut at = 0;
    let mut place = |bytes: u32| {
        at += bytes.next_multiple_of(32);
        at - bytes.next_multiple_of(32)
    };
    let (mut k, mut v) = (key.0, value.0);
    for side in [&mut k, &mut v] {
        side.codes_at = place(slots / 16 * side.tile_bytes);
        side.scales_at = place(2 * slots * side.scales);
        side.inner_at = place(4 * slots * side.n.max(1));
        side.sparse_at = place(4 * slots / 16 * side.sparse_per_tile);
    }
    let desc = PageDesc { slots, group, heads, page_bytes: at.next_multiple_of(64), key: k, value: v };
    desc.validate().unwrap();
    HeadCodec { id: CodecId::fresh(), desc, key: key.1, value: value.1 }
}
