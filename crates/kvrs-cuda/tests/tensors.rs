//! Tensors in a device's own memory, which the host must not look at: what policies ask of them is fetched.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

use kvrs::{
    CodecSpec, Cpu, Dtype, Error, Geometry, KvStore, LayerShape, ModelShape, Plan, PlanSpec, PolicySpec,
    Queries, Rope, SeqId, Tokens, View, ViewMut,
};
use kvrs_codec::Place;
use kvrs_codec::backend::{Backend, copy_tokens};
use kvrs_codec::view::DeviceBytes;
use kvrs_cuda::{Cuda, Emulator, Launcher};
use serde_json::{Value, json};
use std::sync::Arc;

type Device = Cuda<Emulator>;

fn device() -> Arc<Device> {
    Arc::new(Cuda::new(Emulator::new(3).with_poison(), Place::Cuda(0)).unwrap())
}

/// Numbers that float16 holds exactly.
fn numbers(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
        ((state >> 54) as f32 - 512.0) / 256.0
    };
    (0..n).flat_map(|_| next().to_le_bytes()).collect()
}

/// A tensor on the host and the same in the device's memory, freed with it.
struct Tensor {
    device: Arc<Device>,
    address: u64,
    bytes: Vec<u8>,
    geometry: Geometry,
}

impl Tensor {
    fn new(device: &Arc<Device>, bytes: Vec<u8>, geometry: Geometry) -> Self {
        let address = device.launcher().allocate(bytes.len()).unwrap();
        // SAFETY: the allocation has as many bytes.
        unsafe { device.launcher().upload(&bytes, address) }.unwrap();
        Self { device: Arc::clone(device), address, bytes, geometry }
    }

    /// `[1, heads, tokens, channels]` whose tokens lie apart, with the heads of each together: as models make them.
    fn random(device: &Arc<Device>, [heads, tokens, dim]: [usize; 3], seed: u64) -> Self {
        let strides = [heads * tokens * dim, dim, heads * dim, 1].map(|n| n as isize);
        let geometry = Geometry { dtype: Dtype::F32, shape: [1, heads, tokens, dim], strides, start: 0 };
        Self::new(device, numbers(heads * tokens * dim, seed), geometry)
    }

    fn there(&self) -> DeviceBytes<'_> {
        DeviceBytes::new(0, self.address, self.bytes.len())
    }

    fn view(&self) -> View<'_> {
        View::on_device("x", self.there(), self.geometry).unwrap()
    }

    fn host(&self) -> View<'_> {
        View::new("x", &self.bytes, self.geometry).unwrap()
    }

    fn downloaded(&self) -> Vec<f32> {
        let mut bytes = vec![0; self.bytes.len()];
        // SAFETY: the allocation has as many bytes.
        unsafe { self.device.launcher().download(self.address, &mut bytes) }.unwrap();
        bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: the allocation is this tensor's, and nothing uses it any more.
        unsafe { self.device.launcher().free(self.address, self.bytes.len()) };
    }
}

#[test]
fn tokens_of_any_layout_are_fetched_as_the_host_reads_them() {
    let device = device();
    let (shape, bytes) = ([2, 3, 5, 4], numbers(2 * 3 * 5 * 4, 1));
    let layouts: [([isize; 4], usize); 6] = [
        ([60, 20, 4, 1], 0),
        ([60, 4, 12, 1], 0),
        ([60, 20, -4, 1], 4 * 4),
        ([60, -20, 4, -1], 43),
        ([4, 40, 8, 1], 0),
        ([60, 0, 4, 1], 0),
    ];
    for (strides, start) in layouts {
        let tensor = Tensor::new(
            &device,
            bytes.clone(),
            Geometry { dtype: Dtype::F32, shape, strides, start: 4 * start },
        );
        for columns in [&[][..], &[0], &[4], &[1, 2], &[0, 2, 4], &[0, 1, 2, 3, 4]] {
            let (mut got, mut want) = (vec![7; 3], vec![7; 3]);
            device.fetch(&tensor.view(), 1, columns, &mut got).unwrap();
            copy_tokens(&tensor.host(), 1, columns, &mut want);
            assert_eq!(got, want, "strides {strides:?}, columns {columns:?}");
        }
    }
}

