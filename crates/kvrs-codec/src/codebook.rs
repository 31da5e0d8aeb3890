//! Codebooks of unit variance: int8 levels times a step up to 6 bits, uniform mid-rise at 7 and 8.
//!
//! The levels are integers so that integer kernels and this scalar meaning agree exactly. One gaussian book
//! serves all dimensions from 64 on. Loss of mean squared error against Lloyd-Max: 0, .0001, .04, .22, .67 and
//! 2.0 % at 1 to 6 bits. At 7 and 8 bits (3.04e-4, 8.8e-5) the books stay above TurboQuant's bound.

/// The codebook of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Book {
    /// Bits of a code.
    pub width: u32,
    /// Levels by code, ascending; empty for uniform books, whose level is `code + zero`.
    pub levels: &'static [i8],
    /// Factor of a level.
    pub step: f32,
    /// `2^width - 1` ascending borders between codes; empty for uniform books.
    pub thresholds: &'static [f32],
}

/// Both halves of a symmetric book from its positive levels.
const fn mirrored<const N: usize>(half: &[i8]) -> [i8; N] {
    assert!(2 * half.len() == N);
    let mut levels = [0; N];
    let mut i = 0;
    while i < half.len() {
        levels[half.len() + i] = half[i];
        levels[half.len() - 1 - i] = -half[i];
        i += 1;
    }
    levels
}

/// Midpoints of the levels times the step, each rounded once; the middle one is exactly 0.
const fn midpoints<const N: usize, const T: usize>(levels: &[i8; N], step: f32) -> [f32; T] {
    let mut thresholds = [0.0; T];
    let mut i = 0;
    while i < T {
        thresholds[i] = (levels[i] as f32 + levels[i + 1] as f32) * 0.5 * step;
        i += 1;
    }
    thresholds
}

macro_rules! book {
    ($name:ident, $width:literal, $step:literal, $half:expr) => {
        static $name: Book = {
            static LEVELS: [i8; 1 << $width] = mirrored(&$half);
            static THRESHOLDS: [f32; (1 << $width) - 1] = midpoints(&LEVELS, $step);
            Book { width: $width, levels: &LEVELS, step: $step, thresholds: &THRESHOLDS }
        };
    };
}

book!(BOOK_1, 1, 0.012_664_83, [63]);
book!(BOOK_2, 2, 0.025_172_26, [18, 60]);
book!(BOOK_3, 3, 0.034_637_06, [7, 22, 39, 62]);
book!(BOOK_4, 4, 0.044_802_22, [3, 9, 15, 21, 28, 36, 46, 61]);
book!(BOOK_5, 5, 0.027_546_84, [2, 7, 12, 17, 22, 27, 32, 38, 44, 50, 57, 65, 74, 84, 98, 118]);
book!(
    BOOK_6,
    6,
    0.034_702_06,
    [
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 36, 39, 42, 45, 48, 51, 54, 58, 62,
        66, 71, 77, 84, 93, 108
    ]
);
static BOOK_7: Book = Book::uniform(7, 0.0570);
static BOOK_8: Book = Book::uniform(8, 0.0307);

/// The odd numbers 1, 3, 5 ..
const fn odd<const N: usize>() -> [i8; N] {
    assert!(N <= 64);
    let mut levels = [0; N];
    let mut i = 0;
    while i < N {
        levels[i] = 2 * i as i8 + 1;
        i += 1;
    }
    levels
}

book!(EVEN_2, 2, 0.497_85, odd::<2>());
book!(EVEN_3, 3, 0.293_00, odd::<4>());
book!(EVEN_4, 4, 0.167_60, odd::<8>());
book!(EVEN_5, 5, 0.094_05, odd::<16>());
book!(EVEN_6, 6, 0.052_05, odd::<32>());

