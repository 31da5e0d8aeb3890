//! The scalar encoder equals the NumPy specification of `tests/reference`, bit for bit, by its golden files.

#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

use half::f16;
use kvrs_codec::codebook::Book;
use kvrs_codec::encode::EncodeContext;
use kvrs_codec::phasor::Phasors;
use kvrs_codec::quant::{self, CodecSpec, ConstantCache, SideContext};
use kvrs_codec::{Dtype, Elem, HeadCodec, Side, layout, rng};
use kvrs_core::{LayerShape, Pairing, Rope};
use safetensors::SafeTensors;
use std::path::Path;

const SIDES: [(Side, &str); 2] = [(Side::Key, "key"), (Side::Value, "value")];

struct Golden(Vec<u8>);

impl Golden {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden")
            .join(format!("{name}.safetensors"));
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
    }

    fn elements<const N: usize, T>(&self, name: &str, element: fn([u8; N]) -> T) -> Vec<T> {
        self.bytes(name).as_chunks().0.iter().map(|&b| element(b)).collect()
    }

    fn f32(&self, name: &str) -> Vec<f32> {
        self.elements(name, f32::from_le_bytes)
    }

    fn u64(&self, name: &str) -> Vec<u64> {
        self.elements(name, u64::from_le_bytes)
    }

    fn i64(&self, name: &str) -> Vec<i64> {
        self.elements(name, i64::from_le_bytes)
    }

    fn u16(&self, name: &str) -> Vec<u16> {
        self.elements(name, u16::from_le_bytes)
    }

    fn metadata(&self, name: &str) -> String {
        let (_, header) = SafeTensors::read_metadata(&self.0).unwrap();
        header.metadata().as_ref().unwrap()[name].clone()
    }

    fn seed(&self) -> u64 {
        self.metadata("seed").parse().unwrap()
    }

    fn names(&self) -> Vec<String> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        file.names().into_iter().map(str::to_owned).collect()
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn streams_signs_and_rotations_are_the_same_numbers() {
    let file = Golden::read("rng");
    let seed = file.seed();
    let words = |key: u64| (0..8).map(|i| rng::word(key, i)).collect::<Vec<_>>();
    assert_eq!(words(0), file.u64("words.seed0"));
    assert_eq!(words(seed), file.u64("words.seed"));
    for (side, name) in SIDES {
        for d in [16, 64, 128, 256] {
            let key = rng::stream(seed, rng::ROTATION_SIGNS, side, d);
            assert_eq!([key][..], file.u64(&format!("signs.{name}.d{d}.stream")));
            let signs: Vec<u8> = rng::signs(key, 3, d).iter().map(|&s| s as i8 as u8).collect();
            assert_eq!(signs, file.bytes(&format!("signs.{name}.d{d}")));
        }
    }
    let key = rng::stream(seed, rng::DENSE_ROTATION, Side::Key, 80);
    assert_eq!([key][..], file.u64("gaussians.d80.stream"));
    assert_eq!(rng::gaussian(key, 80), file.elements("gaussians.d80", f64::from_le_bytes));
    assert_eq!(bits(&rng::dense_rotation(key, 80)), bits(&file.f32("dense.key.d80")));
    let key = rng::stream(seed, rng::DENSE_ROTATION, Side::Value, 3);
    assert_eq!(bits(&rng::dense_rotation(key, 3)), bits(&file.f32("dense.value.d3")));
}

#[test]
fn phasors_are_the_same_at_every_position() {
    let file = Golden::read("phasor");
    let positions = file.i64("positions");
    for (d, theta) in [(64, 1e4), (128, 1e6)] {
        let given = Rope { inv_freq: Some(file.f32(&format!("d{d}.inv_freq"))), ..Rope::new(1.0) };
        let phasors = Phasors::new(&given, d).unwrap();
        assert_eq!(phasors, Phasors::new(&Rope::new(theta), d).unwrap(), "powers of theta {theta}");
        let turns: Vec<u64> = phasors.pairs().iter().map(|p| p.turn).collect();
        assert_eq!(turns, file.u64(&format!("d{d}.phase_step")));
        let all = positions.iter().flat_map(|&p| (0..d / 2).map(move |j| (p, j)));
        let (cos, sin): (Vec<f32>, Vec<f32>) = all.map(|(p, j)| phasors.cos_sin(p, j)).unzip();
        assert_eq!(bits(&cos), bits(&file.f32(&format!("d{d}.cos"))));
        assert_eq!(bits(&sin), bits(&file.f32(&format!("d{d}.sin"))));
    }
}

#[test]
fn codebooks_are_the_same_numbers() {
    let file = Golden::read("codebook");
    for width in 1..=8 {
        let book = Book::gaussian(width);
        let codes = 0..=((1u32 << width) - 1) as u8;
        let values: Vec<f32> = codes.clone().map(|code| book.value(code)).collect();
        assert_eq!(bits(&values), bits(&file.f32(&format!("b{width}.values"))));
        assert_eq!(bits(&[book.step]), bits(&file.f32(&format!("b{width}.step"))));
        let level = |code: u8| book.levels.get(usize::from(code)).map_or(f32::from(code), |&l| f32::from(l));
        let levels: Vec<f32> = codes.map(|code| level(code) + book.zero()).collect();
        assert_eq!(bits(&levels), bits(&file.f32(&format!("b{width}.levels"))));
        if width <= 6 {
            assert_eq!(bits(book.thresholds), bits(&file.f32(&format!("b{width}.thresholds"))));
        }
    }
}

