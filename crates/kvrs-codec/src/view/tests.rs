use super::*;
use half::{bf16, f16};

fn bytes(n: usize) -> Vec<u8> {
    (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

#[test]
fn a_transposed_view_reads_the_same_elements() {
    let data = bytes(2 * 3 * 4);
    let g = Geometry { strides: [24, 4, 8, 1], ..Geometry::contiguous(Dtype::F32, [1, 2, 3, 4]) };
    let mut row = [0.0; 4];
    View::new("k", &data, g).unwrap().read_row([0, 1, 2], &mut row);
    assert_eq!(row, [20.0, 21.0, 22.0, 23.0]);
}

#[test]
fn negative_strides_read_backwards() {
    let data = bytes(4);
    let g = Geometry { strides: [4, 4, 4, -1], start: 12, ..Geometry::contiguous(Dtype::F32, [1, 1, 1, 4]) };
    let mut row = [0.0; 4];
    View::new("k", &data, g).unwrap().read_row([0, 0, 0], &mut row);
    assert_eq!(row, [3.0, 2.0, 1.0, 0.0]);
}

/// Rows of 300 channels, contiguous and with every second element, as one dtype.
fn rows(dtype: Dtype) -> (Vec<u8>, [Geometry; 2]) {
    let value = |i: usize| (i as f32 * 0.37).sin() * 1.7_f32.powi(i as i32 % 60 - 40);
    let mut data = vec![0; 2 * 600 * dtype.size()];
    let whole = Geometry::contiguous(dtype, [1, 1, 2, 600]);
    let mut to = ViewMut::new("k", &mut data, whole).unwrap();
    for t in 0..2 {
        to.write_row([0, 0, t], &(0..600).map(|i| value(t * 600 + i)).collect::<Vec<_>>());
    }
    let narrow = Geometry { shape: [1, 1, 2, 300], ..whole };
    (data, [narrow, Geometry { strides: [1200, 1200, 600, 2], ..narrow }])
}

#[test]
fn a_copied_row_holds_the_elements_rounded_one_by_one() {
    for from in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let (data, geometries) = rows(from);
        for (to, geometry) in [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().zip(geometries.iter().cycle())
        {
            for geometry in [geometry, &geometries[1]] {
                let view = View::new("k", &data, *geometry).unwrap();
                let (mut values, mut copy) = ([0.0; 300], vec![0; 300 * to.size()]);
                view.read_row([0, 0, 1], &mut values);
                view.copy_row([0, 0, 1], to, &mut copy);
                let each: Vec<u8> = values
                    .iter()
                    .flat_map(|&x| match to {
                        Dtype::F32 => x.to_le_bytes().to_vec(),
                        Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                        Dtype::Bf16 => bf16::from_f32(x).to_le_bytes().to_vec(),
                    })
                    .collect();
                assert_eq!(copy, each, "{from:?} to {to:?}");
            }
        }
    }
}

#[test]
fn copied_rows_are_the_copies_of_each_row() {
    for from in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let (data, geometries) = rows(from);
        for geometry in geometries.into_iter().chain([Geometry::contiguous(from, [1, 1, 4, 300])]) {
            let view = View::new("k", &data, geometry).unwrap();
            for to in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let (size, tokens) = (300 * to.size(), geometry.shape[2] - 1);
                let (mut each, mut all) = (vec![0; tokens * size], vec![1; tokens * size]);
                for (t, out) in each.chunks_exact_mut(size).enumerate() {
                    view.copy_row([0, 0, 1 + t], to, out);
                }
                view.copy_rows([0, 0, 1], to, &mut all);
                assert!(all == each, "{from:?} to {to:?}");
            }
        }
    }
}

#[test]
fn one_element_beyond_the_limit_is_found_wherever_it_stands() {
    for bad in [2.5, -2.5, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (at, dtype) in [0, 1, 127, 128, 255, 256, 299]
            .into_iter()
            .flat_map(|at| [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|dtype| (at, dtype)))
        {
            let mut row = [-2.0; 300];
            let mut data = vec![0; 2 * 300 * dtype.size()];
            let alone = Geometry::contiguous(dtype, [1, 1, 1, 300]);
            let apart = Geometry { strides: [600, 600, 600, 2], ..alone };
            for geometry in [alone, apart] {
                let within = |row: &[f32], data: &mut [u8], limit: f32| {
                    ViewMut::new("k", data, geometry).unwrap().write_row([0; 3], row);
                    View::new("k", data, geometry).unwrap().row_within([0; 3], limit)
                };
                row[at] = 2.0;
                assert!(within(&row, &mut data, 2.0) && !within(&row, &mut data, 2.0f32.next_down()));
                row[at] = bad;
                assert!(!within(&row, &mut data, 2.0), "{bad} at {at} of {dtype:?}");
            }
        }
    }
}

#[test]
fn every_16_bit_float_is_within_its_own_magnitude_and_within_none_below() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for bits in 0..=u16::MAX {
            let data = bits.to_le_bytes();
            let view = View::new("k", &data, Geometry::contiguous(dtype, [1, 1, 1, 1])).unwrap();
            let mut x = [0.0];
            view.read_row([0; 3], &mut x);
            for limit in [1e-6, 1.0, 2.0, 2.001, 65504.0, dtype.largest_stored(), f32::MAX] {
                assert_eq!(
                    view.row_within([0; 3], limit),
                    x[0].abs() <= limit,
                    "{:?} {} {limit}",
                    dtype,
                    x[0]
                );
            }
        }
    }
}

#[test]
fn a_view_outside_its_bytes_is_refused() {
    let data = bytes(4);
    let g = Geometry::contiguous(Dtype::F32, [1, 1, 2, 4]);
    assert!(View::new("k", &data, g).unwrap_err().to_string().starts_with("k has shape"));
}

#[test]
fn overlapping_output_is_refused() {
    let mut data = bytes(8);
    let g = Geometry { strides: [8, 8, 0, 1], ..Geometry::contiguous(Dtype::F32, [1, 1, 2, 4]) };
    assert!(ViewMut::new("out", &mut data, g).is_err());
}

#[test]
fn output_without_elements_overlaps_nowhere() {
    let g = Geometry::contiguous(Dtype::F32, [1, 4, 0, 32]);
    assert!(ViewMut::new("out", &mut [], g).is_ok());
}
