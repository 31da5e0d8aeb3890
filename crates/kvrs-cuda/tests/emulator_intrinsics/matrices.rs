//! ldmatrix and mma: where each element lies by the drawings of the PTX manual, and products against f64.

use super::{Array, Random, launch, launchers, words};
use half::{bf16, f16};

#[test]
fn ldmatrix_gives_each_lane_its_elements() {
    let elements: Vec<u16> = (0..256).map(|i| 0x1000 + i).collect();
    let rows: Vec<u32> =
        elements.chunks(2).map(|pair| u32::from(pair[1]) << 16 | u32::from(pair[0])).collect();
    words("try_ldmatrix", 32, [1, 1, 1], &rows, 0, 384, |out| {
        let element =
            |matrix: usize, row: usize, column: usize| u32::from(elements[64 * matrix + 8 * row + column]);
        for (lane, got) in out.chunks(12).enumerate() {
            let (row, column) = (lane / 4, 2 * (lane % 4));
            let straight = |m| element(m, row, column) | element(m, row, column + 1) << 16;
            let transposed = |m| element(m, column, row) | element(m, column + 1, row) << 16;
            let (x4, x4_trans) = ([0, 1, 2, 3].map(straight), [0, 1, 2, 3].map(transposed));
            let expected = [&x4[..], &x4_trans, &x4[..2], &x4_trans[..2]].concat();
            assert_eq!(got, expected, "lane {lane}");
        }
    });
}

#[repr(C)]
struct Mma {
    a: u64,
    b: u64,
    c: u64,
    out: u64,
    format: u32,
}

/// A of 16 rows by `k`, B of `k` by 8, C of 16 by 8, row by row.
struct Product<T> {
    a: Vec<T>,
    b: Vec<T>,
    c: Vec<u32>,
}

/// The registers of all lanes: `units` elements of `32 / units` bits in one. Element j of register r of lane l is the
/// element of A or B at the place that the manual draws.
fn fragments<T: Copy>(product: &Product<T>, units: usize, bits: impl Fn(T) -> u32) -> (Vec<u32>, Vec<u32>) {
    let k = 8 * units;
    let pack = |of: &dyn Fn(usize) -> T| (0..units).fold(0, |word, j| word | bits(of(j)) << (32 / units * j));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for lane in 0..32 {
        let (group, first) = (lane / 4, units * (lane % 4));
        for r in 0..4 {
            let (row, column) = (group + 8 * (r % 2), first + 4 * units * (r / 2));
            a.push(pack(&|j| product.a[row * k + column + j]));
        }
        for r in 0..2 {
            let row = first + 4 * units * r;
            b.push(pack(&|j| product.b[(row + j) * 8 + group]));
        }
    }
    (a, b)
}

/// Where element r of lane l of C lies.
fn place(lane: usize, r: usize) -> usize {
    (lane / 4 + 8 * (r / 2)) * 8 + 2 * (lane % 4) + r % 2
}

/// Runs products and checks every element of every result: `check(product, row, column, got)`.
fn multiply<T: Copy>(
    products: &[Product<T>],
    (format, units): (u32, usize),
    bits: impl Fn(T) -> u32,
    check: impl Fn(&Product<T>, usize, usize, u32),
) {
    let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
    for product in products {
        let (rows, columns) = fragments(product, units, &bits);
        a.extend(rows);
        b.extend(columns);
        c.extend((0..128).map(|i| product.c[place(i / 4, i % 4)]));
    }
    for launcher in launchers() {
        let launcher = launcher.as_ref();
        let [a, b, c] = [&a, &b, &c].map(|words| Array::of(launcher, words));
        let out = Array::<u32>::new(launcher, 128 * products.len());
        let args = Mma { a: a.address, b: b.address, c: c.address, out: out.address, format };
        launch(launcher, "try_mma", 32, [products.len() as u32, 1, 1], &args).unwrap();
        for (i, got) in out.read().into_iter().enumerate() {
            let at = place(i / 4 % 32, i % 4);
            check(&products[i / 128], at / 8, at % 8, got);
        }
    }
}