fn plan(policy: Option<PolicySpec>) -> Plan {
    let layer = LayerShape {
        query_heads: 4,
        kv_heads: 2,
        key_dim: 64,
        value_dim: 64,
        rope: Some(Rope::new(1e4)),
        sliding: None,
    };
    let codec = CodecSpec::turboquant(4.0);
    let uniform = PlanSpec::uniform(ModelShape::uniform(1, layer), codec.clone(), codec);
    Plan::new(PlanSpec { sinks: 2, recent: 8, evict: vec![policy], ..uniform }).unwrap()
}

/// Extends both stores by the same tokens, and compares their answers.
fn extend(
    there: &KvStore<Device>,
    here: &KvStore<Cpu>,
    device: &Arc<Device>,
    id: SeqId,
    tokens: usize,
    seed: u64,
) {
    let [q, k, v] =
        [(4, 1), (2, 2), (2, 3)].map(|(heads, i)| Tensor::random(device, [heads, tokens, 64], 10 * seed + i));
    let out = Tensor::random(device, [4, tokens, 64], 0);
    let mut view = ViewMut::on_device("out", out.there(), out.geometry).unwrap();
    there
        .extend(0, &[id], &Queries::new(q.view()), &Tokens::new(k.view(), v.view()), &mut view, None)
        .unwrap();
    let mut want = out.bytes.clone();
    let mut view = ViewMut::new("out", &mut want, out.geometry).unwrap();
    here.extend(0, &[id], &Queries::new(q.host()), &Tokens::new(k.host(), v.host()), &mut view, None)
        .unwrap();
    let want = want.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap()));
    let largest = want.clone().fold(0.0_f32, |most, x| most.max(x.abs()));
    let error = out.downloaded().into_iter().zip(want).fold(0.0_f32, |most, (x, y)| most.max((x - y).abs()));
    assert!(error <= 0.1 * largest, "error {error}, largest {largest}");
}

fn policies() -> Vec<Option<PolicySpec>> {
    let named =
        |name: &str, params: Value| serde_json::from_value(json!({"name": name, "params": params})).unwrap();
    let budget = json!({"budget": 48});
    vec![
        None,
        Some(named("snapkv", json!({"budget": 48, "window": 16}))),
        Some(named("knorm", budget.clone())),
        Some(named("h2o", budget)),
    ]
}

#[test]
fn a_store_whose_tensors_are_on_its_device_keeps_what_one_on_the_cpu_keeps() {
    for policy in policies() {
        let (device, plan) = (device(), plan(policy.clone()));
        let there = KvStore::new(plan.clone(), Arc::clone(&device), None).unwrap();
        let here = KvStore::new(plan, Cpu::shared(), None).unwrap();
        let id = there.create(1).unwrap()[0];
        assert_eq!(here.create(1).unwrap(), [id]);
        there.begin_prompt(&[id]).unwrap();
        here.begin_prompt(&[id]).unwrap();
        extend(&there, &here, &device, id, 70, 1);
        extend(&there, &here, &device, id, 60, 2);
        there.end_prompt(&[id]).unwrap();
        here.end_prompt(&[id]).unwrap();
        (3..6).for_each(|seed| extend(&there, &here, &device, id, 1, seed));
        there.check().unwrap();
        for head in 0..2 {
            let kept = here.decode(0, id, head).unwrap();
            assert!(policy.is_none() || kept.positions.len() < 130);
            assert_eq!(there.decode(0, id, head).unwrap(), kept, "{policy:?}");
        }
    }
}

#[test]
fn tensors_in_another_place_than_the_store_are_refused_by_name() {
    let device = device();
    let store = KvStore::new(plan(None), Arc::clone(&device), None).unwrap();
    let id = store.create(1).unwrap()[0];
    let x = Tensor::random(&device, [2, 3, 64], 1);
    let refused = store.append(0, &[id], &Tokens::new(x.view(), x.host())).unwrap_err();
    assert_eq!(refused.to_string(), "v is on cpu; allowed: cuda:0, where the store is");
    store.append(0, &[id], &Tokens::new(x.view(), x.view())).unwrap();
    let mut outs = [0, 1].map(|_| ViewMut::on_device("out", x.there(), x.geometry).unwrap());
    let [k, v] = &mut outs;
    let refused = store.decode_into(0, &[id], k, v).unwrap_err();
    assert!(matches!(refused, Error::Device { .. }));
    assert_eq!(refused.to_string(), "k_out is on cuda:0; allowed: cpu");
}
