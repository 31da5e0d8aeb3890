//! Bytes that the backend writes: raw rows, sealed groups, copied slots.
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod common;

use common::{Rng, Tensor};
use kvrs_codec::backend::{Backend, RawRows};
use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::tile::decode_slot;
use kvrs_codec::{Dtype, HeadCodec, Side};
use kvrs_core::LayerShape;
use kvrs_core::page::{Arena, Page};
use kvrs_cpu::Cpu;
use kvrs_cpu::memory::{Chunk, bytes, bytes_mut};
use std::sync::Arc;

const DIMS: [usize; 2] = [100, 80];

fn shape() -> LayerShape {
    let [key_dim, value_dim] = DIMS;
    LayerShape { query_heads: 2, kv_heads: 2, key_dim, value_dim, rope: None, sliding: None }
}

fn codec(key: &CodecSpec, value: &CodecSpec) -> HeadCodec {
    let mut cache = ConstantCache::default();
    let mut side = |spec: &CodecSpec, side, d| {
        let context = SideContext {
            side,
            d,
            layer: 0,
            seed: 3,
            window: Dtype::Bf16,
            rope: None,
            constant: None,
            group: 0,
            arrays: None,
        };
        spec.build(&context, &mut cache).unwrap()
    };
    let (key, value) = (side(key, Side::Key, DIMS[0]), side(value, Side::Value, DIMS[1]));
    quant::assemble(key, value, 1).unwrap()
}

/// Sixteen consecutive positions.
fn from_on(position: i64) -> [i64; 16] {
    std::array::from_fn(|i| position + i as i64)
}

fn page(cpu: &Arc<Cpu>, codec: &HeadCodec) -> Page<Chunk> {
    let arena = Arena::new(Arc::clone(cpu), None).unwrap();
    let mut page = arena.reserve("page", &[(codec.desc.page_bytes, 1)]).unwrap().take(codec.desc.page_bytes);
    bytes_mut(&mut page).fill(0xFF);
    page
}

fn decode(codec: &HeadCodec, side: Side, page: &Page<Chunk>, slot: usize) -> Vec<f32> {
    let mut out = vec![0.0; codec.desc.side(side).d as usize];
    decode_slot(codec, side, bytes(page), slot, 0, 0, &mut out);
    out
}

/// A full raw page of random rows.
fn raw_page(cpu: &Arc<Cpu>, raw: &HeadCodec) -> (Page<Chunk>, [Tensor; 2]) {
    let mut rng = Rng(5);
    let tensors = DIMS.map(|d| Tensor::random(&mut rng, [1, 2, 20, d], 3.0));
    let mut page = page(cpu, raw);
    let [k, v] = &tensors;
    let rows = RawRows { k: k.view(), v: v.view(), row: 0, head: 1, columns: &[] };
    cpu.store_raw(raw, &mut page, 0, RawRows { columns: &[2, 3, 5], ..rows });
    cpu.store_raw(raw, &mut page, 3, RawRows { columns: &(7..20).collect::<Vec<_>>(), ..rows });
    (page, tensors)
}

#[test]
fn raw_rows_are_the_inputs_rounded_to_16_bits() {
    let (cpu, raw) = (Cpu::shared(), quant::raw(&shape(), Dtype::Bf16).unwrap());
    let (page, tensors) = raw_page(&cpu, &raw);
    let columns = [2, 3, 5].into_iter().chain(7..20);
    for (slot, column) in columns.enumerate() {
        for (side, tensor) in [Side::Key, Side::Value].into_iter().zip(&tensors) {
            let expected = tensor.row([0, 1, column]).into_iter().map(|x| half::bf16::from_f32(x).to_f32());
            assert_eq!(decode(&raw, side, &page, slot), expected.collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_16_bit_side_is_sealed_as_it_was() {
    let (cpu, raw) = (Cpu::shared(), quant::raw(&shape(), Dtype::Bf16).unwrap());
    let packed = codec(&CodecSpec::turboquant(8.0), &CodecSpec::raw16());
    let (from, _) = raw_page(&cpu, &raw);
    let mut to = page(&cpu, &packed);
    cpu.seal((&raw, &packed), &[&from], &from_on(1000), &mut to, 32);
    for slot in 0..16 {
        assert_eq!(decode(&packed, Side::Value, &to, 32 + slot), decode(&raw, Side::Value, &from, slot));
        let (exact, got) = (decode(&raw, Side::Key, &from, slot), decode(&packed, Side::Key, &to, 32 + slot));
        let error: f32 = exact.iter().zip(&got).map(|(a, b)| (a - b) * (a - b)).sum();
        let length: f32 = exact.iter().map(|a| a * a).sum();
        assert!(error < 5e-4 * length && error > 0.0, "relative error {}", error / length);
    }
}

#[test]
fn a_copied_slot_decodes_the_same_and_its_neighbours_stay() {
    let (cpu, raw) = (Cpu::shared(), quant::raw(&shape(), Dtype::Bf16).unwrap());
    let (from, _) = raw_page(&cpu, &raw);
    for bits in [1.0, 2.5, 3.0, 5.0, 7.0, 8.0] {
        let packed = codec(&CodecSpec::turboquant(bits), &CodecSpec::turboquant(bits));
        let [mut a, mut b] = [page(&cpu, &packed), page(&cpu, &packed)];
        cpu.seal((&raw, &packed), &[&from], &from_on(0), &mut a, 16);
        cpu.seal((&raw, &packed), &[&from], &from_on(7), &mut b, 48);
        let before: Vec<_> = [48, 50].map(|slot| decode(&packed, Side::Key, &b, slot)).into();
        cpu.copy_slot(&packed, (&a, 16 + 3), (&mut b, 49));
        for side in [Side::Key, Side::Value] {
            assert_eq!(decode(&packed, side, &b, 49), decode(&packed, side, &a, 19));
        }
        assert_eq!([48, 50].map(|slot| decode(&packed, Side::Key, &b, slot)).to_vec(), before);
    }
}