impl Book {
    /// The book for gaussian channels of unit variance.
    ///
    /// # Panics
    /// If `width` is not 1 to 8.
    #[must_use]
    pub fn gaussian(width: u32) -> &'static Self {
        match width {
            1 => &BOOK_1,
            2 => &BOOK_2,
            3 => &BOOK_3,
            4 => &BOOK_4,
            5 => &BOOK_5,
            6 => &BOOK_6,
            7 => &BOOK_7,
            8 => &BOOK_8,
            _ => panic!("codebooks have 1 to 8 bits, not {width}"),
        }
    }

    /// The evenly spaced book of least squared error for gaussian channels of unit variance: odd levels times half a
    /// step (`RaBitQ`'s grid). One, 7 and 8 bits are those of [`Self::gaussian`], which are even too.
    ///
    /// # Panics
    /// If `width` is not 1 to 8.
    #[must_use]
    pub fn even(width: u32) -> &'static Self {
        match width {
            2 => &EVEN_2,
            3 => &EVEN_3,
            4 => &EVEN_4,
            5 => &EVEN_5,
            6 => &EVEN_6,
            _ => Self::gaussian(width),
        }
    }

    /// A uniform mid-rise book of any step.
    #[must_use]
    pub const fn uniform(width: u32, step: f32) -> Self {
        Self { width, levels: &[], step, thresholds: &[] }
    }

    /// Added to a code to give its level: `1/2 - 2^(width - 1)` for uniform books, 0 for tables.
    #[must_use]
    pub fn zero(&self) -> f32 {
        if self.levels.is_empty() { 0.5 - (1u32 << (self.width - 1)) as f32 } else { 0.0 }
    }

    /// The code of `u`: the thresholds at or below it, or `rint(u / step - zero)` clamped, ties to even.
    #[must_use]
    pub fn code(&self, u: f32) -> u8 {
        let mut code = [0; 16];
        self.codes(&[u; 16], &mut code);
        code[0]
    }

    /// The codes of `u`, whose length is a multiple of 16.
    ///
    /// # Panics
    /// If the lengths differ or are no multiple of 16.
    pub fn codes(&self, u: &[f32], codes: &mut [u8]) {
        assert!(u.len() == codes.len() && u.len().is_multiple_of(16), "whole blocks of 16 channels");
        for (u, codes) in u.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
            *codes = if self.levels.is_empty() { self.uniform_codes(u) } else { self.count(u) };
        }
    }

    fn count(&self, u: &[f32; 16]) -> [u8; 16] {
        let mut counts = [0u32; 16];
        for t in self.thresholds {
            counts.iter_mut().zip(u).for_each(|(n, u)| *n += u32::from(u >= t));
        }
        counts.map(|n| n as u8)
    }

    /// Clamping first and adding 2^23 is rounding to an integer with ties to even: both bounds are integers.
    fn uniform_codes(&self, u: &[f32; 16]) -> [u8; 16] {
        let (inverse, zero, top) = (1.0 / self.step, self.zero(), ((1u32 << self.width) - 1) as f32);
        u.map(|u| (((u * inverse) - zero).clamp(0.0, top) + 8_388_608.0).to_bits() as u8)
    }

    /// The value that a code stands for: `f32(level * step)`.
    ///
    /// # Panics
    /// If the code has more than `width` bits.
    #[must_use]
    pub fn value(&self, code: u8) -> f32 {
        let level = if self.levels.is_empty() {
            f32::from(code) + self.zero()
        } else {
            f32::from(self.levels[usize::from(code)])
        };
        level * self.step
    }
}

#[cfg(test)]
mod design;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_has_its_own_code_and_thresholds_go_up() {
        for width in 1..=8 {
            let book = Book::gaussian(width);
            for code in 0..1u32 << width {
                assert_eq!(u32::from(book.code(book.value(code as u8))), code, "{width} bits");
            }
            for (i, &t) in book.thresholds.iter().enumerate() {
                assert_eq!((usize::from(book.code(t)), usize::from(book.code(t.next_down()))), (i + 1, i));
            }
        }
    }

    #[test]
    fn the_middle_threshold_is_zero_and_both_zeros_go_up() {
        for width in 1..=8u32 {
            let book = Book::gaussian(width);
            let middle = 1u8 << (width - 1);
            assert_eq!((book.code(0.0), book.code(-0.0)), (middle, middle), "{width} bits");
        }
    }

    #[test]
    fn even_books_have_the_steps_of_least_error() {
        for (width, step) in [(2, 0.9957), (3, 0.5860), (4, 0.3352), (5, 0.1881), (6, 0.1041), (7, 0.0570)] {
            let book = Book::even(width);
            let values: Vec<f32> = (0..1u32 << width).map(|code| book.value(code as u8)).collect();
            assert_eq!(values[values.len() / 2], step as f32 / 2.0);
            for pair in values.windows(2) {
                assert!((pair[1] - pair[0] - step as f32).abs() < 1e-6, "{width} bits");
            }
            // No other step would err less: the error's derivative, E[(v - x) v], is zero.
            let (mut along, mut square) = (0.0, 0.0);
            for x in (-60_000..60_000).map(|i| (f64::from(i) + 0.5) / 1e4) {
                let (v, weight) = (f64::from(book.value(book.code(x as f32))), (-x * x / 2.0).exp());
                (along, square) = (along + weight * x * v, square + weight * v * v);
            }
            assert!((along / square - 1.0).abs() < 2e-4, "{width} bits: {along} of {square}");
        }
    }

    #[test]
    fn uniform_codes_clamp_and_round_ties_to_even() {
        let book = Book::uniform(8, 1.0);
        let cases =
            [(-1e30, 0), (1e30, 255), (f32::INFINITY, 255), (0.0, 128), (1.0, 128), (2.0, 130), (-2.0, 126)];
        for (u, code) in cases {
            assert_eq!(book.code(u), code, "{u}");
        }
    }
}
