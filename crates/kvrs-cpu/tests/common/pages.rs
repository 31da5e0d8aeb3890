//! Page tables filled with random bytes that stand for finite numbers.

use super::Rng;
use half::f16;
use kvrs_codec::backend::Backend;
use kvrs_codec::codec::LayerCodec;
use kvrs_codec::desc::TILE;
use kvrs_codec::layout::{pack_block, run_range, unpack_block};
use kvrs_codec::{Elem, HeadCodec, Inner, Side};
use kvrs_core::page::{Arena, Page, RAW_SLOTS, Table, Zone};
use std::sync::Arc;

/// How the tokens of a sequence are kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    pub(crate) tokens: usize,
    pub(crate) sinks: usize,
    /// Full groups that are sealed.
    pub(crate) sealed: usize,
    /// Whether bytes of dead and of unfilled slots are 0xFF.
    pub(crate) poison: bool,
}

impl Stored {
    /// As much sealed as leaves `recent` tokens.
    pub(crate) fn new(tokens: usize, sinks: usize, recent: usize, group: usize) -> Self {
        let sinks = sinks.min(tokens);
        Self { tokens, sinks, sealed: (tokens - sinks).saturating_sub(recent) / group, poison: false }
    }
}

/// A table of head group `group` with random content; tokens for which `keep` is false are dead.
pub(crate) fn table<B: Backend>(
    rng: &mut Rng,
    backend: &Arc<B>,
    layer: &LayerCodec,
    group: usize,
    stored: Stored,
    keep: &dyn Fn(usize) -> bool,
) -> Table<B::Chunk> {
    let arena = Arena::new(Arc::clone(backend), None).unwrap();
    let [raw, packed] = &layer.classes[group][..] else { panic!("two classes") };
    let slots = packed.desc.slots as usize;
    let mut table = Table::default();
    let fresh = |codec: &HeadCodec| {
        let mut page =
            arena.reserve("page", &[(codec.desc.page_bytes, 1)]).unwrap().take(codec.desc.page_bytes);
        edit(&**backend, &mut page, |bytes| bytes.fill(if stored.poison { 0xFF } else { 0 }));
        page
    };
    let mut sealed = 0;
    for token in 0..stored.tokens {
        let zone = if token < stored.sinks { Zone::Sinks } else { Zone::Window };
        let (page, slot) = table.push_raw(zone, token, || fresh(raw), |_, _| {});
        edit(&**backend, page, |bytes| {
            fill(rng, raw, bytes, slot..slot + 1);
            if stored.poison && !keep(token) {
                poison(raw, bytes, slot);
            }
        });
        let group = packed.desc.group as usize;
        let ripe = token + 1 >= stored.sinks + (sealed + 1) * group;
        if ripe && sealed < stored.sealed {
            let encode = |_: &[&Page<B::Chunk>], first: usize, page: &mut Page<B::Chunk>, slot: usize| {
                edit(&**backend, page, |bytes| {
                    fill(rng, packed, bytes, slot..slot + group);
                    for i in (0..group).filter(|i| stored.poison && !keep(first + i)) {
                        poison(packed, bytes, slot + i);
                    }
                });
            };
            table.seal(1, group, slots, || fresh(packed), |_, _| {}, encode);
            sealed += 1;
        }
    }
    table.retain(keep, &[Zone::Sinks, Zone::Sealed, Zone::Window]);
    assert_eq!(RAW_SLOTS, raw.desc.slots as usize);
    table
}