#[test]
fn codes_lie_in_the_same_bits() {
    let file = Golden::read("layout");
    for width in 1..=8u32 {
        for channels in [16, 32, 48] {
            let codes = file.u16(&format!("w{width}.c{channels}.codes"));
            for (side, name) in SIDES {
                let mut tile = vec![0xA5; layout::tile_bytes(width, channels)];
                for block in 0..channels / 16 {
                    let at = |i: usize| codes[i / 16 * channels + 16 * block + i % 16] as u8;
                    layout::pack_block(side, width, &std::array::from_fn(at), &mut tile, block, channels);
                }
                assert!(
                    tile == file.bytes(&format!("w{width}.c{channels}.{name}")),
                    "{width} bits, {channels}, {name}"
                );
            }
        }
    }
}

#[test]
fn raw_pages_hold_the_same_bytes() {
    let file = Golden::read("layout");
    let shape =
        LayerShape { query_heads: 1, kv_heads: 1, key_dim: 48, value_dim: 48, rope: None, sliding: None };
    let codec = quant::raw(&shape, Dtype::F16).unwrap();
    let mut page = vec![0; codec.desc.page_bytes as usize];
    for (side, name) in SIDES {
        let rows: Vec<f32> =
            file.u16(&format!("raw16.{name}.rows")).iter().map(|&b| f16::from_bits(b).to_f32()).collect();
        let run = &codec.desc.side(side).runs[0];
        let tile = &mut page[layout::run_range(&codec.desc, side, run, 0)];
        for (token, row) in rows.chunks(48).enumerate() {
            layout::write_row(Elem::F16, row, tile, token, 48);
        }
    }
    assert!(page == file.bytes("raw16.page"));
}

/// One golden file of TurboQuant pages with what its cases are built from.
struct Cases {
    file: Golden,
    d: usize,
    rope: Rope,
}

impl Cases {
    fn read(d: usize) -> Self {
        let file = Golden::read(&format!("turboquant_d{d}"));
        let interleaved = file.metadata("pairing") == "interleaved";
        let rope = Rope {
            theta: 1.0,
            dim: Some(file.metadata("rotary_dim").parse().unwrap()),
            pairing: if interleaved { Pairing::Interleaved } else { Pairing::Half },
            inv_freq: Some(file.f32("offset.inv_freq")),
            attention_factor: file.metadata("attention_factor").parse().unwrap(),
        };
        Self { file, d, rope }
    }

    /// The key constant with zeros in pairs that are not kept, and the value mean.
    fn constant(&self, side: Side) -> Vec<f32> {
        if side == Side::Value {
            return self.file.f32("offset.mean");
        }
        let (mut k0, keep) = (self.file.f32("offset.k0"), self.file.bytes("offset.keep"));
        let phasors = Phasors::new(&self.rope, self.d).unwrap();
        for pair in phasors.pairs().iter().zip(keep).filter(|(_, keep)| *keep == 0).map(|(pair, _)| pair) {
            k0[pair.a] = 0.0;
            k0[pair.b.unwrap()] = 0.0;
        }
        k0
    }

    fn codec(&self, bits: f64, offset: bool) -> HeadCodec {
        let cache = &mut ConstantCache::default();
        let mut build = |side: Side| {
            let context = SideContext {
                side,
                d: self.d,
                layer: 0,
                seed: self.file.seed(),
                window: Dtype::F16,
                rope: Some(&self.rope),
                constant: offset.then(|| self.constant(side).into()),
                group: 0,
                arrays: None,
            };
            CodecSpec::turboquant(bits).build(&context, cache).unwrap()
        };
        let (key, value) = (build(Side::Key), build(Side::Value));
        quant::assemble(key, value, 1).unwrap()
    }

    /// The page of the first `filled` tokens.
    fn page(&self, codec: &HeadCodec, filled: usize) -> Vec<u8> {
        let mut page = vec![0; codec.desc.page_bytes as usize];
        let positions = self.file.i64("positions");
        for (side, name) in SIDES {
            let rows = self.file.f32(&format!("input.{name}"));
            let context = EncodeContext::new(codec, side);
            let encoder = context.codec.encoder.as_ref().unwrap();
            encoder.encode(&context, &rows[..filled * self.d], &positions[..filled], &mut page, 0);
        }
        page
    }
}

#[test]
fn turboquant_pages_hold_the_same_bytes() {
    let mut cases = 0;
    for d in [64, 80, 128, 256] {
        let golden = Cases::read(d);
        for name in golden.file.names() {
            let Some((case, filled)) = name.split_once(".page") else { continue };
            let (kind, rate) = case.split_once(".b").unwrap();
            let codec = golden.codec(rate.parse().unwrap(), kind == "offset");
            let page = golden.page(&codec, filled.parse().unwrap());
            let expected = golden.file.bytes(&name);
            let differing = page.iter().zip(&expected).filter(|(a, b)| a != b).count();
            assert!(
                page.len() == expected.len() && differing == 0,
                "d {d}, {name}: {differing} bytes differ"
            );
            cases += 1;
        }
    }
    assert_eq!(cases, 4 * (9 + 3 + 3), "every rate with and without offset, and pages that are part filled");
}
