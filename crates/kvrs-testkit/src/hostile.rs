//! Files that lie: mutants of safetensors files, with checksums that fit where the lie is to get behind them.

use crate::tensor::Noise;
use serde_json::Value;

/// A section of a file: name, first and last byte in the whole file.
type Span = (String, usize, usize);

/// End of the header, and each section; `None` if that cannot be told.
fn spans(bytes: &[u8]) -> Option<(usize, Vec<Span>)> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let end = 8usize.checked_add(usize::try_from(length).ok()?)?;
    let header: Value = serde_json::from_slice(bytes.get(8..end)?).ok()?;
    let tensors = header.as_object()?.iter().filter(|(name, _)| *name != "__metadata__");
    let span = |(name, info): (&String, &Value)| {
        let at = |i: usize| end.checked_add(usize::try_from(info["data_offsets"][i].as_u64()?).ok()?);
        Some((name.clone(), at(0)?, at(1)?))
    };
    let mut spans = tensors.map(span).collect::<Option<Vec<Span>>>()?;
    spans.sort_by_key(|(_, from, to)| (*from, *to));
    let inside = |(_, from, to): &Span| from <= to && *to <= bytes.len();
    spans.iter().all(inside).then_some((end, spans))
}

/// Makes the checksums of a sequence file those of what it says, as far as it can still be read.
pub fn fix_checksums(bytes: &mut [u8]) {
    let Some((end, spans)) = spans(bytes) else { return };
    let Some(((_, at, to), sections)) = spans.split_last() else { return };
    if to - at != 4 * (sections.len() + 1) {
        return;
    }
    let sums = sections.iter().map(|(_, from, to)| crc32fast::hash(&bytes[*from..*to]));
    let sums: Vec<u32> = sums.chain([crc32fast::hash(&bytes[..end])]).collect();
    bytes[*at..*to].copy_from_slice(&sums.iter().flat_map(|sum| sum.to_le_bytes()).collect::<Vec<u8>>());
}

/// The file with its header replaced by `change(header)`; checksums fit.
///
/// # Panics
/// If the file has no header.
#[must_use]
pub fn with_header(bytes: &[u8], change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let (end, _) = spans(bytes).expect("a whole file");
    let mut header: Value = serde_json::from_slice(&bytes[8..end]).expect("JSON");
    change(&mut header);
    let mut text = header.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut file = [&(text.len() as u64).to_le_bytes(), &text[..], &bytes[end..]].concat();
    fix_checksums(&mut file);
    file
}

/// First and last byte of a section, and of the header (`""`).
///
/// # Panics
/// If the file has no such section.
#[must_use]
pub fn section(bytes: &[u8], name: &str) -> std::ops::Range<usize> {
    let (end, spans) = spans(bytes).expect("a whole file");
    if name.is_empty() {
        return 0..end;
    }
    let (_, from, to) = spans.into_iter().find(|(found, ..)| found == name).expect("a section of the file");
    from..to
}

/// Names of the sections, in the order of the file.
///
/// # Panics
/// If the file has no header.
#[must_use]
pub fn sections(bytes: &[u8]) -> Vec<String> {
    spans(bytes).expect("a whole file").1.into_iter().map(|(name, ..)| name).collect()
}

/// Lengths at which a cut is interesting: the ends of header and sections and their neighbours, and round ones.
#[must_use]
pub fn cuts(bytes: &[u8]) -> Vec<usize> {
    let mut ends = vec![0, 8, 64, bytes.len() / 2, bytes.len()];
    if let Some((end, spans)) = spans(bytes) {
        ends.push(end);
        ends.extend(spans.iter().map(|(_, _, to)| *to));
    }
    let near = |end: usize| [end.saturating_sub(8), end.saturating_sub(1), end, end + 1];
    let mut cuts: Vec<usize> = ends.into_iter().flat_map(near).filter(|cut| *cut < bytes.len()).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// One random lie: bytes, words, a cut, a piece that moves; mostly where the file says what it holds, and mostly with
/// checksums that fit.
#[must_use]
pub fn mutant(bytes: &[u8], noise: &mut Noise) -> Vec<u8> {
    let mut file = bytes.to_vec();
    for _ in 0..=noise.below(3) {
        lie(&mut file, noise);
    }
    if noise.below(4) > 0 {
        fix_checksums(&mut file);
    }
    file
}

fn lie(file: &mut Vec<u8>, noise: &mut Noise) {
    if file.is_empty() {
        return;
    }
    let area = match spans(file) {
        Some((end, spans)) if noise.below(4) > 0 => {
            let small: Vec<_> = spans.into_iter().filter(|(name, ..)| !name.starts_with("pages")).collect();
            match noise.below(small.len() + 1) {
                i if i < small.len() => small[i].1..small[i].2.max(small[i].1 + 1).min(file.len()),
                _ => 0..end,
            }
        }
        _ => 0..file.len(),
    };
    if area.is_empty() {
        return;
    }
    let at = area.start + noise.below(area.len());
    match noise.below(8) {
        0 => file[at] = 0,
        1 => file[at] = 0xFF,
        2 => file[at] = file[at].wrapping_add(1),
        3 => file[at] ^= 1 << noise.below(8),
        4 => word(file, at, [1 << 31, 1 << 60, u64::MAX, 0, 1][noise.below(5)]),
        5 => file.truncate(at),
        6 => {
            let n = noise.below(area.len().min(64)) + 1;
            let piece: Vec<u8> = file[at..(at + n).min(file.len())].to_vec();
            let to = noise.below(file.len());
            file.splice(to..to, piece);
        }
        _ => {
            file[at] = b"0123456789"[noise.below(10)];
        }
    }
}

/// Writes a number over the bytes from `at` on.
fn word(file: &mut [u8], at: usize, number: u64) {
    file[at..].iter_mut().zip(number.to_le_bytes()).for_each(|(to, byte)| *to = byte);
}