fn put(bytes: &mut [u8], at: u32, index: usize, value: f32) {
    let at = at as usize + 2 * index;
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Changes the bytes of a page, wherever they are.
pub(crate) fn edit<B: Backend>(backend: &B, page: &mut Page<B::Chunk>, change: impl FnOnce(&mut [u8])) {
    let mut bytes = vec![0; page.bytes()];
    backend.read_page(page, &mut bytes).unwrap();
    change(&mut bytes);
    backend.write_page(page, &bytes).unwrap();
}

/// Random codes and scales for neighbouring slots.
fn fill(rng: &mut Rng, codec: &HeadCodec, bytes: &mut [u8], slots: std::ops::Range<usize>) {
    let desc = &codec.desc;
    for side in [Side::Key, Side::Value] {
        let s = desc.side(side);
        for run in &s.runs {
            for slot in slots.clone() {
                fill_codes(
                    rng,
                    run.elem,
                    side,
                    run.width,
                    &mut bytes[run_range(desc, side, run, slot / TILE)],
                    slot % TILE,
                    run.channels as usize,
                );
            }
        }
        for (i, slot) in (0..s.scales as usize).flat_map(|i| slots.clone().map(move |slot| (i, slot))) {
            put(bytes, s.scales_at, i * desc.slots as usize + slot, 1.0 + 0.5 * rng.unit());
        }
        let (n, block) = (s.n as usize, s.block as usize);
        let pairs = match s.inner {
            Inner::None => 0..0,
            Inner::GroupChannel => slots.start / block * n..slots.end / block * n,
            Inner::TokenBlock => slots.start * n.div_ceil(block)..slots.end * n.div_ceil(block),
        };
        for pair in pairs {
            put(bytes, s.inner_at, 2 * pair, 1.0 + 0.5 * rng.unit());
            put(bytes, s.inner_at, 2 * pair + 1, 0.5 * rng.unit());
        }
        let per_tile = s.sparse_per_tile as usize;
        for entry in slots.start / TILE * per_tile..slots.end / TILE * per_tile {
            let place = if rng.below(4) == 0 { 0xFFFF } else { rng.below(16) * 0x400 + rng.below(n) };
            let at = s.sparse_at as usize + 4 * entry;
            bytes[at..at + 2].copy_from_slice(&(place as u16).to_le_bytes());
            put(bytes, s.sparse_at, 2 * entry + 1, rng.unit());
        }
    }
}

fn fill_codes(
    rng: &mut Rng,
    elem: Elem,
    side: Side,
    width: u32,
    tile: &mut [u8],
    token: usize,
    channels: usize,
) {
    if width == 16 {
        for word in tile[2 * token * channels..][..2 * channels].as_chunks_mut().0 {
            *word = ((rng.bits() as u16) & 0xBFFF).to_le_bytes(); // below 2
        }
        return;
    }
    // Without this bit 8-bit floats are below 2.
    let mask = if matches!(elem, Elem::E4m3 | Elem::E5m2) { 0xBF } else { ((1u32 << width) - 1) as u8 };
    set_codes(side, width, tile, token, channels, || rng.bits() as u8 & mask);
}

fn set_codes(
    side: Side,
    width: u32,
    tile: &mut [u8],
    token: usize,
    channels: usize,
    mut code: impl FnMut() -> u8,
) {
    for block in 0..channels / 16 {
        let mut codes = [0; 256];
        unpack_block(side, width, tile, block, channels, &mut codes);
        codes[16 * token..][..16].iter_mut().for_each(|c| *c = code());
        pack_block(side, width, &codes, tile, block, channels);
    }
}

/// Sets everything that belongs to one slot to ones.
fn poison(codec: &HeadCodec, bytes: &mut [u8], slot: usize) {
    let desc = &codec.desc;
    for side in [Side::Key, Side::Value] {
        let s = desc.side(side);
        for run in &s.runs {
            let (tile, channels) =
                (&mut bytes[run_range(desc, side, run, slot / TILE)], run.channels as usize);
            if run.width == 16 {
                tile[2 * (slot % TILE) * channels..][..2 * channels].fill(0xFF);
            } else {
                set_codes(side, run.width, tile, slot % TILE, channels, || {
                    (1u16 << run.width).wrapping_sub(1) as u8
                });
            }
        }
        for i in 0..s.scales as usize {
            put(bytes, s.scales_at, i * desc.slots as usize + slot, f32::NAN);
        }
        if s.inner == Inner::TokenBlock {
            let pairs = s.n.div_ceil(s.block) as usize;
            (slot * pairs * 2..(slot + 1) * pairs * 2).for_each(|i| put(bytes, s.inner_at, i, f32::NAN));
        }
    }
}