/// Whether `got` is C plus the products to within the 17 roundings of a device that adds one after the other in f32
/// with one bit lost to truncation.
fn is_close(product: &Product<u16>, row: usize, column: usize, got: u32, value: impl Fn(u16) -> f64) {
    let terms = (0..16).map(|k| value(product.a[row * 16 + k]) * value(product.b[k * 8 + column]));
    let all: Vec<f64> = terms.chain([f64::from(f32::from_bits(product.c[row * 8 + column]))]).collect();
    let (expected, size) = (all.iter().sum::<f64>(), all.iter().map(|term| term.abs()).sum::<f64>());
    let got = f64::from(f32::from_bits(got));
    assert!(
        (got - expected).abs() <= 17.0 * size * 2f64.powi(-22),
        "row {row}, column {column}: {got}, {expected}"
    );
}

fn products<T>(
    count: usize,
    k: usize,
    element: impl Fn(&mut Random) -> T,
    c: impl Fn(&mut Random) -> u32,
) -> Vec<Product<T>> {
    let mut random = Random(11);
    let mut product = || Product {
        a: (0..16 * k).map(|_| element(&mut random)).collect(),
        b: (0..8 * k).map(|_| element(&mut random)).collect(),
        c: (0..128).map(|_| c(&mut random)).collect(),
    };
    (0..count).map(|_| product()).collect()
}

fn unit(random: &mut Random) -> f32 {
    random.word() as i32 as f32 / 2f32.powi(31)
}

#[test]
fn mma_of_halves_and_of_bfloat16_is_the_product() {
    let c = |random: &mut Random| (4.0 * unit(random)).to_bits();
    let halves = products(10, 16, |random| f16::from_f32(unit(random)).to_bits(), c);
    multiply(&halves, (0, 2), u32::from, |product, row, column, got| {
        is_close(product, row, column, got, |bits| f16::from_bits(bits).to_f64());
    });
    let brains = products(10, 16, |random| bf16::from_f32(100.0 * unit(random)).to_bits(), c);
    multiply(&brains, (1, 2), u32::from, |product, row, column, got| {
        is_close(product, row, column, got, |bits| bf16::from_bits(bits).to_f64());
    });
}

#[test]
fn mma_of_small_integers_in_halves_is_exact() {
    let element = |random: &mut Random| f16::from_f32((random.word() % 33) as f32 - 16.0).to_bits();
    let whole = products(4, 16, element, |random| ((random.word() % 1000) as f32).to_bits());
    multiply(&whole, (0, 2), u32::from, |product, row, column, got| {
        let value = |bits: u16| f16::from_bits(bits).to_f32();
        let sum: f32 =
            (0..16).map(|k| value(product.a[row * 16 + k]) * value(product.b[k * 8 + column])).sum();
        assert_eq!(f32::from_bits(got), sum + f32::from_bits(product.c[row * 8 + column]));
    });
}

#[test]
fn mma_of_bytes_is_exact_and_wraps() {
    let mut all = products(10, 32, |random| random.word() as i8, Random::word);
    for (a, b, c) in [(-128, -128, 0), (-128, 127, 0x8000_0000), (-128, -128, 0x7fff_ffff), (127, 127, 5)] {
        all.push(Product { a: vec![a; 512], b: vec![b; 256], c: vec![c; 128] });
    }
    let bits = |element: i8| u32::from(element as u8);
    multiply(&all, (2, 4), bits, |product, row, column, got| {
        let term = |k: usize| i64::from(product.a[row * 32 + k]) * i64::from(product.b[k * 8 + column]);
        let sum: i64 = (0..32).map(term).sum();
        assert_eq!(got, (sum + i64::from(product.c[row * 8 + column])) as u32, "row {row}, column {column}");
    });
}
